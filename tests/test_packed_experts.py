"""The kernels of experts with packed weights, against plain layers: in Triton's interpreter on a
CPU, and compiled, in bfloat16 too, on a GPU.
"""

import copy
from collections import defaultdict

import pytest
import torch

pytest.importorskip("triton")

from effort import spread
from quantised_helpers import make_pair
from test_quantised import EXPERTS, FORMATS, logits_of
from test_quantised import load as load_packed

from nanovllm.backends.cuda.attention_backends import AttentionBackend
from nanovllm.backends.cuda.fused_fp4 import FusedFp4Weight
from nanovllm.backends.cuda.fused_layers import (
    FusedDecoder,
    FusedMixtureOfExperts,
    FusedSharedExpertMixture,
    fuse,
)
from nanovllm.backends.cuda.fused_quantised import (
    arrange_weights,
    await_weights,
    packed_experts,
    restore_weights,
    use_packed_kernels,
)
from nanovllm.backends.cuda.triton import moe as triton_moe
from nanovllm.backends.cuda.triton import moe_packed
from nanovllm.backends.cuda.triton.decode_attention import decode_attention
from nanovllm.backends.cuda.triton.prefill_attention import prefill_attention
from nanovllm.backends.quantised.config import Fp4, Fp8, Integers
from nanovllm.backends.quantised.fp8 import from_e4m3, to_e4m3
from nanovllm.backends.quantised.layers import QuantisedExperts, exchange, name_of_weight
from nanovllm.layers.moe import ClampedSwiGLU, MixtureOfExperts, SharedExpertMixture, swiglu
from nanovllm.layers.parallel import ParallelGroup

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
DTYPES = [torch.float32, torch.float16] + [
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
] * HAS_GPU
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TRITON = AttentionBackend("Triton", prefill_attention, decode_attention)

ALONE = {
    "mxfp4": Fp4(is_nvidia=False),
    "fp8-rows": Fp8(1, 0, None),
    "fp8-blocks": Fp8(16, 32, None),
    "fp8-tensor": Fp8(0, 0, None),
    "int4": Integers("gptq", 4, 32, has_zeros=False),
    "int4-zeros": Integers("gptq", 4, 64, has_zeros=True),
    "int4-small-groups": Integers("gptq", 4, 8, has_zeros=True),
    "int4-rows": Integers("gptq", 4, 0, has_zeros=True),
}
WITH_INPUTS = {
    "fp8-blocks-and-groups": Fp8(16, 32, "group"),
    "fp8-short-blocks": Fp8(48, 96, "group"),
    "fp8-rows-and-tokens": Fp8(1, 0, "token"),
}
UNKNOWN = {
    "nvfp4": Fp4(is_nvidia=True),
    "int8": Integers("gptq", 8, 32, has_zeros=True),
    "desc-act": Integers("gptq", 4, 32, has_zeros=True, has_g_idx=True),
    "fp8-static": Fp8(0, 0, "tensor"),
    "fp8-odd-blocks": Fp8(16, 24, "group"),
}


