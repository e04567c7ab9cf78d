"""The kernels for the experts of a single token: in Triton's interpreter on a CPU, and compiled, in
bfloat16 too, on a GPU. Those for woven experts run on Hopper alone.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from effort import spread
from test_packed_experts import (
    ALONE,
    DEVICE,
    DTYPES,
    HAS_GPU,
    TOLERANCE,
    WITH_INPUTS,
    dequantised,
    fused,
    mixture_of,
    mxfp4_mixture,
    on_hopper,
    relative_error,
    woven,
    woven_experts,
)

from nanovllm.backends.cuda.triton import moe as triton_moe
from nanovllm.backends.cuda.triton import moe_packed, moe_token
from nanovllm.layers.moe import ClampedSwiGLU

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HALVES = DTYPES[1:]  # in float32, a token has no kernels of its own
CLAMPED = ClampedSwiGLU(1.7, 0.5)


@pytest.fixture
def called(monkeypatch):
    """The names of the functions that compute products of experts, in the order of their calls."""
    names = []

    def note(module, name):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **o: (names.append(name), run(*a, **o))[1])

    note(moe_token, "gated_products")
    note(triton_moe, "multiply_packed")
    return names


@spread(
    {
        "name": ["fp8-rows", "fp8-blocks", "fp8-tensor"],
        "sizes": [(192, 96, 4, 2), (288, 480, 5, 3), (64, 672, 12, 5)],
        "dtype": HALVES,
    }
)
def test_one_token_of_experts_in_fp8_equals_a_float64_product(name, sizes, dtype, called):
    mixture = mixture_of(ALONE[name], dtype, gating=CLAMPED, bias=True, sizes=sizes)
    x = torch.randn(1, sizes[0], device=DEVICE).to(dtype)
    reference = dequantised(mixture)
    reference.gate.forward = lambda _: mixture.gate(x)
    assert relative_error(fused(mixture)(x), reference(x.double())) < TOLERANCE[dtype]
    assert called == ["gated_products", "multiply_packed"]


@spread({"name": list(WITH_INPUTS), "sizes": [(192, 96, 4, 2), (288, 480, 5, 3)], "dtype": HALVES})
def test_one_token_with_inputs_in_fp8_equals_the_plain_layer(name, sizes, dtype, called):
    mixture = mixture_of(WITH_INPUTS[name], dtype, gating=CLAMPED, bias=True, sizes=sizes)
    x = torch.randn(1, sizes[0], device=DEVICE).to(dtype)
    # A few hidden numbers that lie between two numbers of FP8 may become the other one. Neighbours
    # are up to an eighth apart.
    assert relative_error(fused(mixture)(x), mixture(x)) < 0.05
    assert called == ["gated_products", "multiply_packed"]


def test_a_token_that_must_get_the_bits_that_it_gets_among_others_has_their_kernels(called):
    mixture = fused(mixture_of(ALONE["fp8-blocks"], torch.float16))
    mixture.products = SimpleNamespace(is_invariant=True)
    x = torch.randn(2, 64, device=DEVICE).half()
    alone = mixture(x[:1])
    assert called == ["multiply_packed"] * 2
    assert torch.equal(alone, mixture(x)[:1])


@pytest.mark.parametrize("more, suits", [(0, True), (16, False)])
def test_rows_that_are_too_wide_for_a_programs_registers_are_multiplied_by_tiles(
    more, suits, called
):
    width = moe_token.MOST_BYTES // 2 + more  # a program has at least two rows
    mixture = mixture_of(ALONE["fp8-rows"], torch.float16, sizes=(width, 8, 2, 1))
    x = torch.randn(1, width, device=DEVICE).half()
    assert relative_error(fused(mixture)(x), mixture(x)) < TOLERANCE[torch.float16]
    assert called == ["gated_products" if suits else "multiply_packed", "multiply_packed"]


def test_a_group_that_ends_within_a_chunk_of_16_columns_is_multiplied_by_tiles():
    x = torch.zeros(1, 48, dtype=torch.float16, device=DEVICE)
    for group, suits in ((16, True), (48, True), (24, False), (8, False)):
        codes = torch.zeros(2, 64, 48, device=DEVICE).to(torch.float8_e4m3fn)
        scales = torch.ones(2, 64, 48 // group, device=DEVICE)
        for sharing in (None, group):
            weight = moe_packed.PackedExperts("e4m3", codes, scales, group, sharing)
            assert moe_token.suits(x, weight) == suits
            assert not moe_token.suits(x.float(), weight)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [(192, 320, 8, 2), (64, 64, 1, 1), (256, 192, 4, 4), (1216, 576, 40, 5), (2880, 2880, 32, 4)],
)
def test_one_token_of_woven_experts_equals_a_float64_product(sizes, renormalize, monkeypatch):
    """Rows have fewer chunks than a program has warps, or more, and not always a multiple."""
    mixture = mxfp4_mixture(gating=CLAMPED, bias=True, sizes=sizes)
    mixture.renormalize = renormalize
    reference, mine = dequantised(mixture), woven(mixture)
    reference.renormalize = renormalize
    monkeypatch.setattr(woven_experts, "multiply_woven", None)  # it is not called
    for _ in range(3):
        x = torch.randn(1, sizes[0], device=DEVICE).bfloat16()
        logits = mixture.gate(x)
        reference.gate.forward = mine.gate.forward = lambda _, logits=logits: logits
        assert relative_error(mine(x), reference(x.double())) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@on_hopper
def test_woven_rows_that_are_too_wide_for_a_warps_registers_are_multiplied_by_tiles():
    mixture = mxfp4_mixture(sizes=(4160, 64, 2, 1))
    x = torch.randn(1, 4160, device=DEVICE).bfloat16()
    assert relative_error(woven(mixture)(x), mixture(x)) < TOLERANCE[torch.bfloat16]


def layers_of(kind, count):
    """Make mixtures, each with its reference, and their copies in kernels."""
    if kind == "mxfp4":
        plain = [mxfp4_mixture() for _ in range(count)]
        return plain, [woven(mixture) for mixture in plain]
    scheme = WITH_INPUTS["fp8-blocks-and-groups"]
    plain = [mixture_of(scheme, torch.bfloat16, sizes=(192, 96, 4, 2)) for _ in range(count)]
    return plain, [fused(mixture) for mixture in plain]


KINDS = ["fp8", pytest.param("mxfp4", marks=on_hopper)]
captures = pytest.mark.skipif(not HAS_GPU, reason="it captures a graph")


def packed_of(mixture):
    return mixture.experts.packed.values()


def captured(run, x):
    """Capture run(x) in a graph: return the graph and the result that it writes."""
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    return graph, out


@pytest.mark.gpu
@captures
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_one_tokens_experts_reads_what_each_replay_gives_it(kind):
    """Kernels read the router's choice before the kernel before them has ended."""
    _, layers = layers_of(kind, 6)

    def run(x, wait=False):
        for layer in layers:
            x = layer(x)
            if wait:
                torch.cuda.synchronize()
        return x

    inputs = torch.randn(20, 1, 192, device=DEVICE).bfloat16()
    expected = [run(x, wait=True) for x in inputs]
    x = inputs[0].clone()
    graph, out = captured(run, x)
    for value, result in zip(inputs, expected):
        x.copy_(value)
        graph.replay()
        assert torch.equal(out, result)
        assert torch.equal(run(value), result)


@pytest.mark.gpu
@captures
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_one_tokens_experts_reads_weights_that_were_updated(kind):
    (plain,), (mixture,) = layers_of(kind, 1)
    x = torch.randn(1, 192, device=DEVICE).bfloat16()
    graph, out = captured(mixture, x)
    before = out.clone()
    for weight, target in zip(packed_of(plain), packed_of(mixture), strict=True):
        weight.codes.copy_(weight.codes.flip(1))
        if kind == "mxfp4":
            target.take_weights(weight)
        else:
            target.copy_parameters(weight)
    graph.replay()
    assert relative_error(out, plain(x)) < TOLERANCE[torch.bfloat16] < relative_error(out, before)
