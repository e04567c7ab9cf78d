"""The kernels that multiply by codes of 4 or 8 bits, against float64 products of the numbers that
the codes stand for: in Triton's interpreter on a CPU, and compiled, in bfloat16 too, on a GPU.
"""

import plain_layers as plain
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from effort import spread

from nanovllm.backends.cuda.triton import packed_linear, woven_linear, woven_row
from nanovllm.backends.cuda.triton.packed_linear import PackedTensors, Tiling
from nanovllm.backends.cuda.triton.unnormed import Stream, Unnormed
from nanovllm.backends.quantised.packed import pack

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float16] + [pytest.param(torch.bfloat16, marks=pytest.mark.gpu)] * HAS_GPU
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Outputs, inputs, columns of a group: also no multiples of a tile or of a run of words.
BITS = [(4, True), (4, False), (8, True), (8, False)]
SHAPES = [(48, 256, 128), (40, 192, 32), (24, 384, 64), (36, 520, 520), (34, 2304, 256)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(outputs, inputs, group, *, bits=4, zeros=True, dtype=torch.float16):
    """Make a random weight: its tensors, and its numbers, rounded as the plain layer rounds."""
    groups = -(-inputs // group)
    codes = torch.randint(2**bits, (outputs, inputs))
    points = torch.full((outputs, groups), 2 ** (bits - 1))
    if zeros:
        points = torch.randint(2**bits, (outputs, groups))
    scales = ((0.5 + torch.rand(outputs, groups)) / 2**bits / inputs**0.5).to(dtype)
    points_of, scales_of = (x.repeat_interleave(group, dim=1)[:, :inputs] for x in (points, scales))
    numbers = (codes - points_of).to(dtype) * scales_of
    factors = scales.view(torch.int16).int() << 16 | points
    tensors = pack(codes, bits).to(DEVICE), factors.T.contiguous().to(torch.int32).to(DEVICE)
    weight = PackedTensors(*tensors, bits, group, inputs)
    return weight, numbers.to(DEVICE)


def activated(product, dtype, gelu):
    """Activate gates, and multiply them by ups, of numbers that are rounded as kernels round."""
    gates, ups = product.to(dtype).double().chunk(2, dim=1)
    return (F.gelu(gates, approximate="tanh") if gelu else F.silu(gates)) * ups


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[actual.dtype], f"relative error {error:.2e}"


def case(rows, shape, dtype, **options):
    weight, numbers = make(*shape, dtype=dtype, **options)
    x = torch.randn(rows, shape[1], device=DEVICE).to(dtype)
    bias = torch.randn(shape[0], device=DEVICE).to(dtype)
    return x, weight, bias, x.double() @ numbers.double().T + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits, zeros", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantise_yields_the_numbers_of_the_plain_layer(shape, bits, zeros, dtype):
    weight, numbers = make(*shape, bits=bits, zeros=zeros, dtype=dtype)
    assert torch.equal(packed_linear.dequantise(weight, dtype), numbers)


@pytest.mark.parametrize("dtype", DTYPES)
@spread({"shape": SHAPES, "rows": [1, 3]})
@pytest.mark.parametrize("bits, zeros", BITS)
def test_few_rows_equal_their_product_in_float64(rows, shape, bits, zeros, dtype):
    x, weight, bias, expected = case(rows, shape, dtype, bits=bits, zeros=zeros)
    assert_close(packed_linear.few_rows_linear(x, weight, bias), expected)
    for gelu in (False, True):
        gated = packed_linear.few_rows_linear(x, weight, bias, gated=True, gelu=gelu)
        assert_close(gated, activated(expected, dtype, gelu))


@pytest.mark.parametrize("dtype", DTYPES)
@spread({"shape": SHAPES, "rows, splits": [(20, 3), (20, 1), (1, 1)]})
@pytest.mark.parametrize("bits, zeros", BITS)
def test_rows_of_a_decode_step_equal_their_product_in_float64(
    rows, splits, shape, bits, zeros, dtype
):
    x, weight, bias, expected = case(rows, shape, dtype, bits=bits, zeros=zeros)
    tiling = Tiling(block_n=32, block_m=16, block_w=16, splits=splits, stages=2, warps=4)
    assert_close(packed_linear.tiled_linear(x, weight, bias, tiling), expected)
    gated = packed_linear.tiled_linear(x, weight, bias, tiling, gated=True, gelu=True)
    assert_close(gated, activated(expected, dtype, gelu=True))


WOVEN_SHAPES = [(48, 256, 128), (34, 2304, 256), (40, 384, 384)]


def woven_case(rows, shape, dtype, **options):
    x, weight, bias, expected = case(rows, shape, dtype, **options)
    woven_linear.weave(weight.codes)
    return x, weight._replace(woven=True), bias, expected


def test_woven_words_hold_the_codes_that_a_thread_needs_together():
    places = torch.tensor(woven_linear.places()).view(4, 4, 2, 4)  # lane, block, second, code
    assert sorted(places.flatten().tolist()) == list(range(128))
    assert places[1, 0].tolist() == [[2, 10, 18, 26], [3, 11, 19, 27]]
    assert torch.equal(places[:, 3], places[:, 0] + 96)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WOVEN_SHAPES)
def test_woven_codes_stand_for_the_same_numbers(shape, dtype):
    weight, numbers = make(*shape, dtype=dtype)
    woven_linear.weave(weight.codes)
    weight = weight._replace(woven=True)
    assert torch.equal(packed_linear.dequantise(weight, dtype), numbers)


def test_the_warps_of_a_program_take_all_inputs_of_a_row():
    for inputs in range(128, 32768, 128):
        warps, runs, blocks = woven_row.division(inputs)
        assert warps * runs * blocks * 128 >= inputs and runs <= 8
        assert warps * runs * (blocks - 1) * 128 < inputs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("division", [(1, 8, 3), (2, 5, 2), (4, 3, 2), (8, 3, 1), (1, 6, 3)])
def test_a_row_may_be_divided_among_warps_in_any_way(division, dtype):
    """The kernel is written in Gluon, which has no interpreter."""
    outputs, inputs, group = shape = 34, 2304, 256
    x, weight, bias, expected = woven_case(1, shape, dtype)
    tensors = x, weight.codes, weight.factors, bias, woven_row.Division(*division)
    assert_close(woven_row.linear(*tensors, group=group), expected)
    gated = woven_row.linear(*tensors, group=group, gated=True)
    assert_close(gated, activated(expected, dtype, gelu=False))


def test_codes_of_an_odd_number_of_outputs_are_not_woven(monkeypatch):
    """The halves of a tile are outputs of the first half and of the second."""
    monkeypatch.setattr(packed_linear, "is_hopper", lambda device: True)
    assert packed_linear.takes_woven(torch.device("cpu"), 4, 128, 34, 256)
    assert not packed_linear.takes_woven(torch.device("cpu"), 4, 128, 33, 256)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(woven_linear, "num_processors", lambda device: 132)


@pytest.mark.parametrize("rows", [8, 16, 32, 64, 96, 128, 160, 192, 256])
def test_tiles_fetch_no_rows_beyond_the_last_of_a_graph(rows, hopper):
    """Such boxes take up to 2.3 times as long as whole ones."""
    tiling = woven_linear.tiling(torch.empty(rows, 4096), 4096)
    assert rows % (tiling.block_m + tiling.more) == 0


@pytest.mark.parametrize("rows", [2, 16, 64, 96, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("outputs", [64, 4096, 6144, 12288, 25600, 151936])
def test_programs_that_share_tiles_run_at_once(rows, outputs, hopper):
    tiling = woven_linear.tiling(torch.empty(rows, 4096), outputs)
    row_tiles = -(-rows // (tiling.block_m + tiling.more))
    tiles = row_tiles * -(-outputs // (16 * tiling.warps))
    assert tiling.warps * tiling.splits * (tiles - tiling.whole) <= 16 * 132
    assert tiling.whole % 132 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("splits, whole", [(1, 0), (2, 0), (3, 2), (9, 1), (2, 99)])
@pytest.mark.parametrize("block_m, more, warps", [(8, 0, 4), (64, 0, 4), (64, 32, 4), (128, 16, 8)])
def test_programs_may_share_tiles_in_any_way(block_m, more, warps, splits, whole, gated, dtype):
    """Each product is computed twice: the first one must leave the programs' counters at 0."""
    outputs, inputs, group = shape = 328, 2304, 256
    x, weight, bias, expected = woven_case(150, shape, dtype)
    if gated:
        expected = activated(expected, dtype, gelu=False)
    tiling = woven_linear.Tiling(block_m, more, warps, splits, stages=2, whole=whole)
    for _ in range(2):
        tensors = x, weight.codes, weight.factors, bias, tiling
        assert_close(woven_linear.linear(*tensors, group=group, gated=gated), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [*WOVEN_SHAPES, (40, 1024, 128), (4096, 4096, 128)])
def test_a_row_is_normed_and_added_to_the_residual_stream(shape, zero_centered, dtype):
    """The kernel is written in Gluon, which has no interpreter."""
    x, weight, bias, _ = woven_case(1, shape, dtype)
    squares = x.float().square().view(-1, 64).sum(dim=1)
    gain = torch.rand(shape[1], device=DEVICE).to(dtype)
    row = Unnormed(Stream(x, squares), gain, 1e-6, zero_centered)
    normed = plain.rms_norm(x, gain, 1e-6, zero_centered)
    numbers = packed_linear.dequantise(weight, dtype)
    expected = normed.double() @ numbers.double().T + bias.double()
    gated = packed_linear.woven_product(row, weight, bias, gated=True)
    assert_close(gated, activated(expected, dtype, gelu=False))
    residual = torch.randn(1, shape[0], device=DEVICE).to(dtype)
    for given in (row, normed):
        total, parts = packed_linear.woven_product(given, weight, bias, residual=residual)
        assert_close(total, expected.to(dtype).double() + residual.double())
        torch.testing.assert_close(parts.sum(), total.float().square().sum(), rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*WOVEN_SHAPES, (4096, 4096, 128)])
@pytest.mark.parametrize("rows", [1, 3, 16, 30, 40, 90, 100, 150, 180, 200, 256])
def test_tensor_cores_multiply_by_woven_codes(rows, shape, dtype):
    """The kernel is written in Gluon, which has no interpreter."""
    x, weight, bias, expected = woven_case(rows, shape, dtype)
    assert_close(packed_linear.woven_product(x, weight, bias), expected)
    for gelu in (False, True):
        gated = packed_linear.woven_product(x, weight, bias, gated=True, gelu=gelu)
        assert_close(gated, activated(expected, dtype, gelu))
