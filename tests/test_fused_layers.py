"""A model whose layers were replaced by faster ones computes what the plain one does.

Triton's kernels run in its interpreter where there is no GPU.
"""

import threading
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import plain_layers as plain
import pytest
import torch
import torch.nn.functional as F
from model_helpers import Driver, load, make_checkpoint
from process_helpers import SECONDS, in_thread
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

pytest.importorskip("triton")

from nanovllm.backends.compile import compile_layers
from nanovllm.backends.cpu.transform import use_cpu_layers
from nanovllm.backends.cuda import fused_layers, overlapped_decoder, products
from nanovllm.backends.cuda.attention_backends import PLAIN_BACKEND, AttentionBackend
from nanovllm.backends.cuda.fused_fp8 import FusedFp8Weight
from nanovllm.backends.cuda.fused_layers import (
    FUSED,
    FusedDecoder,
    FusedGatedMLP,
    FusedSelfAttention,
    fuse,
)
from nanovllm.backends.cuda.products import FASTEST, INVARIANT
from nanovllm.backends.cuda.triton import decode_attention as decode_module
from nanovllm.backends.cuda.triton import gated_delta, router, short_conv
from nanovllm.backends.cuda.triton.decode_attention import (
    decode_attention,
    decode_attention_of_qkv,
)
from nanovllm.backends.cuda.triton.dispatch import MAX_ROWS
from nanovllm.backends.cuda.triton.fp8_inputs import empty_rows
from nanovllm.backends.cuda.triton.prefill_attention import prefill_attention
from nanovllm.backends.cuda.triton.unnormed import Stream, Unnormed
from nanovllm.backends.quantised.config import Fp8, Integers, Quantization
from nanovllm.backends.quantised.layers import Quantised, use_quantised_layers
from nanovllm.backends.quantised.packed import PackedWeight
from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.context import AttentionMetadata
from nanovllm.layers.embedding import ParallelLMHead
from nanovllm.layers.moe import Experts, MixtureOfExperts, swiglu
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models import build_model, load_model_config
from nanovllm.models.transformer import Decoder, DecoderLayer
from nanovllm.weights.loader import load_weights

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

SIZES = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = SIZES | dict(head_dim=12, pad_token_id=0, sliding_window=5, query_pre_attn_scalar=7)
DELTA = SIZES | dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
)
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "experts": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    "gpt-oss": GptOssConfig(
        **SIZES | dict(hidden_size=36, intermediate_size=26),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        swiglu_limit=0.5,
    ),
    "mistral-window": MistralConfig(**SIZES, sliding_window=6),
    "phi3": Phi3Config(
        **SIZES | dict(hidden_size=64, pad_token_id=0),
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75),
    ),
    "ministral3": Ministral3Config(
        **SIZES,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=4.0,
            original_max_position_embeddings=4,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "olmo3": Olmo3Config(**SIZES | dict(head_dim=8, pad_token_id=0, layer_types=MIXED)),
    "glm4": Glm4Config(**SIZES | dict(pad_token_id=0)),
    "smollm3": SmolLM3Config(**SIZES | dict(pad_token_id=0, no_rope_layers=[1, 0, 1])),
    "gemma3": Gemma3TextConfig(**GEMMA, layer_types=MIXED),
    "gemma2": Gemma2Config(**GEMMA, layer_types=MIXED, attn_logit_softcapping=2.0),
    "qwen3.5": Qwen3_5TextConfig(**DELTA),
    "qwen3-next": Qwen3NextConfig(
        **DELTA | dict(linear_num_key_heads=1), mlp_only_layers=[0, 1, 2]
    ),
    "lfm2": Lfm2Config(
        **SIZES | dict(head_dim=8, pad_token_id=0),
        full_attn_idxs=[1],
        conv_bias=True,
        block_multiple_of=8,
    ),
    "granite": GraniteConfig(**SIZES, residual_multiplier=0.5, embedding_multiplier=2.0),
}
TRITON = AttentionBackend(
    "Triton", prefill_attention, decode_attention, decode_qkv=decode_attention_of_qkv
)


