"""Linear layers whose weights, and often inputs, are in FP8 (e4m3).

Their twin is `Fp8Weight`, whose docstring says what is computed. `_linear_kernel` multiplies codes
on tensor cores. fp8_inputs.py has quantised the inputs before. A single row is left to fp8_gemv.py
and fp8_row.py, and some products of decode steps on Hopper to fp8_splitk.py: products.py chooses.
Hopper's tensor cores add up products of FP8 in few bits, so the sum of each BLOCK_K columns is
added to a total in float32. For prompts, kernels of cuBLASLt and CUTLASS, which do the same, are
faster on Hopper.

Shapes: M rows, K inputs, N outputs, G groups of inputs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    MAX_ROWS,
    TensorDescriptor,
    admit_next,
    arrivals,
    ask_for,
    cdiv,
    gpu,
    has_large_shared_memory,
    is_hopper,
    launch,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.fp8_inputs import (
    CUBLAS_BLOCK,
    Fp8Matrix,
    Rows,
    as_rows,
    decoded,
    typed,
)
from nanovllm.backends.cuda.triton.prefill_gemm import place

PREFETCH = 1024  # inputs whose weights each program asks for before its inputs are ready
# A program lets the next kernel start when it has so many inputs left. On an H200 (torch 2.11,
# Triton 3.6), decode steps of Qwen3-8B with 4 and 16 rows took 5.6 and 1.8 % less time than if the
# next kernel might start at once. With 512 inputs, it was 5.0 % less and 0.5 % more.
LEAD = 256
COLUMN = tl.constexpr(8)  # of tiles: see `place`


class Tiling(NamedTuple):
    """The tiling of a product: how it is cut into programs."""

    block_m: int  # rows of a tile
    block_n: int  # outputs of a tile
    splits: int  # programs that share a tile
    warps: int
    stages: int  # steps whose tiles are in shared memory or on their way
    swap: bool = False  # whether the tensor cores compute the transposed product


def suits(x: Tensor, matrix: Fp8Matrix) -> bool:
    """Tell whether the kernels know the sizes and the format."""
    return is_known(matrix) and x.stride(-1) == 1 and x.shape[0] > 0


def is_known(matrix: Fp8Matrix) -> bool:
    """Tell whether the kernels know the sizes and the format of a weight.

    Tensor cores multiply 32 columns of FP8 at a time, and rows of tiles begin at 16 bytes.
    """
    group, inputs = matrix.group, matrix.codes.shape[1]
    is_whole = group == inputs or group >= 32 and group & (group - 1) == 0
    return TensorDescriptor is not None and is_whole and inputs % 16 == 0


def suits_cublas(x: Rows, matrix: Fp8Matrix, dtype: torch.dtype) -> bool:
    """Tell whether cuBLASLt, or CUTLASS for scales by rows, can multiply, and is the fastest."""
    rows, groups, (outputs, inputs) = x.codes.shape[0], matrix.scales.shape[1], matrix.codes.shape
    if (
        not is_hopper(matrix.codes.device)
        or not hasattr(F, "scaled_mm")
        or dtype != torch.bfloat16
        or matrix.activations is None
        or outputs % 16
    ):
        return False
    is_able = groups == 1 or (
        matrix.block_scales is not None
        and matrix.sharing == matrix.group == matrix.block_rows == CUBLAS_BLOCK
        and outputs % CUBLAS_BLOCK == 0
        and inputs % 512 == 0
    )
    # With the rows of a decode step, cuBLASLt has too few tiles for these: measured on an H200 with
    # 12,288 inputs and 4,096 outputs, and with 4,096 and 2,048.
    is_long = inputs >= 2 * outputs and groups > 1
    return is_able and rows > (MAX_ROWS if is_long else 128)


def tiling(x: Rows, matrix: Fp8Matrix) -> Tiling:
    """Choose how to cut a product into programs, as measured for the shapes of 8B on an H200."""
    rows, (outputs, inputs) = len(x.codes), matrix.codes.shape
    processors = num_processors(matrix.codes.device)
    has_room = has_large_shared_memory(matrix.codes.device)
    has_fp8_inputs = matrix.activations is not None
    if 16 < rows <= 64 and has_room and has_fp8_inputs:
        return _tiling_of_all_rows(rows, outputs, inputs, processors)
    block_m = 16 if rows <= 16 else 64
    is_wide = rows <= 16 or rows > 128 or outputs > 8192 or rows > 64 and inputs > 8192
    block_n = 128 if is_wide and has_room else 64
    tiles = cdiv(rows, block_m) * cdiv(outputs, block_n)
    if rows > 64 and block_n == 128 and tiles * 2 <= processors and has_fp8_inputs:
        return Tiling(block_m, block_n, _shares(tiles, inputs, processors), 4, 6)
    splits = 1
    # A program of few columns ends early. More programs than fit would wait for others.
    while splits < 4 and tiles * splits <= processors and inputs > splits * 16 * 128:
        splits *= 2
    stages = 3 if rows > 64 and tiles > 2 * processors or not has_room else 4
    return Tiling(block_m, block_n, splits, 4, stages, swap=rows <= 16 and has_room)


def _tiling_of_all_rows(rows: int, outputs: int, inputs: int, processors: int) -> Tiling:
    """Choose a tiling whose tiles have all rows, of 17 to 64, so that weights are read once."""
    tiles = cdiv(outputs, 128)
    splits = _shares(tiles, inputs, processors if rows <= 32 else processors * 3 // 4)
    stages = 6 if tiles * splits <= processors else 4
    return Tiling(32 if rows <= 32 else 64, 128, splits, 4, stages, swap=rows <= 32)


def _shares(tiles: int, inputs: int, programs: int) -> int:
    """Choose how many programs share a tile: all run at once, with 5 steps or more each."""
    return max(1, min(programs // tiles, inputs // (5 * 128), 6))


def invariant_linear(
    x: Tensor | Rows,
    matrix: Fp8Matrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    largest: Tensor | None = None,
) -> Tensor:
    """Compute what products.linear_fp8 does. A row's result does not depend on the number of rows.

    Tensor cores compute the same part of a sum in tiles of any size. The tile of the weight decides
    whether its rows share scales, and so the order in which a part is multiplied by scales.
    """
    x = as_rows(x, matrix, largest)
    shares_alike = (matrix.block_rows % 128 == 0) == (matrix.block_rows % 64 == 0)
    if len(x) <= 16:
        t = Tiling(16, 64, 1, 4, 4, swap=True)
    else:
        t = Tiling(64, 128 if len(x) > 128 and shares_alike else 64, 1, 4, 3)
    return multiply(x, matrix, bias, dtype, t)


def multiply(
    x: Rows,
    matrix: Fp8Matrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    t: Tiling,
) -> Tensor:
    """Compute x @ weight.T + bias: x [M, K], bias [N] -> [M, N]."""
    (rows, inputs), outputs = x.codes.shape, len(matrix.codes)
    out = torch.empty(rows, outputs, dtype=dtype, device=matrix.codes.device)
    block_k = block_of(matrix)
    tiles = cdiv(rows, t.block_m) * cdiv(outputs, t.block_n)
    parts = counters = None
    if t.splits > 1:
        parts = torch.empty(
            tiles, t.splits, t.block_m, t.block_n, dtype=torch.float32, device=out.device
        )
        counters = arrivals(out.device)
    codes = typed(matrix.codes)
    is_uniform = matrix.block_rows % t.block_n == 0
    launch(
        _linear_kernel,
        (tiles, t.splits),
        out,
        x.codes,
        codes,
        TensorDescriptor.from_tensor(x.codes, [t.block_m, block_k]),
        TensorDescriptor.from_tensor(codes, [t.block_n, block_k]),
        *(x.scales, matrix.scales, bias, parts, counters),
        *(x.codes.stride(0), outputs, inputs, matrix.scales.shape[1]),
        matrix.group if matrix.scales.shape[1] > 1 else block_k,
        matrix.scales.shape[1] > 1,
        x.scales is not None and x.scales.shape[0] > 1,
        is_uniform,
        *(t.block_m, t.block_n, block_k, t.splits, t.swap, PREFETCH, LEAD),
        # Others lack the tensor memory accelerator, or spill where they use it.
        has_large_shared_memory(out.device) and gpu(out.device).capability >= (9, 0),
        num_warps=t.warps,
        num_stages=t.stages,
        **overlap(out),
    )
    return out[: len(x)]


def multiply_by_cublas(x: Rows, matrix: Fp8Matrix, bias: Tensor | None) -> Tensor:
    """Compute x @ weight.T + bias in bfloat16, by cuBLASLt or CUTLASS: x [M, K] -> [M, N]."""
    assert x.scales is not None
    weight, dtype = matrix.codes.t(), torch.bfloat16
    if matrix.scales.shape[1] == 1:
        sizes = x.scales.t(), matrix.scales.t()
        out = torch._scaled_mm(x.codes, weight, *sizes, out_dtype=dtype)
    else:
        assert matrix.block_scales is not None
        out = F.scaled_mm(
            x.codes,
            weight,
            x.scales.t(),
            F.ScalingType.BlockWise1x128,
            matrix.block_scales.t(),
            F.ScalingType.BlockWise128x128,
            output_dtype=dtype,
        )
    out = out[: len(x)]
    return out if bias is None else out.add_(bias)


def block_of(matrix: Fp8Matrix) -> int:
    """Return how many columns are multiplied at a time: they share all scales."""
    return 128 if matrix.scales.shape[1] == 1 else min(128, matrix.group & -matrix.group)


@triton.jit
def _linear_kernel(
    out,
    x,
    weight,
    x_tiles,
    w_tiles,
    x_scales,
    w_scales,
    bias,
    parts,
    arrivals,
    x_stride,
    N,
    K,
    G,
    GROUP: tl.constexpr,
    W_GROUPED: tl.constexpr,
    X_GROUPED: tl.constexpr,
    UNIFORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    LEAD: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    # The descriptor of x has the number of rows. As an argument of its own, each number would be
    # another launch to `launch`.
    M = x_tiles.shape[0]
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile, split = tl.program_id(0), tl.program_id(1)
    m, n = place(tile, tiles_m, tl.cdiv(N, BLOCK_N), COLUMN)
    row, col = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    begin = split * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, K)
    if PDL and m == 0:
        prefetch(weight, n * BLOCK_N, N, K, begin, tl.minimum(begin + PREFETCH, end), BLOCK_N)
    wait_for_inputs(PDL, LATE=LEAD > 0)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    # Scales are loaded a step ahead, so that no step waits for them.
    group = tl.minimum(begin // GROUP, G - 1)
    x_scale = _x_scale_at(x_scales, row, M, group, X_GROUPED)
    w_scale = _w_scale_at(w_scales, n * BLOCK_N, N, G, group, W_GROUPED, UNIFORM, BLOCK_N)
    for k in range(begin, end, BLOCK_K):
        admit_next(end - k, LEAD, PDL)
        group = tl.minimum((k + BLOCK_K) // GROUP, G - 1)
        next_x_scale = _x_scale_at(x_scales, row, M, group, X_GROUPED)
        next_w_scale = _w_scale_at(w_scales, n * BLOCK_N, N, G, group, W_GROUPED, UNIFORM, BLOCK_N)
        inputs = _tile_at(x, x_tiles, m * BLOCK_M, k, M, K, x_stride, BLOCK_M, BLOCK_K, TMA)
        weights = _tile_at(weight, w_tiles, n * BLOCK_N, k, N, K, K, BLOCK_N, BLOCK_K, TMA)
        acc += _part(inputs, x_scale, weights, w_scale, W_GROUPED, X_GROUPED, UNIFORM, SWAP)
        x_scale, w_scale = next_x_scale, next_w_scale
    if SWAP:
        acc = acc.T
    is_last = True
    if SPLITS > 1:
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts += tile.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_N
        tl.store(parts + split * BLOCK_M * BLOCK_N + inside, acc)
        # The program that arrives last sees what the others wrote before they arrived.
        tl.debug_barrier()  # wait until all threads have stored
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrivals + tile, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(parts + other * BLOCK_M * BLOCK_N + inside)
    if is_last:
        if x_scales is not None and not X_GROUPED:
            acc *= tl.load(x_scales + row, mask=row < M, other=0.0)[:, None]
        if not W_GROUPED:
            acc *= tl.load(w_scales + col, mask=col < N, other=0.0)[None, :]
        if bias is not None:
            acc += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out + row.to(tl.int64)[:, None] * N + col[None, :],
            acc.to(out.dtype.element_ty),
            mask=(row < M)[:, None] & (col < N)[None, :],
        )


@triton.jit
def _x_scale_at(x_scales, row, M, group, X_GROUPED: tl.constexpr):
    """Load the scales of rows of the inputs, if they have one for each group."""
    scale = tl.full((), 1.0, tl.float32)
    if X_GROUPED:
        scale = tl.load(x_scales + group * M + row, mask=row < M, other=0.0)
    return scale


@triton.jit
def _w_scale_at(
    w_scales,
    first,
    N,
    G,
    group,
    W_GROUPED: tl.constexpr,
    UNIFORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Load the scales of rows of the weight, or the one that they share, for a group."""
    scale = tl.full((), 1.0, tl.float32)
    if W_GROUPED:
        if UNIFORM:
            scale = tl.load(w_scales + first * G + group)
        else:
            row = first + tl.arange(0, BLOCK_N)
            scale = tl.load(w_scales + row * G + group, mask=row < N, other=0.0)
    return scale


