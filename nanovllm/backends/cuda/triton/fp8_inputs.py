"""Inputs of linear layers in FP8 (e4m3), quantised by kernels, some with what comes before them: a
norm or an activation.

Their twin is `Fp8Weight.quantised_inputs`, and they make the same codes.

GPUs without FP8 (before compute capability 8.9) have no type for the codes: there, bytes become
float16 numbers by shifts, which hold them without loss, and inputs are rounded by arithmetic.

Shapes: M rows, K inputs, G groups of inputs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    MAX_ROWS,
    admit_next,
    ask_for,
    cdiv,
    gpu,
    is_hopper,
    launch,
    next_power_of_2,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.elementwise import activated, normed
from nanovllm.backends.quantised import fp8
from nanovllm.layers import e4m3

LARGEST, SMALLEST = tl.constexpr(e4m3.LARGEST), tl.constexpr(fp8.SMALLEST)
# Values of `Fp8Matrix.sharing`, besides the number of columns that share a scale.
STATIC = tl.constexpr(0)  # all inputs share one scale, which is given
PLAIN = tl.constexpr(-1)  # inputs are not quantised
CUBLAS_BLOCK = 128  # rows and columns of the blocks that cuBLASLt knows
MOST = tl.constexpr(MAX_ROWS)  # rows of a decode step


class Fp8Matrix(NamedTuple):
    """A weight in FP8, and how the inputs that it is multiplied by are quantised."""

    codes: Tensor  # [N, K]
    scales: Tensor  # [N, G], float32
    group: int  # columns of a group
    block_rows: int  # rows that share scales, counted from the first; 1: each has its own
    activations: str | None  # as in the config's Fp8
    input_scale: Tensor | None = None  # a number, for activations "tensor"
    block_scales: Tensor | None = None  # [N / 128, G], of blocks of 128 rows; None: not made

    @property
    def sharing(self) -> int:
        """The number of inputs that share a scale, or STATIC or PLAIN."""
        if self.activations == "group":
            return self.group
        if self.activations == "token":
            return self.codes.shape[1]
        return PLAIN.value if self.activations is None else STATIC.value


@dataclass(frozen=True)
class Rows:
    """Inputs in FP8: number = code * scale. Some rows at the end may be padding."""

    codes: Tensor  # [M, K]: FP8, or float16 where the GPU has no FP8
    scales: Tensor | None  # [G, M] float32, G = 1 unless groups have their own; None: 1
    count: int  # of rows that are no padding

    def __len__(self) -> int:
        return self.count


def has_fp8(device: torch.device) -> bool:
    """Tell whether the GPU converts and multiplies FP8."""
    return gpu(device).capability >= (8, 9)


def typed(codes: Tensor) -> Tensor:
    """Return the codes of a weight as the GPU's kernels take them."""
    return codes if has_fp8(codes.device) else codes.view(torch.uint8)