def run(model) -> torch.Tensor:
    """Logits of whole prompts, of decodes, of both together with a chunk that goes on, and of
    decodes again.
    """
    tokens = torch.randint(101, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    driver = Driver(model, num_sequences=3, max_tokens=32)
    steps = [
        driver.step({}, {0: tokens[:9], 1: tokens[:5]}),
        driver.step({1: 7, 0: 8}, {}),
        driver.step({0: 3}, {2: tokens[20:33]}),
        driver.step({1: 5, 0: 3}, {2: tokens[33:40]}),
        driver.step({2: 1, 0: 2, 1: 3}, {}),
    ]
    return torch.cat(steps)


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, CONFIGS[request.param])
    return folder


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_attention_that_no_kernel_suits_stays_plain_in_a_fused_model(tmp_path):
    config = Gemma4TextConfig(
        **GEMMA | dict(layer_types=[*MIXED[:2], "full_attention"]),
        hidden_size_per_layer_input=6,
        global_head_dim=16,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        num_kv_shared_layers=1,
        vocab_size_per_layer_input=101,
    )
    make_checkpoint(tmp_path, config)
    plain, fused = load(tmp_path), load(tmp_path)
    fuse(fused, TRITON)
    for layer, plain_layer in zip(fused.model.layers, plain.model.layers):
        assert type(layer.self_attn) is type(plain_layer.self_attn)
        assert type(layer.mlp) is FusedGatedMLP
    torch.testing.assert_close(run(fused), run(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_fused_model_computes_what_the_plain_one_does(folder):
    plain, fused = load(folder), load(folder)
    fuse(fused, TRITON)
    assert type(fused.model) is FusedDecoder
    assert not {type(module) for module in fused.modules()} & FUSED.keys(), (
        "every layer was replaced"
    )
    torch.testing.assert_close(run(fused), run(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "folder, is_fused",
    [("qwen3", True), ("phi3", True), ("qwen3.5", True), ("ministral3", False)],
    indirect=["folder"],
)
def test_few_sequences_decode_by_one_kernel_and_prompts_beside_them_by_two(
    folder, is_fused, monkeypatch
):
    kernels = []
    for name in ("qk_norm_rope_store", "decode_attention_of_qkv"):
        module = fused_layers if name == "qk_norm_rope_store" else decode_module
        do = getattr(module, name)

        def noted(*args, name=name, do=do, **options):
            kernels.append(name)
            return do(*args, **options)

        monkeypatch.setattr(module, name, noted)
    fused = load(folder)
    fuse(fused, replace(TRITON, decode_qkv=decode_module.decode_attention_of_qkv))
    layers = sum(isinstance(x, SelfAttention) for x in fused.modules())
    driver = Driver(fused, num_sequences=2, max_tokens=32)
    alone = "decode_attention_of_qkv" if is_fused else "qk_norm_rope_store"
    for decodes, prompts, kernel in (
        ({}, {0: [5, 6, 7]}, "qk_norm_rope_store"),
        ({0: 8}, {}, alone),
        ({0: 9}, {1: [1, 2]}, "qk_norm_rope_store"),
        ({0: 3, 1: 4}, {}, alone),
    ):
        kernels.clear()
        driver.step(decodes, prompts)
        assert kernels == [kernel] * layers
    layer = next(x for x in fused.modules() if isinstance(x, FusedSelfAttention))
    how = decode_module.NormRopeStore(None, None, 0.0, *[torch.empty(0)] * 3)
    metadata = AttentionMetadata(torch.empty(0), num_decodes=2)
    shares = replace(metadata, shared_prefix_len=torch.empty(0))
    assert layer.decodes_from_qkv(metadata, how) is is_fused
    assert not layer.decodes_from_qkv(shares, how)  # the prefix is read once for all sequences
    monkeypatch.setattr(decode_module, "MAX_QKV_ROWS", 1)
    kernels.clear()
    driver.step({0: 3, 1: 4}, {})
    assert kernels == ["qk_norm_rope_store"] * layers


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("products", [FASTEST, INVARIANT])
@pytest.mark.parametrize("folder", ["experts", "gpt-oss"], indirect=True)
def test_a_router_leaves_the_sum_of_its_parts_to_the_kernel_that_picks_experts(
    folder, products, monkeypatch
):
    """One token has a kernel that needs no parts, and sums of parts depend on the tokens."""
    rows = []

    def noted(x, *args):
        rows.append(len(x))
        return partial_logits(x, *args)

    partial_logits = router.partial_logits
    monkeypatch.setattr(router, "partial_logits", noted)
    monkeypatch.setattr(router, "can_overlap", lambda device: True)
    plain, fused = load(folder), load(folder)
    fuse(fused, TRITON, products)
    torch.testing.assert_close(run(fused), run(plain), rtol=1e-4, atol=1e-4)
    layers = len(fused.model.layers)
    sizes = [14, 2, 14, 9, 3] if products is FASTEST else []
    assert rows == [size for size in sizes for _ in range(layers)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("folder", ["qwen3", "gemma2"], indirect=True)
def test_a_fused_model_may_leave_attention_to_pytorch(folder):
    plain, fused = load(folder), load(folder)
    fuse(fused, PLAIN_BACKEND)
    torch.testing.assert_close(run(fused), run(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("folder", ["granite"], indirect=True)
def test_a_fused_layer_runs_by_itself_in_a_decoder_that_is_not_fused(folder):
    plain, fused = load(folder), load(folder)
    for model in (plain, fused):
        model.model.norm.__class__ = ShiftedNorm
    fuse(fused, TRITON)
    assert type(fused.model) is Decoder
    assert type(fused.model.layers[0]) is fused_layers.FusedGraniteLayer
    torch.testing.assert_close(run(fused), run(plain), rtol=1e-4, atol=1e-4)


def test_a_model_sped_up_for_the_cpu_computes_what_the_plain_one_does(folder):
    plain, fast = load(folder), load(folder)
    use_cpu_layers(fast)
    torch.testing.assert_close(run(fast), run(plain), rtol=1e-4, atol=1e-4)


INT8 = Integers("gptq", 8, group=0, has_zeros=True)


def load_quantised(folder, scheme=INT8):
    """Load a checkpoint whose weights are quantised as they are loaded."""
    rules = ((lambda name: True, scheme),)
    quantization = Quantization("test", rules, is_made_here=True)
    exchange = partial(use_quantised_layers, quantization=quantization)
    model = build_model(load_model_config(folder), ParallelGroup(), exchange_layers=exchange)
    load_weights(model, folder)
    return model


def assert_quantised_layers_stay(model, replace):
    quantised = [type(module) for module in model.modules() if isinstance(module, Quantised)]
    want = run(model)
    replace(model)
    now = [type(module) for module in model.modules() if isinstance(module, Quantised)]
    assert all(issubclass(new, old) for new, old in zip(now, quantised, strict=True))
    assert type(model.lm_head) is not ParallelLMHead
    torch.testing.assert_close(run(model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("folder", ["qwen3", "gemma2", "experts"], indirect=True)
def test_quantised_layers_are_fused_like_plain_ones(folder):
    model = load_quantised(folder)
    assert_quantised_layers_stay(model, partial(fuse, backend=TRITON))
    has_experts = any(isinstance(module, Experts) for module in model.modules())
    assert (type(model.model) is FusedDecoder) == (not has_experts)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "folder, scheme",
    [
        ("qwen3", Fp8(16, 32, "group")),
        ("llama-bias", Fp8(1, 0, "token")),
        ("gemma2", Fp8(1, 0, "token")),
        ("phi3", Fp8(1, 0, None)),
    ],
    indirect=["folder"],
)
def test_fp8_layers_are_fused_by_kernels(folder, scheme):
    model = load_quantised(folder, scheme)
    want = run(model)
    fuse(model, TRITON)
    weights = [module for module in model.modules() if isinstance(module, PackedWeight)]
    assert {type(weight) for weight in weights} == {FusedFp8Weight}
    found = run(model)
    if scheme.activations is None:
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    else:
        # A sum of another order may round an input to the next number of FP8.
        torch.testing.assert_close(found, want, rtol=0, atol=0.1 * want.std().item())
        close = (found - want).abs() < 1e-3
        assert close.float().mean() > 0.3, close.float().mean()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_a_warmup_quantises_what_the_mlp_of_a_prompt_quantises(folder, monkeypatch):
    model = load_quantised(folder, Fp8(1, 0, "token"))
    fuse(model, TRITON)
    shapes, quantise = [], products.activate_and_quantise

    def spy(x, *options):
        shapes.append(x.shape)
        return quantise(x, *options)

    monkeypatch.setattr(products, "activate_and_quantise", spy)
    activated = []
    monkeypatch.setattr(products, "activate_and_mul", lambda *_: activated.append(1))
    mlp = model.model.layers[0].mlp
    mlp.warmup()
    assert not activated, "only a shared expert launches this kernel"
    assert shapes == [(MAX_ROWS + 1, len(mlp.gate_up_proj.packed["weight"].codes))]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "folder, norms", [("qwen3", 5), ("gemma2", 0), ("granite", 0)], indirect=["folder"]
)
def test_products_of_one_row_add_to_the_residual_stream_and_norm_it(folder, norms, monkeypatch):
    """The kernels that do so have no interpreter: here, PyTorch computes what they do."""
    model = load_quantised(folder, Fp8(1, 0, None))
    fuse(model, TRITON)
    want = run_alone(model)
    forward, seen = FusedFp8Weight.forward, []

    def add(weight, row, bias, residual):
        total = residual + forward(weight, row, bias)
        return Stream(total, total.square().sum(dim=1))

    def normed(x):
        if not isinstance(x, Unnormed):
            return x
        seen.append(x)
        (total, squares), *norm = x
        torch.testing.assert_close(total.square().sum(dim=1), squares)
        return plain.rms_norm(total, *norm)

    monkeypatch.setattr(FusedFp8Weight, "can_norm", lambda *_: True)
    monkeypatch.setattr(FusedFp8Weight, "can_add", lambda *_: True)
    monkeypatch.setattr(FusedFp8Weight, "add", add)
    monkeypatch.setattr(
        FusedFp8Weight, "forward", lambda weight, x, *bias: forward(weight, normed(x), *bias)
    )
    monkeypatch.setattr(
        FusedFp8Weight,
        "gated",
        lambda weight, x, bias, gelu, reader: plain.activate_and_mul(weight(x, bias), gelu),
    )
    torch.testing.assert_close(run_alone(model), want, rtol=1e-4, atol=1e-4)
    assert len(seen) == norms


def run_alone(model) -> torch.Tensor:
    """Logits of a prompt of three tokens and of a decode, of one sequence alone."""
    driver = Driver(model, num_sequences=1, max_tokens=32)
    return torch.cat((driver.step({}, {0: [5, 6, 7]}), driver.step({0: 8}, {})))


@pytest.mark.parametrize("most", [0, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_attention_quantises_its_results_for_fp8_weights_in_steps_of_decodes_alone(
    tmp_path, gated, most, monkeypatch
):
    sizes = dict(head_dim=32)
    config = Qwen3_5TextConfig(**DELTA | sizes) if gated else Qwen3Config(**SIZES | sizes)
    make_checkpoint(tmp_path, config)
    monkeypatch.setattr(decode_module, "MAX_QKV_ROWS", most)
    results, quantised = [], []

    def make_room(rows, *options):
        quantised.append(rows)
        return empty_rows(rows, *options)

    monkeypatch.setattr(fused_layers, "empty_rows", make_room)
    for quantises in (False, True):
        model = load_quantised(tmp_path, Fp8(16, 32, "group"))
        fuse(model, replace(TRITON, quantises=quantises))
        results.append(run(model))
    assert torch.equal(*results)
    # Steps 2 and 5 have decodes alone. Gates change the results before they are quantised.
    assert quantised == ([] if gated else [2] * 3 + [3] * 3)
    layer = next(x for x in model.modules() if isinstance(x, FusedSelfAttention))

    def is_quantised(rows):
        return layer.room_for_codes(torch.empty(rows, 8 * 32)) is not None

    assert [is_quantised(rows) for rows in (129, 257)] == [not gated, False]
    layer.kv_cache = replace(layer.kv_cache, scales=torch.ones(2))
    assert [is_quantised(rows) for rows in (128, 129)] == [not gated, False]
    monkeypatch.setattr(FusedFp8Weight, "can_add", lambda _, row: len(row) == 1)
    assert [is_quantised(rows) for rows in (1, 2)] == [False, not gated]


def test_each_family_runs_quantised(folder):
    model = load_quantised(folder)
    logits = torch.stack((run(model).flatten(), run(load(folder)).flatten()))
    assert torch.corrcoef(logits)[0, 1] > 0.99 and not torch.equal(*logits)
    assert_quantised_layers_stay(model, use_cpu_layers)


class ShiftedNorm(RMSNorm):
    """A norm as some family may have it, of which no kernel knows."""

    def forward(self, x):
        return super().forward(x) * 1.5


class DoubledExperts(Experts):
    """Experts as some family may have them."""

    def forward(self, x, weights, experts):
        return 2 * super().forward(x, weights, experts)


class NegatedExperts(Experts):
    """The same, of each expert."""

    def run(self, expert, x):
        return -super().run(expert, x)


class PostNormLayer(DecoderLayer):
    """A layer as some family may have it."""

    def forward(self, x, positions):
        x = x + self.input_layernorm(self.self_attn(x, positions))
        return x + self.post_attention_layernorm(self.mlp(x))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("folder", ["qwen3", "qwen2", "llama-bias", "experts"], indirect=True)
def test_what_a_family_does_in_its_own_way_is_left_as_it_is(folder):
    def change(model):
        for i, layer in enumerate(model.model.layers):
            if i == 1:
                layer.__class__ = PostNormLayer
            if isinstance(layer.mlp, MixtureOfExperts):
                layer.mlp.experts.gating = torch.mul if i == 0 else swiglu
                layer.mlp.experts.__class__ = (Experts, NegatedExperts, DoubledExperts)[i]
        for module in model.modules():
            if type(module) is RMSNorm and module.weight.shape == (32,):
                module.__class__ = ShiftedNorm
        return model

    plain, fused = change(load(folder)), change(load(folder))
    fuse(fused, TRITON)
    assert type(fused.model) is Decoder and type(fused.model.norm) is ShiftedNorm
    torch.testing.assert_close(run(fused), run(plain), rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class ThreadGroup(ParallelGroup):
    """Ranks that are threads of this process and meet at a barrier, each with a place for what
    it brings.
    """

    meeting: tuple[threading.Barrier, list] | None = None

    def all_reduce(self, x):
        barrier, places = self.meeting
        places[self.rank] = x.clone()
        barrier.wait()
        x.copy_(sum(places))
        barrier.wait()  # none may write its place again before all have read
        return x

    def shared_rows(self, x):
        return None

    def begin_all_reduce(self, x):
        """The sum is there when it is waited for, and not before."""
        own = x.clone()
        x.fill_(torch.nan)
        return SimpleNamespace(wait=lambda: x.copy_(self.all_reduce(own)))


def test_all_reduces_that_overlap_sum_what_whole_ones_do(folder, monkeypatch):
    for name in ("rms_norm", "add_rms_norm", "norm_add_norm", "qk_norm_rope_store"):
        # The interpreter knows no threads.
        monkeypatch.setattr(fused_layers, name, getattr(plain, name))
    products = FASTEST._replace(
        linear=lambda x, weight, bias, out=None: F.linear(x, weight, bias),
        gated_linear=plain.gated_linear,
    )
    monkeypatch.setattr(fused_layers, "multiply_by_sigmoid", plain.multiply_by_sigmoid)
    for module, kind in ((gated_delta, "delta_rule"), (short_conv, "convolve")):
        for name in (f"{kind}_token", f"{kind}_chunks"):
            monkeypatch.setattr(module, name, getattr(plain, name))
    monkeypatch.setattr(fused_layers.moe, "moe", plain.moe)
    monkeypatch.setattr(overlapped_decoder, "MIN_ROWS", 8)
    monkeypatch.setattr(overlapped_decoder, "MICRO_BATCH_ROWS", 4)
    size = 2
    state, results = (threading.Barrier(size, timeout=SECONDS), [None] * size), [None] * size

    def run_rank(rank):
        model = build_model(load_model_config(folder), ThreadGroup(rank, size, meeting=state))
        load_weights(model, folder)
        fuse(model, PLAIN_BACKEND, products)
        overlapped_decoder.overlap_all_reduces(model)
        assert type(model.model) is overlapped_decoder.OverlappedDecoder
        results[rank] = run(model)

    threads = [in_thread(partial(run_rank, rank)) for rank in range(size)]
    for thread in threads:
        thread.result(SECONDS)
    torch.testing.assert_close(torch.cat(results, dim=1), run(load(folder)), rtol=1e-4, atol=1e-4)


def test_layers_of_a_kind_are_compiled_once(tmp_path):
    """torch.compile looks at classes: for each other one it compiles the same code anew."""
    make_checkpoint(tmp_path, CONFIGS["qwen3"])
    model = load(tmp_path)
    compile_layers(model)
    layers = model.model.layers
    assert len(layers) == 3 and len({type(layer.self_attn) for layer in layers}) == 1
    assert type(layers[0].self_attn) is not SelfAttention
