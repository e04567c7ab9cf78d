"""The kernels of FP8 weights compute what the plain layer says, in float64.

They run in Triton's interpreter on a CPU, as on a GPU without FP8, and compiled on a GPU.
"""

import weakref

import plain_layers as plain
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from effort import spread
from test_kernels import DEVICE, DTYPES, assert_close

from nanovllm.backends.cuda.fused_fp8 import FusedFp8Weight
from nanovllm.backends.cuda.fused_quantised import drop_copies, restore_weights, use_packed_kernels
from nanovllm.backends.cuda.products import fp8_splitk, gated_linear_fp8, linear_fp8
from nanovllm.backends.cuda.triton import (
    decode_attention,
    fp8_gemv,
    fp8_inputs,
    fp8_linear,
)
from nanovllm.backends.cuda.triton.dispatch import arrivals, num_processors
from nanovllm.backends.cuda.triton.elementwise import activate_and_mul
from nanovllm.backends.cuda.triton.fp8_gemv import WORDS_OF_PART
from nanovllm.backends.cuda.triton.fp8_inputs import Fp8Matrix
from nanovllm.backends.cuda.triton.fp8_linear import Tiling
from nanovllm.backends.cuda.triton.unnormed import Stream, Unnormed
from nanovllm.backends.quantised.config import Fp8
from nanovllm.backends.quantised.fp8 import Fp8Weight, rounded, scale_for
from nanovllm.layers.attention import AttentionOptions, KVCache, PagedKV
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# How inputs are quantised, the columns that share a scale of the weight, and the rows.
FORMATS = {
    "blocks": ("group", 128, 128),
    "rows and groups": ("group", 64, 1),
    "rows and tokens": ("token", None, 1),
    "static": ("tensor", None, 1),
    "weights alone, blocks": (None, 128, 128),
    "weights alone, rows": (None, None, 1),
}
needs_gluon = pytest.mark.skipif(fp8_splitk is None, reason="Triton is too old")
OUTPUTS = 272  # the last tile and the last block of scales are short


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make_matrix(how, group, block, inputs=288, outputs=OUTPUTS):
    codes = torch.randn(outputs, inputs, device=DEVICE).mul(100).clamp(-448, 448)
    codes[:, 0] = 2.0**-9  # the least number of e4m3
    count = 1 if group is None else -(-inputs // group)
    blocks = torch.rand(-(-outputs // block), count, device=DEVICE) * 0.01 + 0.001
    scales = blocks.repeat_interleave(block, dim=0)[:outputs].contiguous()
    static = torch.tensor(0.01, device=DEVICE) if how == "tensor" else None
    codes = codes.to(torch.float8_e4m3fn)
    of_blocks = blocks if block == 128 else None
    return Fp8Matrix(codes, scales, group or inputs, block, how, static, of_blocks)


def make_inputs(rows, inputs, dtype):
    x = torch.randn(rows, inputs, device=DEVICE)
    x[:, :16] *= 1e-3  # small beside the rest of their group: numbers below 2^-6
    x[-1, 64:128] = 0  # a group of zeros
    x[0, 5] = 50  # more than a static scale covers
    return x.to(dtype)


def expected(x, matrix, bias=None):
    """Compute the product in float64 as Fp8Weight's docstring says it."""
    x = x.float()
    if matrix.activations == "tensor":
        x = rounded(x, matrix.input_scale)
    elif matrix.activations is not None:
        width = matrix.group if matrix.activations == "group" else x.shape[1]
        parts = [rounded(p, scale_for(p.abs().amax(1, True))) for p in x.split(width, dim=1)]
        x = torch.cat(parts, dim=1)
    scales = matrix.scales.double().repeat_interleave(matrix.group, dim=1)
    weight = matrix.codes.double() * scales[:, : matrix.codes.shape[1]]
    product = x.double() @ weight.T
    return product if bias is None else product + bias.double()


def assert_product(actual, want, matrix):
    """As assert_close; but Hopper's tensor cores add products of FP8 up in some 14 bits."""
    if DEVICE == "cuda" and matrix.activations is not None and want.dtype == torch.float32:
        error = (actual.double() - want.double()).norm() / want.double().norm()
        assert error < 1e-3, f"relative error {error:.2e}"
    else:
        assert_close(actual, want)


@spread({"name": list(FORMATS), "dtype": DTYPES})
def test_linear_equals_the_plain_layers_product(name, dtype):
    matrix = make_matrix(*FORMATS[name])
    bias = torch.randn(OUTPUTS, device=DEVICE).to(dtype)
    for rows in (1, 3, 20, 70):
        x = make_inputs(rows, 288, dtype)
        assert fp8_linear.suits(x, matrix)
        want = expected(x, matrix, bias).to(dtype)
        assert_product(linear_fp8(x, matrix, bias, dtype), want, matrix)


@spread({"name": list(FORMATS), "dtype": DTYPES[::-1], "gelu": [False, True]})
def test_gated_linear_equals_the_plain_layers_product(name, gelu, dtype):
    matrix = make_matrix(*FORMATS[name])
    for rows in (2, 17):
        x = make_inputs(rows, 288, dtype)
        gates, ups = expected(x, matrix).to(dtype).float().chunk(2, dim=1)
        active = F.gelu(gates, approximate="tanh") if gelu else F.silu(gates)
        want = (active.to(dtype).float() * ups).to(dtype)
        assert_product(gated_linear_fp8(x, matrix, dtype, gelu), want, matrix)


@pytest.mark.parametrize("swap", [False, True])
@spread(
    {
        "name": ["blocks", "rows and groups", "static", "weights alone, rows"],
        "splits": [4, 1],
    }
)
def test_products_of_any_tiling_equal_the_plain_layers(name, splits, swap):
    matrix = make_matrix(*FORMATS[name])
    x = make_inputs(37, 288, torch.float16)
    rows = fp8_inputs.Rows(x, None, len(x))
    if matrix.activations:
        rows = fp8_inputs.quantise(x, matrix)
    chosen = Tiling(32, 64, splits, warps=4, stages=3, swap=swap)
    out = fp8_linear.multiply(rows, matrix, None, torch.float16, chosen)
    assert_close(out, expected(x, matrix).half())


def test_tiles_of_17_to_128_rows_are_whole_and_padding_changes_no_result(monkeypatch):
    monkeypatch.setattr(fp8_linear, "has_large_shared_memory", lambda device: True)
    matrix = make_matrix(*FORMATS["blocks"])
    for count in (17, 33, 70):
        x = make_inputs(count, 288, torch.float16)
        rows = fp8_inputs.quantise(x, matrix)
        chosen = fp8_linear.tiling(rows, matrix)
        assert len(rows.codes) % chosen.block_m == 0 and len(rows) == count
        rows.codes[count:], rows.scales[:, count:] = torch.nan, torch.nan
        out = fp8_linear.multiply(rows, matrix, None, torch.float16, chosen)
        assert_close(out, expected(x, matrix).half())


@pytest.mark.parametrize(
    "name, padded", [("blocks", 256), ("blocks, batch-invariant", 132), ("rows and groups", 132)]
)
def test_inputs_of_a_decode_step_fill_tiles_of_cublas_on_hopper(name, padded, monkeypatch):
    monkeypatch.setattr(fp8_inputs, "is_hopper", lambda device: True)
    matrix = make_matrix(*FORMATS[name.removesuffix(", batch-invariant")])
    if name == "blocks, batch-invariant":
        matrix = matrix._replace(block_scales=None)  # as its weight does not make them
    x = make_inputs(130, 288, torch.float16)
    ones, zeros = torch.ones(288, device=DEVICE).half(), torch.zeros_like(x)
    quantised = fp8_inputs.quantise(x, matrix)
    normed = fp8_inputs.norm_and_quantise(zeros, x.clone(), matrix, weight=ones, eps=1e-6)
    unit = (x.float() * (x.float().square().mean(1, True) + 1e-6).rsqrt()).half()
    for rows, inputs in ((quantised, x), (normed, unit)):
        assert len(rows) == 130 and len(rows.codes) == rows.scales.shape[1] == padded
        rows.codes[130:], rows.scales[:, 130:] = torch.nan, torch.nan
        out = fp8_linear.multiply(rows, matrix, None, x.dtype, fp8_linear.tiling(rows, matrix))
        assert_close(out, expected(inputs, matrix).half())
    assert len(fp8_inputs.quantise(x.expand(2, -1, -1).flatten(0, 1)[:257], matrix).codes) == 260


@needs_gluon
def test_split_k_is_taken_where_it_is_fast_and_tiles_are_whole():
    """A box of the tensor memory accelerator that reaches beyond the last row is slow."""
    taken = {
        (96, 4096, 12288): (0, 32, 4),
        (192, 4096, 12288): (0, 32, 4),
        (256, 4096, 12288): (0, 64, 2),
        (192, 24576, 4096): (1, 60, 2),
        (192, 2560, 9728): (0, 20, 4),
        (192, 33792, 4096): (2, 0, 1),
    }
    for (count, *sizes), cut in taken.items():
        assert fp8_splitk.is_fastest(count, *sizes, 132)
        assert fp8_splitk.cut(count, *sizes, 132) == cut
    for count, *sizes in (
        (64, 4096, 12288),
        (96, 24576, 4096),
        (256, 24576, 4096),
        (192, 6144, 4096),
        (192, 1024, 4096),
        (192, 4096, 640),
    ):
        assert not fp8_splitk.is_fastest(count, *sizes, 132)
    for count in range(65, 257):
        tiles, groups = fp8_splitk.row_tiles(count)
        assert groups in (2, 3)
        assert count <= tiles * groups * 64 <= fp8_inputs.padded_rows.fn(count, True)
        for processors in (16, 78, 114, 132):
            for outputs in range(128, 40960, 128):
                _, shared, splits = fp8_splitk.cut(count, outputs, 4096, processors)
                assert shared * splits <= processors  # one program each: all run at once
                assert shared * splits * groups <= 4 * processors  # counters


@needs_gluon
def test_split_k_takes_whole_columns_and_halves_alone(monkeypatch):
    for module in (fp8_inputs, fp8_splitk):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
    monkeypatch.setattr(fp8_splitk, "num_processors", lambda device: 4)
    for inputs, dtype, suits in (
        (256, torch.bfloat16, True),
        (256, torch.float32, False),
        (192, torch.bfloat16, False),
    ):
        matrix = make_matrix("group", 128, 128, inputs, outputs=640)
        rows = fp8_inputs.quantise(make_inputs(130, inputs, torch.float32), matrix)
        assert fp8_splitk.suits(rows, matrix, dtype) is suits


needs_hopper = pytest.mark.skipif(
    DEVICE != "cuda" or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@needs_gluon
@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "waves, inputs", [(0.2, 512), (0.2, 1536), (1.1, 512), (1.1, 640), (2, 1024), (2.3, 1024)]
)
def test_split_k_products_equal_the_plain_layers(waves, inputs):
    outputs = int(waves * num_processors(torch.device("cuda"))) * 128
    matrix = make_matrix("group", 128, 128, inputs, outputs)
    bias = torch.randn(outputs, device=DEVICE).bfloat16()
    for count in (65, 128, 129, 192, 193, 256):
        x = make_inputs(count, inputs, torch.bfloat16)
        rows = fp8_inputs.quantise(x, matrix)
        suits = waves < 1 or 128 < count <= 192
        assert fp8_splitk.suits(rows, matrix, torch.bfloat16) is suits
        rows.codes[count:], rows.scales[:, count:] = torch.nan, torch.nan  # padding
        out = linear_fp8(rows, matrix, bias, torch.bfloat16)
        assert_close(out, expected(x, matrix, bias).bfloat16())


@needs_gluon
@pytest.mark.gpu
@needs_hopper
def test_split_k_products_in_a_row_do_not_disturb_each_other():
    """They use the same memory and the same counters, and each starts before the last one ends."""
    matrix = make_matrix("group", 128, 128, 1536, 26 * 128)
    rows = [
        fp8_inputs.quantise(make_inputs(count, 1536, torch.bfloat16), matrix)
        for count in (192, 96, 250, 192)
    ]

    def multiply():
        return [fp8_splitk.linear(x, matrix, None, torch.bfloat16) for x in rows * 5]

    alone = []
    for x in rows:
        alone.append(fp8_splitk.linear(x, matrix, None, torch.bfloat16))
        torch.cuda.synchronize()
    got = multiply()
    with torch.cuda.stream(torch.cuda.Stream()):
        counters = arrivals(torch.device("cuda"))
        multiply()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = multiply()
    for out in captured:
        out.zero_()
    graph.replay()
    graph.replay()
    for results in (got, captured):
        for out, want in zip(results, alone * 5, strict=True):
            assert torch.equal(out, want)
    assert counters.count_nonzero() == 0
    assert arrivals(torch.device("cuda")).count_nonzero() == 0


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("how, group, block", [("group", 128, 128), ("token", None, 1)])
def test_products_of_many_rows_by_cublas_equal_the_plain_layers(how, group, block):
    matrix = make_matrix(how, group, block, inputs=1024, outputs=640)
    bias = torch.randn(640, device=DEVICE).bfloat16()
    for count in (150, 300):
        x = make_inputs(count, 1024, torch.bfloat16)
        rows = fp8_inputs.quantise(x, matrix)
        assert fp8_linear.suits_cublas(rows, matrix, torch.bfloat16)
        out = fp8_linear.multiply_by_cublas(rows, matrix, bias)
        assert_close(out, expected(x, matrix, bias).bfloat16())
    assert torch.equal(out, linear_fp8(rows, matrix, bias, torch.bfloat16))  # of 300 rows


def make_block_weight():
    plain = torch.empty(256, 512, device=DEVICE)
    whole = slice(None), slice(None)
    part = WeightSlice("layer.weight", plain, whole, plain.shape)
    weight = Fp8Weight(plain, [part], Fp8(128, 128, "group"), ParallelGroup()).to(DEVICE)
    weight.scales.copy_(torch.rand(2, 4).repeat_interleave(128, dim=0))
    return weight


@torch.inference_mode()
def test_scales_for_cublas_follow_an_update():
    """Graphs hold their address, so an update must write to the same memory."""

    weight, source = make_block_weight(), make_block_weight()
    use_packed_kernels(weight)
    assert type(weight) is FusedFp8Weight
    restore_weights(weight)
    (matrix,) = weight.matrices(None)
    assert torch.equal(matrix.block_scales, weight.scales[::128])
    weight.take_weights(source)
    assert torch.equal(matrix.block_scales, source.scales[::128])
    assert weight.matrices(None)[0].block_scales is matrix.block_scales
    drop_copies(weight)
    assert weight.block_scales is None
    assert torch.equal(weight.matrices(None)[0].block_scales, source.scales[::128])
    drop_copies(weight)
    weight.take_weights(source)  # during sleep, in the CPU's memory, where no kernel reads them
    assert weight.block_scales is None


@torch.inference_mode()
def test_a_matrix_is_kept_and_follows_its_weight():
    """Sleep moves the memory of parameters, or replaces them."""
    weight = make_block_weight()
    use_packed_kernels(weight)
    (matrix,) = weight.matrices(None)
    assert weight.matrices(None)[0] is matrix
    with torch.inference_mode(False):
        for parameter in weight.parameters():
            parameter.data = parameter.data.clone()
    (matrix,) = weight.matrices(None)
    assert matrix.codes.data_ptr() == weight.codes.data_ptr()
    assert matrix.scales.data_ptr() == weight.scales.data_ptr()
    for name in ("codes", "scales"):
        new = torch.nn.Parameter(weight.get_parameter(name).clone(), requires_grad=False)
        setattr(weight, name, new)
        assert getattr(weight.matrices(None)[0], name) is new
    copy = weakref.ref(weight.block_scales)
    del matrix
    drop_copies(weight)
    assert copy() is None


def test_inputs_are_quantised_in_groups_of_any_width():
    """Groups of 2,048 are wider than what a program takes of narrow ones."""
    for group in (32, 2048):
        matrix = make_matrix("group", group, 1, inputs=3072, outputs=16)
        x = make_inputs(2, 3072, torch.float32)
        assert fp8_linear.suits(x, matrix)
        assert_product(linear_fp8(x, matrix, None, x.dtype), expected(x, matrix).float(), matrix)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["blocks", "rows and tokens", "static"])
def test_inputs_are_rounded_as_in_the_plain_layer(name, dtype):
    """To the same codes and scales, with the activation before it, too."""
    matrix = make_matrix(*FORMATS[name])
    x = make_inputs(5, 2 * 288, dtype)
    product = activate_and_mul(x.clone())
    for rows, inputs in (
        (fp8_inputs.quantise(x[:, :288], matrix), x[:, :288]),
        (fp8_inputs.activate_and_quantise(x, matrix), product),
    ):
        scales = rows.scales.T.repeat_interleave(-(-288 // len(rows.scales)), dim=1)
        if name == "blocks":
            scales = rows.scales.T.repeat_interleave(128, dim=1)[:, :288]
        identity = Fp8Matrix(
            torch.eye(288, device=DEVICE).to(torch.float8_e4m3fn),
            torch.ones(288, 1, device=DEVICE).expand(288, -(-288 // matrix.group)).contiguous(),
            *matrix[2:],
        )
        want = expected(inputs, identity)
        assert torch.equal((rows.codes.float() * scales)[:5].double(), want)


def test_a_token_whose_inputs_lie_on_several_ranks_has_one_scale():
    matrix = make_matrix(*FORMATS["rows and tokens"])
    x = make_inputs(3, 288, torch.float32)
    largest = torch.tensor([100.0, 200.0, 300.0], device=DEVICE)
    scale = largest[:, None] / 448
    weight = matrix.codes.double() * matrix.scales.double()
    want = rounded(x, scale).double() @ weight.T
    assert_product(linear_fp8(x, matrix, None, x.dtype, largest), want.float(), matrix)


def test_cublas_takes_blocks_only_with_inputs_in_groups(monkeypatch):
    """compressed-tensors may give weights in blocks to inputs with a scale for each token."""
    monkeypatch.setattr(fp8_linear, "is_hopper", lambda device: True)
    monkeypatch.setattr(F, "scaled_mm", None, raising=False)  # older releases of PyTorch lack it
    for how, takes in (("group", True), ("token", False)):
        matrix = make_matrix(how, 128, 128, inputs=512, outputs=640)
        rows = fp8_inputs.quantise(make_inputs(130, 512, torch.bfloat16), matrix)
        assert fp8_linear.suits_cublas(rows, matrix, torch.bfloat16) == takes


def test_formats_that_no_kernel_knows_are_told():
    matrix = make_matrix("group", 128, 128)
    x = make_inputs(3, 288, torch.float32)
    assert fp8_linear.suits(x, matrix)
    for group in (0, 16, 96):
        assert not fp8_linear.suits(x, matrix._replace(group=group))
    assert not fp8_linear.suits(x[:0], matrix)
    assert not fp8_linear.suits(x, matrix._replace(codes=matrix.codes[:, :280]))


@pytest.mark.parametrize("name", ["blocks", "rows and tokens", "weights alone, blocks"])
def test_a_row_of_several_parts_equals_the_plain_layers_product(name):
    inputs = 4 * WORDS_OF_PART + 32
    matrix = make_matrix(*FORMATS[name], inputs)
    x = make_inputs(1, inputs, torch.float16)
    rows = fp8_inputs.as_rows(x, matrix)
    assert fp8_gemv.suits(rows, matrix)
    out = fp8_gemv.linear(rows, matrix, None, torch.float32)
    assert_close(out, expected(x, matrix).float())


def test_the_warps_of_a_program_take_all_inputs_of_an_fp8_row():
    fp8_row = pytest.importorskip("nanovllm.backends.cuda.triton.fp8_row")
    for inputs in range(128, 16384 + 1, 128):
        warps, runs, blocks = fp8_row.division(inputs)
        assert warps * runs * blocks * 128 >= inputs and runs <= 8
        assert warps * runs * (blocks - 1) * 128 < inputs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("inputs", [128, 1024, 2304, 4096, 8320, 12288])
def test_a_row_is_quantised_normed_and_added_to_the_residual_stream(inputs, zero_centered, dtype):
    """The kernel is written in Gluon, which has no interpreter."""
    fp8_row = pytest.importorskip("nanovllm.backends.cuda.triton.fp8_row")
    matrix = make_matrix(*FORMATS["blocks"], inputs)
    x = make_inputs(1, inputs, dtype)
    if not fp8_row.suits(x, matrix):
        pytest.skip("needs a Hopper GPU")
    bias = torch.randn(OUTPUTS, device=DEVICE).to(dtype)
    residual = torch.randn(1, OUTPUTS, device=DEVICE).to(dtype)
    squares = x.float().square().view(-1, 64).sum(dim=1)
    gain = (torch.rand(inputs, device=DEVICE) / 4).to(dtype)  # float16 holds the gated products
    row = Unnormed(Stream(x, squares), gain, 1e-6, zero_centered)
    normed = plain.rms_norm(x, gain, 1e-6, zero_centered)
    for given, same in ((x, x), (row, normed), (normed, normed)):
        want = expected(same, matrix, bias)
        assert_rounded(fp8_row.linear(given, matrix, bias), want)
        total, parts = fp8_row.linear(given, matrix, bias, residual=residual)
        assert_rounded(total, want.to(dtype).double() + residual.double())
        torch.testing.assert_close(parts.sum(), total.float().square().sum(), rtol=1e-5, atol=0)
        for gelu in (False, True):
            gates, ups = expected(same, matrix).to(dtype).float().chunk(2, dim=1)
            active = F.gelu(gates, approximate="tanh") if gelu else F.silu(gates)
            gated = fp8_row.linear(given, matrix, gated=True, gelu=gelu)
            assert_rounded(gated, active.to(dtype).double() * ups)


def assert_rounded(actual, want):
    """Compare, where a sum of squares of another order may round a few inputs otherwise."""
    error = (actual.double() - want).norm() / want.norm()
    assert error < 1.5e-2, f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits, has_prefix", [(1, False), (4, False), (2, True)])
def test_attention_that_quantises_makes_the_codes_of_its_result(
    splits, has_prefix, dtype, monkeypatch
):
    """Three query heads share K and V, and the last sequence is padding."""
    # A GPU has so many heads that some differ if their norms are summed in another order, and as
    # many rows as there are counters.
    counters = len(arrivals(torch.device(DEVICE)))
    count, groups, dim = (counters // 32, 32, 128) if DEVICE == "cuda" else (5, 2, 32)
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_: splits)

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE).to(dtype)

    lens = 17 + torch.arange(count, device=DEVICE, dtype=torch.int32) * 29 % 113
    lens[-1] = 0
    tables = torch.arange(9 * count, device=DEVICE, dtype=torch.int32).view(count, 9)
    k, v = randn(2, 9 * count, 16, groups, dim)
    prefix = torch.tensor([16], dtype=torch.int32, device=DEVICE) if has_prefix else None
    if has_prefix:
        tables[:, 0] = 0
    qkv = randn(count, 5 * groups * dim)
    positions = (lens - 1).long()
    slots = tables.gather(1, positions.clamp(min=0)[:, None] // 16)[:, 0] * 16 + positions % 16
    slots[-1] = -1
    how = decode_attention.NormRopeStore(
        *randn(2, dim),
        eps=1e-6,
        cos_sin=torch.randn(130, dim, device=DEVICE),
        positions=positions.clamp(min=0),
        slot_mapping=slots.long(),
    )

    def attend(out):
        kv, options = PagedKV(KVCache(k.clone(), v.clone()), tables, lens), AttentionOptions(0.3)
        if has_prefix:
            q = qkv.view(count, -1, dim)[:, : 3 * groups]
            result = decode_attention.decode_attention(
                q, kv, options, shared_prefix_len=prefix, out=out
            )
        else:
            result = decode_attention.decode_attention_of_qkv(qkv, kv, options, how, out=out)
        return result, kv.cache.k

    inputs = 3 * groups * dim
    attention, cache = attend(None)
    matrix = make_matrix("group", dim, 1, inputs=inputs)
    want = fp8_inputs.quantise(attention.flatten(1), matrix)
    rows, other_cache = attend(fp8_inputs.empty_rows(count, inputs, matrix))
    assert len(rows) == count and rows.scales.shape == want.scales.shape
    assert torch.equal(rows.scales[:, : count - 1], want.scales[:, : count - 1])
    assert torch.equal(rows.codes[: count - 1].float(), want.codes[: count - 1].float())
    assert torch.equal(other_cache, cache)


def test_attention_of_more_than_128_rows_stores_codes_among_rows_of_padding(monkeypatch):
    monkeypatch.setattr(fp8_inputs, "needs_whole_tiles", lambda matrix: True)
    count, dim = 130, 32
    lens = 1 + torch.arange(count, device=DEVICE, dtype=torch.int32) % 5
    tables = torch.arange(count, device=DEVICE, dtype=torch.int32).view(count, 1)
    k, v = torch.randn(2, count, 16, 1, dim, device=DEVICE)
    q = torch.randn(count, 2, dim, device=DEVICE)
    matrix = make_matrix("group", dim, 1, inputs=2 * dim)

    def attend(out):
        kv = PagedKV(KVCache(k, v), tables, lens)
        return decode_attention.decode_attention(q, kv, AttentionOptions(0.3), out=out)

    want = fp8_inputs.quantise(attend(None).flatten(1), matrix)
    rows = attend(fp8_inputs.empty_rows(count, 2 * dim, matrix))
    assert rows.scales.shape == want.scales.shape == (2, 256)
    assert torch.equal(rows.scales[:, :count], want.scales[:, :count])
    assert torch.equal(rows.codes[:count].float(), want.codes[:count].float())