def mixture_of(scheme, dtype, *, gating=swiglu, bias=False, sizes=(64, 96, 4, 2), shared_size=None):
    """Make a mixture of random experts.

    scheme: The format of the experts; None: they are not quantised.
    sizes: The hidden and the experts' width, the number of experts, and of those of a token.
    shared_size: The width of a shared expert, if there is one.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            sizes = *sizes, ParallelGroup()
            if shared_size is None:
                mixture = MixtureOfExperts(*sizes, renormalize=True, bias=bias, gating=gating)
            else:
                mixture = SharedExpertMixture(*sizes, renormalize=True, shared_size=shared_size)
            experts, weights = mixture.experts, defaultdict(list)
            for part in experts.weight_slices("experts"):
                weights[name_of_weight(experts, part)].append(part)
            if scheme is not None:
                exchange(experts, QuantisedExperts, weights, scheme, reads_plain=True)
    finally:
        torch.set_default_dtype(torch.float32)
    mixture.to_empty(device=DEVICE).requires_grad_(False)
    for name, parameter in mixture.named_parameters():
        if "packed" not in name:
            width = 1 if parameter.dim() == 1 else parameter.shape[-1]
            parameter.normal_().div_(width**0.5)
    values = {}
    for part in experts.weight_slices("experts"):
        value = values.setdefault(part.name, torch.randn(part.shape) / part.shape[1] ** 0.5)
        part.fill(value[part.index])
    return mixture


def fused(mixture, kind=FusedMixtureOfExperts):
    """Return a copy that computes in kernels."""
    assert kind.suits(mixture)
    mixture = copy.deepcopy(mixture)
    mixture.__class__ = kind
    return mixture


def dequantised(mixture):
    """Return a copy in float64, whose experts have the numbers that the packed weights mean."""
    experts = mixture.experts
    plain = MixtureOfExperts(
        *(experts.down_proj.shape[1], experts.intermediate_size, len(experts.down_proj)),
        *(mixture.top_k, ParallelGroup()),
        renormalize=True,
        bias=experts.gate_up_bias is not None,
        gating=experts.gating,
    )
    plain = plain.to(DEVICE, torch.float64).requires_grad_(False)
    plain.gate = copy.deepcopy(mixture.gate)
    for name, weight in experts.packed.items():
        for expert, numbers in enumerate(getattr(plain.experts, name)):
            for number, rows in weight.chunks:
                numbers[rows] = weight.dequantise(rows, number, expert).double()
    for name in ("gate_up_bias", "down_bias"):
        if getattr(experts, name) is not None:
            getattr(plain.experts, name).copy_(getattr(experts, name))
    return plain


def relative_error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("tokens", [1, 20])
@spread({"name": list(ALONE), "dtype": DTYPES})
def test_packed_experts_equal_a_float64_product_of_their_numbers(name, tokens, dtype):
    mixture = mixture_of(ALONE[name], dtype)
    x = torch.randn(tokens, 64, device=DEVICE).to(dtype)
    reference = dequantised(mixture)
    reference.gate.forward = lambda _: mixture.gate(x)
    error = relative_error(fused(mixture)(x), reference(x.double()))
    assert error < TOLERANCE[dtype]


@spread({"sizes": [(64, 96, 4, 2), (72, 40, 3, 3), (360, 200, 2, 1)], "dtype": DTYPES[::-1]})
def test_mxfp4_with_biases_and_clamps_equals_a_float64_product(sizes, dtype):
    """Widths may end within a group, or within the words that a step takes."""
    mixture = mixture_of(
        ALONE["mxfp4"], dtype, gating=ClampedSwiGLU(1.7, 0.5), bias=True, sizes=sizes
    )
    x = torch.randn(9, sizes[0], device=DEVICE).to(dtype)
    reference = dequantised(mixture)
    reference.gate.forward = lambda _: mixture.gate(x)
    assert relative_error(fused(mixture)(x), reference(x.double())) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 20])
@spread({"name": list(WITH_INPUTS), "dtype": DTYPES})
def test_experts_with_inputs_in_fp8_equal_the_plain_ones(name, tokens, dtype):
    mixture = mixture_of(WITH_INPUTS[name], dtype, sizes=(192, 96, 4, 2))
    x = torch.randn(tokens, 192, device=DEVICE).to(dtype)
    # A few hidden numbers that lie between two numbers of FP8 may become the other one.
    assert relative_error(fused(mixture)(x), mixture(x)) < max(TOLERANCE[dtype], 5e-3)


@pytest.mark.parametrize("name", UNKNOWN)
def test_experts_in_formats_that_no_kernel_knows_stay_plain(name):
    assert not FusedMixtureOfExperts.suits(mixture_of(UNKNOWN[name], torch.float32))


TILES = [(kind, tile) for kind, tiles in moe_packed.TILES.items() for _, tile in tiles]


@pytest.mark.parametrize("kind, tile", TILES)
def test_every_tile_of_packed_experts_gives_the_same(kind, tile, monkeypatch):
    scheme = {"e4m3": Fp8(16, 64, None), "e2m1": ALONE["mxfp4"], "int4": ALONE["int4"]}[kind]
    mixture = mixture_of(scheme, torch.float16, sizes=(192, 96, 4, 2))
    x = torch.randn(40, 192, device=DEVICE).half()
    monkeypatch.setattr(triton_moe, "packed_tile", lambda *_: tile)
    assert relative_error(fused(mixture)(x), mixture(x)) < TOLERANCE[torch.float16]


def mxfp4_mixture(**options):
    """Make a mixture in bfloat16, whose experts are in MXFP4 and wide enough to be woven."""
    return mixture_of(ALONE["mxfp4"], torch.bfloat16, **dict(sizes=(192, 320, 8, 2)) | options)


def woven(mixture, kind=FusedMixtureOfExperts):
    """Return a copy that computes in the kernels for woven experts."""
    mixture = fused(mixture, kind)
    for weight in mixture.experts.packed.values():
        use_packed_kernels(weight)
    await_weights(mixture)
    arrange_weights(mixture)
    return mixture


def numbers_of(weight):
    return [
        weight.dequantise(rows, number, expert)
        for expert in range(len(weight.codes))
        for number, rows in [(0, slice(3, 9)), *weight.chunks]
    ]


woven_experts = triton_moe.woven_experts
needs_gluon = pytest.mark.skipif(woven_experts is None, reason="Triton is too old")


@needs_gluon
def test_experts_are_woven_once_after_each_load_and_keep_their_numbers(monkeypatch):
    monkeypatch.setattr(woven_experts, "is_hopper", lambda device: True)
    plain = mxfp4_mixture()
    mixture = woven(plain)
    for weight, source in zip(mixture.experts.packed.values(), plain.experts.packed.values()):
        assert type(weight) is FusedFp4Weight
        # Every number, and the scales that the kernel computes with exactly.
        source.codes.random_(256)
        source.scales.random_(27, 162)
        for _ in range(2):
            address = weight.codes.data_ptr(), weight.scales.data_ptr()
            weight.take_weights(source)
            for _ in range(2):
                arrange_weights(mixture)
                assert not torch.equal(weight.codes, source.codes)
                for mine, expected in zip(numbers_of(weight), numbers_of(source), strict=True):
                    assert torch.equal(mine, expected)
            assert address == (weight.codes.data_ptr(), weight.scales.data_ptr())


@needs_gluon
def test_experts_that_were_updated_during_sleep_are_woven_when_the_model_wakes_up(monkeypatch):
    """During sleep at level 1, weights are in the CPU's memory, and no Hopper GPU has them."""
    is_awake = True
    monkeypatch.setattr(woven_experts, "is_hopper", lambda device: is_awake)
    plain = mxfp4_mixture()
    mixture = woven(plain)
    is_awake = False
    for weight, source in zip(mixture.experts.packed.values(), plain.experts.packed.values()):
        weight.take_weights(source)
    is_awake = True
    restore_weights(mixture)
    for weight, source in zip(mixture.experts.packed.values(), plain.experts.packed.values()):
        assert weight.is_woven and not torch.equal(weight.codes, source.codes)
        for mine, expected in zip(numbers_of(weight), numbers_of(source), strict=True):
            assert torch.equal(mine, expected)


