"""batch_invariant=True: its kernels compute what the plain layers compute, and what it refuses.

The kernels run in Triton's interpreter. tests/test_gpu_invariant.py compares bits on a GPU.
"""

import copy
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

import batch_invariance
import plain_layers as plain
from batch_invariance import Request
from call_helpers import make_folder, make_llm
from effort import spread
from engine_helpers import FAMILIES, MODELS, SHAPE
from model_helpers import make_checkpoint
from test_kernels import DEVICE, assert_close, needs_tiles, randn
from test_packed_experts import ALONE, WITH_INPUTS, mixture_of
from transformers import Qwen3MoeConfig

from nanovllm import LLM, TINY_MODEL
from nanovllm.backends.cuda.fused_layers import FusedShardedRMSNorm, fuse
from nanovllm.backends.cuda.invariant import (
    check_model,
    make_prompt_records,
)
from nanovllm.backends.cuda.invariant import (
    invariant_attention as invariant_backend,
)
from nanovllm.backends.cuda.products import INVARIANT
from nanovllm.backends.cuda.triton import invariant_attention, invariant_linear
from nanovllm.backends.cuda.triton.invariant_attention import decode_attention, prefill_attention
from nanovllm.backends.quantised.config import Fp4, Fp8, Integers, Quantization
from nanovllm.backends.quantised.layers import use_quantised_layers
from nanovllm.backends.quantised.packed import PackedWeight
from nanovllm.build import check_batch_invariance
from nanovllm.config import Config
from nanovllm.engine.dtype import tensors_default_to
from nanovllm.features.sampling.logprobs import make_records
from nanovllm.layers.attention import AttentionOptions, KVCache, PackedKV, PagedKV
from nanovllm.layers.context import PrefillMetadata
from nanovllm.layers.linear import Shard
from nanovllm.layers.norm import ShardedRMSNorm
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models import build_model, load_model_config

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@needs_tiles
@pytest.mark.parametrize(
    "rows, outputs, inputs, has_bias",
    [
        (1, 100, 72, True),
        (20, 64, 136, False),
        (20, 64, 8328, False),  # long sums
        (70, 40, 72, True),
        (300, 72, 72, False),
        (1, 20, 2048, True),  # a sum of several chains
        (2, 20, 2048, False),
        (20, 20, 2048, False),
        (300, 20, 2048, False),
    ],
)
def test_a_product_equals_its_twin(rows, outputs, inputs, has_bias):
    x = randn(rows, inputs, dtype=torch.float16)
    weight = (randn(2 * outputs, inputs) / inputs**0.5).half()
    bias = randn(2 * outputs, dtype=torch.float16) if has_bias else None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).half()
    assert_close(invariant_linear.linear(x, weight, bias), expected)
    gated = plain.activate_and_mul(expected)
    assert_close(invariant_linear.gated_linear(x, weight, bias), gated)


@spread({"name": list(ALONE | WITH_INPUTS), "tokens": [1, 40]})
def test_packed_experts_equal_the_plain_ones(name, tokens):
    mixture = mixture_of((ALONE | WITH_INPUTS)[name], torch.float16)
    x = randn(tokens, 64, dtype=torch.float16)
    expected = mixture(x)
    fuse(mixture, invariant_backend(), INVARIANT)
    if DEVICE == "cuda" and name in WITH_INPUTS:  # some inputs round to the next number of FP8
        error = (mixture(x).double() - expected.double()).norm() / expected.double().norm()
        assert error < 1e-2
    else:
        assert_close(mixture(x), expected)


def test_a_norm_over_all_heads_equals_its_twin():
    norm = ShardedRMSNorm(Shard(None, 48, 0, 48), 1e-5, ParallelGroup()).to(DEVICE)
    norm.weight.copy_(randn(48))
    heads = randn(5, 9, 8)[:, :6]  # not contiguous
    expected = norm(heads)
    fuse(nn.ModuleList([norm]), invariant_backend(), INVARIANT)
    assert type(norm) is FusedShardedRMSNorm
    assert_close(norm(heads), expected)


