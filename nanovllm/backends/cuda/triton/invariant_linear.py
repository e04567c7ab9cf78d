"""Products whose result for a row does not depend, to the bit, on the number of rows.

On Hopper's tensor cores, a sum over K is a chain: each instruction adds the products of 16 inputs
to the sum so far. The kernels of this file, and that of decode_gemm.py if no programs share a tile,
let every output go through this chain from the first input to the last. Measured on an H200, 24
shapes of tiles gave the same bits, by both kinds of instructions (mma.sync and wgmma), with rows
and weights in either order. So the tile may depend on the number of rows. What would change bits is
left out: sharing K among programs, and sums on other cores than tensor cores.

A product of one row takes as long as its chain if the weight is small: few programs compute few
outputs. So small weights with few outputs have several chains, one for each part of K. Their sums
are added in order, for any number of rows.

Most kernels of cuBLAS compute the same single chain, but some share K. `approve_cublas` compares
them.

`linear` and `gated_linear` take the arguments of those in products.py.

Shapes: M rows, K inputs, N outputs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.cublas import zero_bias
from nanovllm.backends.cuda.triton import decode_gemm
from nanovllm.backends.cuda.triton.decode_gemm import (
    BLOCK_WEIGHTS,
    SHARED_MEMORY,
    TURNED_PREFETCH,
    TURNED_ROWS,
    Tiling,
    gated_product,
)
from nanovllm.backends.cuda.triton.dispatch import (
    MAX_ROWS,
    TensorDescriptor,
    cdiv,
    launch,
    next_power_of_2,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.elementwise import activate_and_mul
from nanovllm.backends.cuda.triton.prefill_gemm import COLUMN, place

try:
    from nanovllm.backends.cuda.triton import whole_gated
except ImportError:  # this release of Triton lacks Gluon for Hopper
    whole_gated = None  # type: ignore[assignment]

FEW_ROWS = 64  # up to so many, decode_gemm.py is as fast as cuBLAS
FEW_ROWS_STAGES = 6  # steps of 128 inputs that a program of few rows fetches in advance
SHARED_STAGES = 4  # the same, so that a multiprocessor runs two programs at a time
LONG_INPUTS = 8192  # with more, more programs are faster, though each has fewer outputs
# A program of few rows lets the next kernel start when it has so many inputs left: dispatch.py says
# why that may be faster. On an H200, a layer of Qwen3-8B with one row took 122.2 us if the next
# kernel might start at once, 113.0 us with this lead, and 120.0 us with 2,048 inputs; one of
# 30B-A3B took 59.7, 54.4 and 55.0 us (torch 2.11, Triton 3.6, before gates had the tiles of
# `_turned_tiling`).
LEAD = 512
CHAINS = 8  # of a weight that has several
WHOLE_ROWS = 16  # rows of x that a program takes at once, with all of their inputs
WHOLE_INPUTS = 1024  # that a program takes at once


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute x @ weight.T + bias: x [M, K], weight [N, K], bias [N] -> [M, N].

    No running kernel may write to the weights. `out` is not used.
    """
    if (approved := _approved_for(x, weight)) is not None:
        if approved.with_bias and (bias is not None or not approved.without):
            return F.linear(x, weight, _zeros(weight) if bias is None else bias)
        if approved.without and bias is None:
            return F.linear(x, weight)
    return _multiply(x, weight, bias)


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """Compute silu(gates) * ups, or gelu(gates) * ups by tanh: x [M, K] -> [M, N].

    weight [2 N, K] and bias [2 N] yield gates first, then ups: x @ weight.T + bias. No running
    kernel may write to the weights.
    """
    if bias is None and whole_gated is not None and whole_gated.takes(x, weight):
        return whole_gated.gated_linear(x, weight, gelu)
    if bias is None and _approved_for(x, weight) is not None:
        return activate_and_mul(linear(x, weight), gelu)
    return _multiply(x, weight, bias, gated=True, gelu=gelu)