@needs_gluon
@pytest.mark.parametrize("sizes", [(192, 96, 4, 2), (96, 192, 4, 2)])
def test_experts_of_widths_that_the_kernel_does_not_take_are_not_woven(sizes, monkeypatch):
    """Both products of a mixture are computed by the same kernel."""
    monkeypatch.setattr(woven_experts, "is_hopper", lambda device: True)
    for weight in woven(mxfp4_mixture(sizes=sizes)).experts.packed.values():
        assert not weight.is_woven and not weight.has_woven_codes
        assert isinstance(packed_experts(weight), moe_packed.PackedExperts)


@needs_gluon
def test_experts_of_a_batch_invariant_model_are_not_woven(monkeypatch):
    monkeypatch.setattr(woven_experts, "is_hopper", lambda device: True)
    for weight in mxfp4_mixture().experts.packed.values():
        use_packed_kernels(weight, is_invariant=True)
        arrange_weights(weight)
        assert isinstance(packed_experts(weight), moe_packed.PackedExperts)


@needs_gluon
@pytest.mark.parametrize("experts, top_k", [(32, 4), (128, 4), (8, 2)])
@pytest.mark.parametrize("most", [1, 200, 16384])
def test_a_warmup_launches_all_kernels_of_woven_experts(experts, top_k, most):
    def kernels(tokens):
        tile = woven_experts.woven_tile(tokens * top_k / experts)
        return tokens == 1 or (tile, tokens <= woven_experts.MAX_ROWS)

    sizes = woven_experts.warmup_sizes(experts, top_k, most)
    assert set(map(kernels, sizes)) == set(map(kernels, range(1, most + 1)))
    assert max(sizes) <= most