@pytest.mark.parametrize("is_tiled", [False, pytest.param(True, marks=needs_tiles)])
@pytest.mark.parametrize("window, softcap", [(None, None), (50, 5.0)])
def test_prompts_and_decoding_attend_as_the_plain_layers_do(window, softcap, is_tiled, monkeypatch):
    monkeypatch.setattr(invariant_attention, "SEGMENT", 64)
    monkeypatch.setattr(
        invariant_attention, "suits_tiles", lambda k, v, page, block_n: is_tiled and not page % 64
    )
    heads, groups, head_dim, page = 6, 2, 32, 64
    lens = torch.tensor([200, 70, 1], device=DEVICE)
    starts = F.pad(lens.cumsum(0), (1, 0)).int()
    q, k, v = randn(271, heads + 2 * groups, head_dim).split([heads, groups, groups], dim=1)
    options = AttentionOptions(head_dim**-0.5, window, softcap, randn(heads))
    pages = torch.full((2, 12, page, groups, head_dim), torch.nan, device=DEVICE)
    tables = torch.randperm(12, device=DEVICE).view(3, 4).int()
    for start, length, table in zip(starts, lens, tables):
        for i in range(length):
            pages[:, table[i // page], i % page] = torch.stack((k, v))[:, start + i]
    cache = KVCache(*pages)

    metadata = PrefillMetadata(starts, starts, 200, 200, tables)
    whole = plain.prefill_attention(q, PackedKV(k, v), metadata, options)
    paged = PagedKV(cache, tables)
    assert_close(prefill_attention(q, paged, metadata, options), whole)
    without_pages = PrefillMetadata(starts, starts, 200, 200, None)
    assert_close(prefill_attention(q, PackedKV(k, v), without_pages, options), whole)
    for splits in (1, 4):
        monkeypatch.setattr(invariant_attention, "num_splits", lambda *_, n=splits: n)
        last = (starts[1:] - 1).long()
        kv = PagedKV(cache, tables, lens.int())
        assert_close(decode_attention(q[last], kv, options), whole[last])


def test_records_of_prompts_are_those_of_the_plain_sampler():
    logits = randn(5, 199)
    token_ids = torch.tensor([3, 198, 0, 7, 50], device=DEVICE)
    mine, twins = make_prompt_records(logits, token_ids, 2), make_records(logits, token_ids, 2)
    assert torch.equal(mine[..., 0], twins[..., 0])
    values = (x[..., 1].contiguous().view(torch.float32) for x in (mine, twins))
    torch.testing.assert_close(*values)


def test_a_cpu_is_refused_with_what_it_promises():
    with pytest.raises(ValueError, match="but device is 'cpu': .* in float32 a CPU"):
        LLM(TINY_MODEL, device="cpu", batch_invariant=True)


@pytest.mark.parametrize(
    "name, given, use",
    [
        ("kernels", "compile", "'auto'"),
        ("attention_backend", "flash-attn", "'auto' or 'triton'"),
        ("attention_backend", "torch", "'auto' or 'triton'"),
        ("kv_cache_dtype", "fp8", "'auto'"),
        ("tensor_parallel_size", 4, "1 or 2"),
    ],
)
def test_options_that_cannot_are_refused_by_name(name, given, use, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = Config("folder", batch_invariant=True, **{name: given})
    with pytest.raises(ValueError, match=f"but {name} is {given!r}, .*: use {use}, or leave"):
        check_batch_invariance(config, torch.device("cuda", 0))


@pytest.mark.parametrize(
    "name, layer",
    [
        ("gqa-2", None),
        ("llama", None),
        ("experts", None),
        ("gemma3", None),
        ("lfm2", None),
        ("gemma4", "WideRMSNorm"),
        ("qwen3-next", "GatedDeltaNet"),
    ],
)
def test_layers_that_were_not_shown_are_refused_by_name(name, layer, tmp_path):
    config = copy.deepcopy((MODELS | FAMILIES)[name])
    make_checkpoint(tmp_path, config)
    model = build_model(load_model_config(tmp_path), ParallelGroup())
    fuse(model, invariant_backend(), INVARIANT)
    if layer is None:
        check_model(model, torch.bfloat16)
    else:
        with pytest.raises(
            ValueError, match=f"layer .* is of class .*{layer}.*: use another model"
        ):
            check_model(model, torch.bfloat16)
    with pytest.raises(ValueError, match="dtype is 'float32': use 'bfloat16'"):
        check_model(model, torch.float32)


@pytest.mark.parametrize(
    "name, layer", [("gqa-2", None), ("experts", None), ("olmo2", "ShardedRMSNorm")]
)
def test_two_ranks_are_known_unless_a_norm_spans_them(name, layer, tmp_path):
    make_checkpoint(tmp_path, copy.deepcopy((MODELS | FAMILIES)[name]))
    model = build_model(load_model_config(tmp_path), ParallelGroup(0, 2))
    fuse(model, invariant_backend(), INVARIANT)
    if layer is None:
        check_model(model, torch.bfloat16)
    else:
        with pytest.raises(ValueError, match=f"layer .* is of class {layer}"):
            check_model(model, torch.bfloat16)


def test_the_sum_over_two_ranks_is_rounded_before_the_residual_is_added(tmp_path):
    """No kernel that adds both at once knows the rows of a long prompt."""
    make_checkpoint(tmp_path, copy.deepcopy(MODELS["gqa-2"]))
    model = build_model(load_model_config(tmp_path), ParallelGroup())
    fuse(model, invariant_backend(), INVARIANT)
    x, others, residual = (randn(3, 32, dtype=torch.float16) for _ in range(3))
    model.model.embed_tokens.group = SimpleNamespace(
        size=2,
        all_reduce=lambda x: x + others,
        shared_rows=lambda x: pytest.fail("this sum adds the residual, too"),
    )
    norm = model.model.norm.half().to(DEVICE)
    expected = x + others + residual
    _, total = model.model.add_and_norm(x, residual, None, norm)
    assert torch.equal(total, expected)


BOTH = ("mlp.experts", "self_attn")
QUANTISED = {  # each format, and the layers that may have it
    Fp8(16, 32, "group"): BOTH,
    Fp8(16, 32, None): BOTH,
    Fp8(1, 0, "token"): BOTH,
    Fp8(1, 0, None): BOTH,
    Fp8(0, 0, "tensor"): {"self_attn"},
    Fp8(0, 0, None): BOTH,
    Integers("gptq", 4, 32, has_zeros=True): {"mlp.experts"},
    Integers("gptq", 4, 32, has_zeros=True, has_g_idx=True): set(),
    Integers("gptq", 8, 32, has_zeros=True): set(),
    Fp4(is_nvidia=False): {"mlp.experts"},
    Fp4(is_nvidia=True): set(),
}


@pytest.mark.parametrize("part", BOTH)
@pytest.mark.parametrize("scheme", QUANTISED, ids=lambda scheme: scheme.description)
def test_quantised_weights_are_known_or_refused_by_name(scheme, part, tmp_path):
    sizes = dict(hidden_size=128, moe_intermediate_size=64, head_dim=32)
    experts = dict(num_experts=4, num_experts_per_tok=2)
    make_checkpoint(tmp_path, Qwen3MoeConfig(**SHAPE | sizes | experts))
    rule = lambda name: part in name and "proj" in name, scheme
    quantization = Quantization("made", (rule,), is_made_here=True)
    exchange = partial(use_quantised_layers, quantization=quantization)
    with tensors_default_to(torch.bfloat16, torch.device(DEVICE)):
        model = build_model(load_model_config(tmp_path), ParallelGroup(), exchange_layers=exchange)
    fuse(model, invariant_backend(), INVARIANT)
    packed = [module for module in model.modules() if isinstance(module, PackedWeight)]
    assert packed and all(weight.is_invariant for weight in packed)
    if part in QUANTISED[scheme]:
        check_model(model, torch.bfloat16)
    else:
        name, kind = rf"layer \S*{re.escape(part)}\S*", re.escape(f"with {scheme.description}")
        with pytest.raises(
            ValueError, match=f"{name} is of class .* {kind}, whose .*: use weights in bfloat16, or"
        ):
            check_model(model, torch.bfloat16)


def test_the_script_of_trials_counts_requests_that_differ(tmp_path):
    """A request with another seed stands for one whose tokens depend on its batch."""
    with make_llm(make_folder(tmp_path), max_model_len=512) as llm:
        requests, alone = batch_invariance.requests_alone(llm, 4)
        found = list(batch_invariance.trials(llm, requests, alone, 6, seed=1))
        assert len(found) == 6 and all(same_tokens for _, same_tokens in found)
        other = [Request(one.prompt, replace(one.params, seed=1)) for one in requests]
        found = list(batch_invariance.trials(llm, other, alone, 6, seed=1))
        assert not all(same_tokens for _, same_tokens in found)
