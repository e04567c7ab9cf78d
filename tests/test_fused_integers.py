"""Integer weights that kernels multiply by, against the same weights as the plain layers use them:
in Triton's interpreter on a CPU, and compiled, in bfloat16 too, on a GPU.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from model_helpers import make_checkpoint
from transformers import Qwen3Config

pytest.importorskip("triton")

from nanovllm.backends.cuda.fused_integers import FusedIntegerWeight
from nanovllm.backends.cuda.fused_quantised import (
    arrange_weights,
    await_weights,
    drop_copies,
    restore_weights,
    use_packed_kernels,
)
from nanovllm.backends.cuda.triton import packed_linear
from nanovllm.backends.quantised.config import Integers, Quantization
from nanovllm.backends.quantised.integers import IntegerWeight
from nanovllm.backends.quantised.layers import use_quantised_layers
from nanovllm.engine.dtype import tensors_default_to
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models import build_model, load_model_config
from nanovllm.weights.loader import load_weights

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.float16] + [pytest.param(torch.bfloat16, marks=pytest.mark.gpu)] * HAS_GPU
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# The kernels that multiply fewer rows by woven codes are written in Gluon: it has no interpreter.
WOVEN_ROWS = [1, 300] if HAS_GPU else [300]
SCHEMES = {
    "gptq": Integers("gptq", 4, group=64, has_zeros=True, zeros_less_one=True),
    "awq": Integers("awq", 4, group=32, has_zeros=True),
    "symmetric": Integers("compressed-tensors", 4, group=0, has_zeros=False),
    "8 bits": Integers("compressed-tensors", 8, group=32, has_zeros=True),
}
CONFIG = Qwen3Config(
    vocab_size=101,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, CONFIG)
    return folder


def load(folder, scheme, dtype, group=ParallelGroup()):
    """Load a checkpoint whose weights are quantised as they are loaded: its packed weights."""
    quantization = Quantization("made", ((lambda name: True, scheme),), is_made_here=True)
    exchange = partial(use_quantised_layers, quantization=quantization)
    with tensors_default_to(dtype, DEVICE):
        config = load_model_config(folder)
        model = build_model(config, group, exchange_layers=exchange)
    load_weights(model, folder)
    return [module for module in model.modules() if isinstance(module, IntegerWeight)]


def assert_close(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[actual.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@torch.inference_mode()
def test_fused_weights_multiply_as_plain_ones(folder, scheme, dtype):
    torch.manual_seed(0)
    for weight in load(folder, scheme, dtype):
        bias = torch.randn(weight.height, device=DEVICE).to(dtype)
        inputs = [torch.randn(n, weight.width, device=DEVICE).to(dtype) for n in (1, 20, 300)]
        want = [weight(x, bias) for x in inputs]
        use_packed_kernels(weight)
        assert type(weight) is FusedIntegerWeight
        for x, expected in zip(inputs, want):
            assert_close(weight(x, bias), expected)
            gates, ups = expected.chunk(2, dim=1)
            assert_close(weight.gated(x, bias, gelu=False), F.silu(gates) * ups)


@torch.inference_mode()
def test_the_share_of_any_rank_is_multiplied_by_kernels_if_a_row_has_one_scale(folder):
    for weight in load(folder, SCHEMES["symmetric"], torch.float16, ParallelGroup(1, 2)):
        inputs = [torch.randn(n, weight.width, device=DEVICE).half() for n in (1, 20, 300)]
        want = [weight(x) for x in inputs]
        use_packed_kernels(weight)
        assert type(weight) is FusedIntegerWeight
        for x, expected in zip(inputs, want):
            assert_close(weight(x), expected)


@torch.inference_mode()
def test_fused_weights_follow_an_update(folder):
    """Graphs hold the address of the factors, so an update must write to the same memory."""
    scheme = SCHEMES["gptq"]
    weight, source = (load(folder, scheme, torch.float16)[0] for _ in range(2))
    use_packed_kernels(weight)
    x = torch.randn(1, weight.width, device=DEVICE).half()
    before, address = weight(x), weight.factors.data_ptr()
    source.scales.mul_(2)
    weight.take_weights(source)
    assert torch.equal(weight(x), 2 * before) and weight.factors.data_ptr() == address
    drop_copies(weight)
    assert torch.equal(weight(x), 2 * before)


def test_all_weights_have_factors_before_graphs_are_captured(folder):
    """A graph records how factors are made, and only its replay makes them."""
    weights = torch.nn.ModuleList(load(folder, SCHEMES["gptq"], torch.float16))
    for weight in weights:
        use_packed_kernels(weight)
    restore_weights(weights)
    assert all(weight.factors is not None for weight in weights)


@torch.inference_mode()
def test_codes_are_woven_once_after_each_load(folder, monkeypatch):
    monkeypatch.setattr(packed_linear, "is_hopper", lambda device: True)
    scheme = SCHEMES["symmetric"]
    weight, plain = (load(folder, scheme, torch.float16)[0] for _ in range(2))
    before = plain.codes.clone()
    use_packed_kernels(weight)
    await_weights(weight)
    for _ in range(2):
        arrange_weights(weight)
        assert not torch.equal(weight.codes, before)
        for rows in WOVEN_ROWS:
            x = torch.randn(rows, weight.width, device=DEVICE).half()
            assert_close(weight(x), plain(x))
        assert torch.equal(
            weight.dequantise(slice(3, 9), 0, None), plain.dequantise(slice(3, 9), 0, None)
        )
        weight.take_weights(plain)
        assert torch.equal(plain.codes, before)


@torch.inference_mode()
def test_an_update_during_sleep_is_arranged_when_the_model_wakes_up(folder, monkeypatch):
    """During sleep at level 1, weights are in the CPU's memory, which no kernel reads."""
    is_awake = True
    monkeypatch.setattr(packed_linear, "is_hopper", lambda device: is_awake)
    scheme = SCHEMES["symmetric"]
    weight, plain = (load(folder, scheme, torch.float16)[0] for _ in range(2))
    use_packed_kernels(weight)
    arrange_weights(weight)
    drop_copies(weight)
    is_awake = False
    plain.scales.mul_(2)
    weight.take_weights(plain)
    assert weight.factors is None
    is_awake = True
    restore_weights(weight)
    assert weight.is_woven and not torch.equal(weight.codes, plain.codes)
    x = torch.randn(WOVEN_ROWS[0], weight.width, device=DEVICE).half()
    assert_close(weight(x), plain(x))


def test_weights_that_no_kernel_suits_stay_plain(folder):
    ordered = replace(SCHEMES["gptq"], has_g_idx=True)
    for scheme, dtype in ((ordered, torch.float16), (SCHEMES["awq"], torch.float32)):
        for weight in load(folder, scheme, dtype):
            use_packed_kernels(weight)
            assert type(weight) is IntegerWeight