@triton.jit
def decoded(codes, dtype: tl.constexpr):
    """Return the numbers of codes, which are FP8 or, for GPUs without it, bytes."""
    if codes.dtype == tl.uint8:
        # Sign, exponent and mantissa lie side by side in float16 too, where the bias is 15, not 7.
        wide = codes.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = (bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        numbers = codes.to(dtype)
    return numbers


@triton.jit
def encoded(x, FP8: tl.constexpr):
    """Round float32 to the nearest numbers of e4m3, as FP8 or, for GPUs without it, as float32."""
    if FP8:
        result = x.to(tl.float8e4nv)  # saturates, and keeps NaN
    else:
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of the fraction
        # Numbers below 2^-6 become multiples of 2^-9, as float32 has them next to 24576.
        small = (x + 24576.0) - 24576.0
        result = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return result


@triton.jit
def quotient(x, y):
    """Divide as PyTorch does, so that no rounding to FP8 differs from the plain layer's."""
    x, y = tl.broadcast(x, y)
    return tl.div_rn(x, y)


@triton.jit
def shrunk(x, scale, FP8: tl.constexpr):
    """Divide numbers by the scale that they share: they are rounded as by `quotient`.

    On GPUs, a product with the scale's reciprocal and two instructions that add what it rounded
    off are faster than a division. Quantising 256 rows of 4,096 took 1.82 us instead of 2.36 on an
    H200 (PyTorch 2.11, Triton 3.6).
    """
    if FP8:
        reciprocal = quotient(tl.full(scale.shape, 1.0, tl.float32), scale)
        guess = x * reciprocal
        result = tl.fma(tl.fma(-guess, scale, x), reciprocal, guess)
    else:
        result = quotient(x, scale)  # the interpreter's fma rounds twice
    return result


@triton.jit
def scale_for(largest):
    """Return the scale with which e4m3 just holds the largest number."""
    return quotient(tl.maximum(largest, SMALLEST), tl.full(largest.shape, LARGEST, tl.float32))


def as_rows(x: Tensor | Rows, matrix: Fp8Matrix, largest: Tensor | None = None) -> Rows:
    """Return the inputs [M, K] of a product as Rows, quantised if the matrix wants them so."""
    if isinstance(x, Rows):
        return x
    return Rows(x, None, x.shape[0]) if matrix.activations is None else quantise(x, matrix, largest)


def quantise(x: Tensor, matrix: Fp8Matrix, largest: Tensor | None = None) -> Rows:
    """Quantise inputs [M, K] as a matrix wants them.

    largest: [M], the largest |x| of each token, where other ranks have some of its inputs.
    """
    return _quantise(x, matrix, x.shape[1], largest=largest)


def activate_and_quantise(x: Tensor, matrix: Fp8Matrix, gelu: bool = False) -> Rows:
    """Quantise silu(gates) * ups, or gelu(gates) * ups: x [M, 2 K], gates first -> [M, K]."""
    return _quantise(x, matrix, x.shape[1] // 2, gated=True, gelu=gelu)


def _quantise(
    x: Tensor,
    matrix: Fp8Matrix,
    inputs: int,
    *,
    largest: Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
) -> Rows:
    rows, sharing = x.shape[0], matrix.sharing
    result = empty_rows(rows, inputs, matrix)
    whole = next_power_of_2(inputs)
    # Measured on an H200: gates, ups, activation, down and norm of 8B take 2.9 us less for 16 rows
    # with few large programs. For 64, 160 and 256 rows they take 3.0, 3.8 and 1.1 us less if the
    # next product starts late; for 32, 96 and 128 rows they would take 0.5 to 1 us more.
    block = 4096 if gated and rows <= 16 else 1024
    # A program has whole groups, however wide they are.
    block = whole if sharing == inputs else min(whole, max(block, sharing))
    late = gated and (32 < rows <= 64 or rows > 128)
    if rows:
        launch(
            _quantise_kernel,
            (rows * cdiv(inputs, block),),
            *(x, result.codes, result.scales, matrix.input_scale, largest),
            *(x.stride(0), inputs, sharing, block, needs_whole_tiles(matrix), gated, gelu, late),
            num_warps=max(1, min(8, block // 512)),
            **overlap(x),
        )
    return result


def needs_whole_tiles(matrix: Fp8Matrix) -> bool:
    """Tell whether cuBLASLt may multiply inputs of a decode step: see `padded_rows`."""
    has_blocks = matrix.block_scales is not None and matrix.sharing == CUBLAS_BLOCK
    return has_blocks and is_hopper(matrix.codes.device)


def empty_rows(rows: int, inputs: int, matrix: Fp8Matrix) -> Rows:
    """Make room for inputs [rows, inputs] of a matrix in FP8, and for rows of padding."""
    sharing, device = matrix.sharing, matrix.codes.device
    dtype = torch.float8_e4m3fn if has_fp8(device) else torch.float16
    groups = cdiv(inputs, sharing) if sharing > 0 else 1
    padded = padded_rows.fn(rows, needs_whole_tiles(matrix))
    codes = torch.empty(padded, inputs, dtype=dtype, device=device)
    return Rows(codes, torch.empty(groups, padded, dtype=torch.float32, device=device), rows)


@triton.jit
def padded_rows(rows, WHOLE: tl.constexpr):
    """Return how many rows there is room for. Rows of padding may hold anything.

    cuBLASLt wants scales of a multiple of 4 rows. For 17 to 128 rows, fp8_linear.py has tiles of 32
    or 64 rows, and a tile that has fewer than that is slow: on an H200 (PyTorch 2.11, Triton 3.6),
    8B's gates and ups took 43.6 us for 96 rows, and 36.6 for 128. So are the tiles of cuBLASLt,
    which have 128 rows: with the quantising before them, 8B's gates and ups took 59.8 us for 160
    rows, 52.8 for 192 and 49.5 for 256; with rows of padding up to 256, 46.8 for 160 and 47.9 for
    192. Since then fp8_splitk.py multiplies by some weights, which needs whole tiles of 64 rows.

    WHOLE: whether a decode step of more than 128 rows fills tiles of cuBLASLt.
    """
    unit = 64 if rows > 32 else (32 if rows > 16 else (4 if rows >= 4 else 1))
    unit = (256 if WHOLE and rows <= MOST else 4) if rows > 128 else unit
    return (rows + unit - 1) // unit * unit


@triton.jit
def _quantise_kernel(
    x,
    codes,
    scales,
    input_scale,
    largest,
    x_stride,
    K: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    parts: tl.constexpr = tl.cdiv(K, BLOCK)
    rows = padded_rows(tl.num_programs(0) // parts, WHOLE)
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    cols = part * BLOCK + tl.arange(0, BLOCK)
    inside = cols < K
    wait_for_inputs(PDL, LATE)
    value = tl.load(x + row * x_stride + cols, mask=inside, other=0.0)
    if GATED:
        dtype = value.dtype
        up = tl.load(x + row * x_stride + K + cols, mask=inside, other=0.0).to(tl.float32)
        active = activated(value.to(tl.float32), GELU).to(dtype)
        value = (active.to(tl.float32) * up).to(dtype)
    admit_next(0, LATE, PDL)
    _store_quantised(
        value.to(tl.float32),
        codes,
        scales,
        input_scale,
        largest,
        row,
        rows,
        part,
        K,
        SHARING,
        BLOCK,
    )


@triton.jit
def _store_quantised(
    value,
    codes,
    scales,
    input_scale,
    largest,
    row,
    rows,
    part,
    K: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise BLOCK columns of a row, and store their codes and scales."""
    FP8: tl.constexpr = codes.dtype.element_ty == tl.float8e4nv
    if SHARING == STATIC:
        scale = tl.load(input_scale)
        quotients = quotient(value, scale)
        if part == 0:
            tl.store(scales + row, scale)
    elif SHARING == K:
        most = tl.max(tl.abs(value), axis=0)
        if largest is not None:
            most = tl.load(largest + row)
        scale = scale_for(most)
        quotients = shrunk(value, scale, FP8)
        tl.store(scales + row, scale)
    else:
        groups: tl.constexpr = BLOCK // SHARING
        value = value.reshape(groups, SHARING)
        scale = scale_for(tl.max(tl.abs(value), axis=1))
        quotients = shrunk(value, scale[:, None], FP8).reshape(BLOCK)
        group = part * groups + tl.arange(0, groups)
        tl.store(scales + group * rows + row, scale, mask=group < tl.cdiv(K, SHARING))
    cols = part * BLOCK + tl.arange(0, BLOCK)
    numbers = encoded(quotients, FP8)
    tl.store(codes + row * K + cols, numbers.to(codes.dtype.element_ty), mask=cols < K)


def norm_and_quantise(
    x: Tensor,
    residual: Tensor | None,
    matrix: Fp8Matrix,
    *,
    weight: Tensor,
    eps: float,
    zero_centered: bool = False,
) -> Rows:
    """Quantise norm(residual + x), or norm(x): [M, K]. The sum overwrites `residual`.

    weight: that of the norm.
    """
    rows, inputs = x.shape
    result = empty_rows(rows, inputs, matrix)
    block = next_power_of_2(inputs)
    # The weights of the products since have driven `residual` from the cache. Measured on an H200
    # for 8B: with 4, 8 and 16 rows, a layer takes 1 to 1.5 us less if the kernel asks for it while
    # it waits, and with 32 and 64 rows 0.8 to 1 us more.
    asks = residual is not None and rows <= 16
    if rows:
        launch(
            _norm_and_quantise_kernel,
            (rows,),
            *(x, residual, weight, result.codes, result.scales, matrix.input_scale, eps),
            *(inputs, matrix.sharing, block, needs_whole_tiles(matrix)),
            *(residual is not None, zero_centered, asks),
            num_warps=max(1, min(8, block // 512)),
            **overlap(x),
        )
    return result


@triton.jit
def _norm_and_quantise_kernel(
    x,
    residual,
    weight,
    codes,
    scales,
    input_scale,
    eps,
    K: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ASKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), padded_rows(tl.num_programs(0), WHOLE)
    cols = tl.arange(0, BLOCK)
    inside = cols < K
    factor = tl.load(weight + cols, mask=inside, other=0.0)
    if PDL and ASKS:
        # By lines of 128 bytes. Whatever is written later, the L2 cache has the latest.
        line = tl.minimum(tl.arange(0, (BLOCK + 63) // 64) * 64, K - 1)
        ask_for(residual + row * K + line)
    wait_for_inputs(PDL)
    value = tl.load(x + row * K + cols, mask=inside, other=0.0)
    if ADD:
        stream = tl.load(residual + row * K + cols, mask=inside, other=0.0)
        value = (value.to(tl.float32) + stream.to(tl.float32)).to(value.dtype)
        tl.store(residual + row * K + cols, value, mask=inside)
    value = normed(value, factor, eps, K, ZERO_CENTERED).to(tl.float32)
    _store_quantised(value, codes, scales, input_scale, None, row, rows, 0, K, SHARING, BLOCK)