def warmup_gated_linear(weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> None:
    """Launch the kernels that `gated_linear` uses only for more rows than a decode step has."""
    for rows in (MAX_ROWS + 1, 8192):
        gated_linear(weight.new_zeros(rows, weight.shape[1]), weight, bias, gelu)


def num_chains(outputs: int, inputs: int) -> int:
    """Return how many chains make a sum: a weight's shape alone decides it."""
    is_small = outputs <= inputs and outputs * inputs <= 1 << 22
    return CHAINS if is_small and 2048 <= inputs <= 4096 and inputs % 1024 == 0 else 1


class Approved(NamedTuple):
    """Products of some shape in which cuBLAS sums in the order of the chain."""

    without: bool  # without a bias
    with_bias: bool


_approved: dict[tuple, Approved] = {}


def approve_cublas(weight: Tensor, rows: int) -> None:
    """Use cuBLAS for products of so many rows with such weights if it computes the same chain.

    Random inputs tell: if cuBLAS summed in another order, some of the thousands of results would
    differ. Which of its kernels cuBLAS takes depends on sizes and alignment alone.
    """
    if rows <= FEW_ROWS or num_chains(*weight.shape) > 1:
        return
    generator = torch.Generator(weight.device).manual_seed(0)
    options: dict = dict(dtype=weight.dtype, device=weight.device, generator=generator)
    x = torch.randn(rows, weight.shape[1], **options)
    like, bias = torch.randn(weight.shape, **options), torch.randn(len(weight), **options)
    # The second half of each sum takes away what the first half added, so that nothing is left but
    # the errors of the order of summation. Other sums than these hardly show it: an error in the
    # last bit of a float32 seldom changes the bfloat16 that it is rounded to.
    half = weight.shape[1] // 2
    mirrored = x.clone(), like.clone(), bias * 2**-20
    mirrored[0][:, -half:] = -mirrored[0][:, :half].flip(1)
    mirrored[1][:, -half:] = mirrored[1][:, :half].flip(1)
    same = [
        all(
            torch.equal(
                F.linear(rows_, like_, b if has_bias else None),
                _multiply(rows_, like_, b if has_bias else None),
            )
            for rows_, like_, b in ((x, like, bias), mirrored)
        )
        for has_bias in (False, True)
    ]
    if any(same):
        _approved[_key(x, weight)] = Approved(*same)


def _approved_for(x: Tensor, weight: Tensor) -> Approved | None:
    """Return how cuBLAS may compute the product; None: it may not."""
    approved = _approved.get(_key(x, weight))
    if approved is None or not (x.is_contiguous() and weight.is_contiguous()):
        return None
    return None if (x.data_ptr() | weight.data_ptr()) % 256 else approved


def _key(x: Tensor, weight: Tensor) -> tuple:
    return x.shape[0], *weight.shape, x.dtype, x.device


def _zeros(weight: Tensor) -> Tensor:
    """Return a bias that adds nothing: with a bias, cuBLAS may take another kernel."""
    return zero_bias(weight.shape[0], weight.dtype, weight.device)


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool = False, gelu: bool = False
) -> Tensor:
    x = x.contiguous()
    (rows, inputs), outputs = x.shape, len(weight) // (2 if gated else 1)
    if rows == 0:
        return x.new_empty(0, outputs)
    chains = 1 if gated else num_chains(outputs, inputs)
    if rows > MAX_ROWS:
        return _multiply_many_rows(x, weight, bias, outputs, chains, gated=gated, gelu=gelu)
    processors = num_processors(x.device)
    if chains > 1 and fits_at_once(rows, outputs, inputs, chains, processors):
        return _multiply_chains_at_once(x, weight, bias, chains)
    tiling = few_rows_tiling(rows, outputs, inputs, gated, processors, chains)
    # Programs that share a tile have a chain each, and the last of them adds up the sums in order.
    chain = 0 if chains == tiling.splits else inputs // chains
    return decode_gemm.multiply(x, weight, bias, tiling, gated=gated, gelu=gelu, chain=chain)