@triton.jit
def _tile_at(
    codes,
    tiles,
    first,
    k,
    ROWS,
    K,
    stride,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load BLOCK_K columns of BLOCK of the codes' ROWS rows."""
    if TMA:
        tile = tiles.load([first, k])
    else:
        row, col = first + tl.arange(0, BLOCK), k + tl.arange(0, BLOCK_K)
        inside = (row < ROWS)[:, None] & (col < K)[None, :]
        place = row.to(tl.int64)[:, None] * stride + col[None, :]
        tile = tl.load(codes + place, mask=inside, other=0.0)
    return tile


@triton.jit
def _part(
    inputs,
    x_scale,
    weights,
    w_scale,
    W_GROUPED: tl.constexpr,
    X_GROUPED: tl.constexpr,
    UNIFORM: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Multiply columns of the inputs and the weight: -> [BLOCK_M, BLOCK_N], or [N, M] if SWAP."""
    weights = decoded(weights, inputs.dtype)
    if SWAP:
        part = tl.dot(weights, inputs.T, input_precision="ieee")
    else:
        part = tl.dot(inputs, weights.T, input_precision="ieee")
    if W_GROUPED:
        if UNIFORM:
            # Both scales together cost one product a number.
            x_scale *= w_scale
        else:
            part *= w_scale[:, None] if SWAP else w_scale[None, :]
    if X_GROUPED:
        part *= x_scale[None, :] if SWAP else x_scale[:, None]
    elif W_GROUPED and UNIFORM:
        part *= x_scale
    return part


@triton.jit
def prefetch(weight, first_row, N, K, begin, end, ROWS: tl.constexpr):
    """Ask for rows of the weight, by lines of 128 bytes, without waiting for them.

    The memory delivers them to the L2 cache.
    """
    row = tl.minimum(first_row + tl.arange(0, ROWS), N - 1).to(tl.int64) * K
    for k in range(begin, end, 128):
        ask_for(weight + row + k)