@needs_gluon
def test_tiles_of_woven_experts_have_sizes_that_the_kernel_takes():
    limits, tiles = zip(*woven_experts.TILES, strict=True)
    assert list(limits) == sorted(set(limits)) and limits[-1] == float("inf")
    sizes = [8, 16, 32, 64, 128, 256]  # of tensors in Triton, and of a product of tensor cores
    for tile in tiles:
        assert tile.rows in sizes
        assert tile.few == 0 or tile.few in sizes[: sizes.index(tile.rows)]


@needs_gluon
@pytest.mark.parametrize(
    "tokens, rows, few",
    [(16, 8, 0), (32, 16, 8), (64, 16, 8), (96, 32, 8), (128, 32, 8), (192, 32, 16), (256, 64, 16)],
)
def test_woven_experts_have_tiles_for_few_and_many_pairs_where_these_were_fastest(
    tokens, rows, few
):
    """The numbers of tokens are those at which gpt-oss-20b's shape was timed."""
    tile = woven_experts.woven_tile(tokens * 4 / 32)
    assert (tile.rows, tile.few) == (rows, few)


@needs_gluon
@pytest.mark.parametrize("is_put_off", [False, True])
def test_the_second_product_does_not_wait_for_a_first_one_that_was_put_off(is_put_off, monkeypatch):
    """precompile.py puts off launches of kernels that are not compiled yet."""

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: None if is_put_off else "compiled"

    monkeypatch.setattr(woven_experts, "_woven_experts_kernel", Kernel())
    codes, scales = torch.zeros(2, 128, 32).byte(), torch.zeros(2, 128, 2).byte()
    weight = woven_experts.view_woven(codes, scales)
    order, runs = torch.zeros(4).int(), torch.ones(3, 4).int()
    woven_experts.multiply_woven(
        *(torch.zeros(2, 64), weight, None, torch.zeros(4, 64)),
        pairs=(order, runs, 2),
        top_k=2,
        tile=woven_experts.woven_tile(4),
        is_gated=True,
    )
    assert runs.any() != is_put_off