def fits_at_once(rows: int, outputs: int, inputs: int, chains: int, processors: int) -> bool:
    """Tell whether all programs run at the same time, and each fetches all its weights at once."""
    if rows * chains > WHOLE_ROWS or inputs // chains > WHOLE_INPUTS:
        return False
    programs = cdiv(outputs * chains, BLOCK_WEIGHTS)
    size = (BLOCK_WEIGHTS + WHOLE_ROWS) * next_power_of_2(inputs // chains) * 2
    return programs <= processors * max(1, SHARED_MEMORY // size)


def few_rows_tiling(
    rows: int, outputs: int, inputs: int, gated: bool, processors: int, chains: int = 1
) -> Tiling:
    """Choose a tile, as measured on an H200. The choice changes no bit of the result."""
    if not gated and chains == 1 and fits_at_once(rows, outputs, inputs, chains, processors):
        columns = next_power_of_2(inputs)
        return Tiling(WHOLE_ROWS, BLOCK_WEIGHTS, columns, splits=1, stages=1, turned=True)
    if rows <= TURNED_ROWS:
        return _turned_tiling(rows, outputs, inputs, gated, processors, chains)
    block_m, block_k, rows_of_tiles = 64, 128, cdiv(rows, 64)
    fitting = [n for n in (16, 32, 64) if rows_of_tiles * cdiv(outputs, n) <= processors]
    block_n = fitting[0] if fitting else 64
    if not fitting and rows > 64 and not gated:
        block_n, block_k = 128, 64
    stage = (block_m + (2 if gated else 1) * block_n) * block_k * 2
    stages = min(FEW_ROWS_STAGES * 128 // block_k, SHARED_MEMORY // stage)
    return Tiling(block_m, block_n, block_k, splits=1, stages=stages)


def _turned_tiling(
    rows: int, outputs: int, inputs: int, gated: bool, processors: int, chains: int
) -> Tiling:
    """Choose a turned tile.

    Measured on an H200 (torch 2.11, Triton 3.6) by whole layers of Qwen3-8B and 30B-A3B.
    """
    block_m = 16 if rows <= 16 else 32
    if chains > 1:
        steps = inputs // chains // 128
        return Tiling(block_m, BLOCK_WEIGHTS, 128, splits=chains, stages=steps, turned=True)
    # 32 gates and as many ups are 64 rows of weights.
    block_n, block_k = BLOCK_WEIGHTS // 2 if gated else BLOCK_WEIGHTS, 128
    programs, stages = cdiv(outputs, block_n), FEW_ROWS_STAGES
    if programs > processors:
        stages = SHARED_STAGES
    elif not gated and 2 * programs <= processors and inputs > LONG_INPUTS:
        # Twice as many programs: 4,096 outputs of 12,288 inputs took 2 to 4 us less, and as many
        # outputs of 4,096 inputs up to 1 us more.
        block_n, block_k = BLOCK_WEIGHTS // 2, 256
    return Tiling(
        *(block_m, block_n, block_k),
        splits=1,
        stages=stages,
        turned=True,
        prefetch=TURNED_PREFETCH,
        lead=LEAD,
    )


def _multiply_chains_at_once(x: Tensor, weight: Tensor, bias: Tensor | None, chains: int) -> Tensor:
    """Compute few rows by programs that fetch all their weights before the inputs are there."""
    (rows, inputs), outputs = x.shape, len(weight)
    length, block_n = inputs // chains, BLOCK_WEIGHTS // chains
    block_k = next_power_of_2(length)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    # A weight's row consists of `chains` rows of a matrix with shorter rows, and so does a row of
    # x. Of the products of all these rows, those of equal parts of K are wanted.
    x_tiles = TensorDescriptor.from_tensor(x.view(-1, length), [WHOLE_ROWS, block_k])
    w_tiles = TensorDescriptor.from_tensor(weight.view(-1, length), [BLOCK_WEIGHTS, block_k])
    launch(
        _chains_kernel,
        (cdiv(outputs, block_n),),
        *(out, x_tiles, w_tiles, bias, outputs, chains, block_n),
        num_warps=4,
        num_stages=1,
        **overlap(x),
    )
    return out


def _multiply_many_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    outputs: int,
    chains: int,
    *,
    gated: bool,
    gelu: bool,
) -> Tensor:
    rows, inputs = x.shape
    processors, chain = num_processors(x.device), inputs // chains if chains > 1 else 0
    block_m, block_k = 128, 64
    block_n = many_rows_width(rows, outputs, gated, processors, chains)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    matrices = weight.view(2 if gated else 1, outputs, inputs)
    parts = 2 if block_n == 256 else 1  # a tile of 256 outputs is stored in two parts
    out_tiles = None
    if outputs % 8 == 0:  # the accelerator needs rows of a multiple of 16 bytes
        out_tiles = TensorDescriptor.from_tensor(out, [block_m, block_n // parts])
    launch(
        _many_rows_kernel,
        (min(cdiv(rows, block_m) * cdiv(outputs, block_n), processors),),
        out,
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(matrices, [len(matrices), block_n, block_k]),
        *(out_tiles, bias, outputs, inputs),
        *(chain, block_m, block_n, block_k, COLUMN, parts, gated, gelu),
        num_warps=8,
        num_stages=3 if gated else 4,
    )
    return out


def many_rows_width(rows: int, outputs: int, gated: bool, processors: int, chains: int) -> int:
    """Choose the outputs of a tile, as measured on an H200."""
    if chains > 1:  # a program holds the sum of one chain and that of those before it
        return 128
    # The time of tiles of 256 columns and of 128: waves of programs, times that of a tile.
    rows_of_tiles = cdiv(rows, 128)
    columns = outputs * (2 if gated else 1)
    wide = cdiv(rows_of_tiles * cdiv(columns, 256), processors) * 2
    narrow = cdiv(rows_of_tiles * cdiv(columns, 128), processors) * 1.12
    width = 256 if wide <= narrow else 128
    return width // 2 if gated else width


@triton.jit
def _chains_kernel(
    out,
    x_tiles,
    w_tiles,
    bias,
    N,
    CHAINS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_N outputs of a few rows by one instruction for each 16 inputs of a chain.

    The rows of the tile of weights are pairs of output and part of K; those of x are pairs of row
    and part of K.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # before the wait for the weights
    first = tl.program_id(0) * BLOCK_N
    weights = w_tiles.load([first * CHAINS, 0])
    wait_for_inputs(PDL)
    inputs = x_tiles.load([0, 0])
    acc = tl.dot(weights, inputs.T)
    ROWS: tl.constexpr = inputs.shape[0]
    rows = x_tiles.shape[0] // CHAINS
    row, col = tl.arange(0, ROWS), first + tl.arange(0, BLOCK_N)
    dtype = out.dtype.element_ty
    part_of_weight = (tl.arange(0, BLOCK_N * CHAINS) % CHAINS)[:, None]
    part = tl.arange(0, CHAINS)
    for i in tl.static_range(ROWS // CHAINS):
        # All but one of the summands are 0, so the order of these sums does not matter.
        if i < rows:
            wanted = row[None, :] == i * CHAINS + part_of_weight
            sums = tl.sum(tl.where(wanted, acc, 0.0), axis=1).reshape(BLOCK_N, CHAINS)
            total = tl.zeros([BLOCK_N], tl.float32)
            for number in tl.static_range(CHAINS):
                total += tl.sum(tl.where(part[None, :] == number, sums, 0.0), axis=1)
            if bias is not None:
                total += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)
            tl.store(out + i * N + col, total.to(dtype), mask=col < N)


@triton.jit
def _many_rows_kernel(
    out,
    x_tiles,
    w_tiles,
    out_tiles,
    bias,
    N,
    K,
    CHAIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMN: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
):
    """Compute one tile after the other, and fetch the inputs of the next meanwhile."""
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    M = x_tiles.shape[0]
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        m, n = place(tile, tiles_m, tiles_n, COLUMN)
        acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        total = acc
        for k in range(0, K, BLOCK_K):
            weights = w_tiles.load([0, n * BLOCK_N, k]).reshape(WIDTH, BLOCK_K)
            acc = tl.dot(x_tiles.load([m * BLOCK_M, k]), weights.T, acc)
            if CHAIN > 0:
                if (k + BLOCK_K) % CHAIN == 0:
                    total += acc
                    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        if CHAIN > 0:
            acc = total
        row, col = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        dtype = out.dtype.element_ty
        if GATED:
            gates, ups = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
            result = gated_product(gates, ups, bias, col, N, dtype, GELU)
        else:
            result = acc
            if bias is not None:
                result += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        result = result.to(dtype)
        if out_tiles is None:
            inside = (row < M)[:, None] & (col < N)[None, :]
            tl.store(out + row.to(tl.int64)[:, None] * N + col[None, :], result, mask=inside)
        elif PARTS == 1:
            out_tiles.store([m * BLOCK_M, n * BLOCK_N], result)
        else:
            left, right = result.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            out_tiles.store([m * BLOCK_M, n * BLOCK_N], left)
            out_tiles.store([m * BLOCK_M, n * BLOCK_N + BLOCK_N // 2], right)