on_hopper = pytest.mark.skipif(not IS_HOPPER, reason="the kernel is for Hopper")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tokens", [2, 3, 9, 10, 18, 19, 36, 37, 73, 74, 301, 2049])
@pytest.mark.parametrize("number", range(len(woven_experts.TILES) if woven_experts else 0))
def test_every_tile_of_woven_experts_equals_a_float64_product(number, tokens, monkeypatch):
    """Some experts have no token, and others have tokens for several tiles.

    Expert 2 has 7/8 of the tokens: 8, 9, 16, 17, 32, 33, 64 and 65 of 9, 10, 18, 19, 36, 37, 73
    and 74.
    """
    mixture = mxfp4_mixture(gating=ClampedSwiGLU(1.7, 0.5), bias=True)
    x = torch.randn(tokens, 192, device=DEVICE).bfloat16()
    logits = mixture.gate(x)
    logits[:, 5] = -100.0
    logits[: tokens // 8, 2], logits[tokens // 8 :, 2] = -100.0, 100.0
    reference, mine = dequantised(mixture), woven(mixture)
    reference.gate.forward = mine.gate.forward = lambda _: logits
    monkeypatch.setattr(woven_experts, "woven_tile", lambda _: woven_experts.TILES[number][1])
    assert relative_error(mine(x), reference(x.double())) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tokens", [20, 64, 192])
def test_a_tile_of_the_second_product_waits_for_that_of_the_first(tokens, monkeypatch):
    """Results are those of kernels of which the second waits for all of the first, to the bit.

    In a graph, the second kernel's programs start beside those of the first. The memory between
    them holds results of another input, so a tile that does not wait reads wrong numbers.
    """
    mixture = woven(mxfp4_mixture(sizes=(512, 256, 16, 4)))
    tile = woven_experts.woven_tile(tokens * 4 / 16)
    assert not tile.late
    inputs = torch.randn(10, tokens, 512, device=DEVICE).bfloat16()
    results = []
    for chosen in (tile, tile._replace(late=True)):
        monkeypatch.setattr(woven_experts, "woven_tile", lambda _, tile=chosen: tile)
        x = inputs[0].clone()
        mixture(x)  # compile
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mixture(x)
        for given in inputs:
            x.copy_(given)
            graph.replay()
            results.append(out.clone())
    assert torch.equal(torch.stack(results[:10]), torch.stack(results[10:]))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_woven_experts_beside_a_shared_one_equal_the_plain_ones(tokens):
    mixture = mxfp4_mixture(shared_size=48)
    x = torch.randn(tokens, 192, device=DEVICE).bfloat16()
    expected = mixture(x)
    fuse(torch.nn.ModuleList([mixture]), TRITON)
    arrange_weights(mixture)
    assert type(mixture) is FusedSharedExpertMixture
    assert mixture.experts.packed["gate_up_proj"].is_woven
    assert relative_error(mixture(x), expected) < TOLERANCE[torch.bfloat16]


def test_inputs_are_quantised_as_the_plain_layer_does():
    weight = mixture_of(Fp8(16, 32, "group"), torch.float32).experts.packed["gate_up_proj"]
    x = torch.randn(50, 64, device=DEVICE) * torch.logspace(-6, 3, 50, device=DEVICE)[:, None]
    x[3] = 0
    rows = moe_packed.prepare(x, packed_experts(weight))
    numbers = rows.numbers.float().transpose(1, 2).flatten(1)
    mine = numbers.unflatten(1, (-1, 32)) * rows.scales.unsqueeze(-1)
    assert torch.equal(mine.flatten(1), weight.quantised_inputs(x))


def test_rounding_without_fp8_gives_the_nearest_numbers():
    """On GPUs without FP8, and in the interpreter, arithmetic rounds inputs."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = from_e4m3(codes).double()
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat((numbers, middles, middles * (1 - 1e-6), middles * (1 + 1e-6))).float()
    x = torch.cat((x, -x, torch.tensor([448.0, 1e-20]))).to(DEVICE)
    # A row whose largest number is 448 has a scale of 1.
    x = torch.cat((x, x.new_full((-len(x) % 32,), 448.0))).view(-1, 32)
    x[:, 0] = 448.0
    scheme = mixture_of(Fp8(16, 32, "group"), torch.float32, sizes=(32, 32, 1, 1))
    weight = packed_experts(scheme.experts.packed["gate_up_proj"])
    rows = moe_packed.prepare(x, weight)
    assert (rows.scales == 1).all()
    assert torch.equal(rows.numbers.float().transpose(1, 2).flatten(1), from_e4m3(to_e4m3(x)))


@pytest.mark.skipif(HAS_GPU, reason="the steps' tensors are the CPU's, for the interpreter")
@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_a_model_with_packed_experts_is_fused_and_computes_the_same(name, tmp_path):
    pack, config, inputs = FORMATS[name]
    if "ignore" in config:
        config = config | {"ignore": ["lm_head", "re:.*mlp.gate$"]}
    _, packed = make_pair(tmp_path, EXPERTS, pack, config | {"modules_to_not_convert": []})
    plain, model = load_packed(packed), load_packed(packed)
    fuse(model, TRITON)
    assert type(model.model) is FusedDecoder
    assert all(type(layer.mlp) is FusedMixtureOfExperts for layer in model.model.layers)
    tolerance = dict(rtol=0, atol=0.5) if inputs else dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_of(model), logits_of(plain), **tolerance)


@spread({"scheme": [None, Fp8(16, 32, "group"), ALONE["int4"]], "dtype": DTYPES})
def test_a_mixture_with_a_shared_expert_equals_the_plain_one(scheme, dtype):
    mixture = mixture_of(scheme, dtype, shared_size=48)
    x = torch.randn(7, 64, device=DEVICE).to(dtype)
    expected = mixture(x)
    fuse(torch.nn.ModuleList([mixture]), TRITON)
    assert type(mixture) is FusedSharedExpertMixture
    error = 5e-3 if scheme == Fp8(16, 32, "group") else 0
    assert relative_error(mixture(x), expected) < max(TOLERANCE[dtype], error)


def test_a_warmup_launches_what_a_shared_expert_launches_for_prompts(monkeypatch):
    """Its results are not quantised for the layer that reads them, so a reader is not named."""
    mixture = mixture_of(None, torch.float32, shared_size=48)
    fuse(torch.nn.ModuleList([mixture]), TRITON)
    readers = []
    projection = mixture.shared_expert.gate_up_proj
    monkeypatch.setattr(projection, "warmup_gated", lambda gelu, reader: readers.append(reader))
    mixture.warmup(8)
    assert readers == [None]
