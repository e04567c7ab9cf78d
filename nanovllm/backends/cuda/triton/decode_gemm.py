"""Linear layers of a decode step's rows on tensor cores, which fetch weights before the inputs.

The time of such a product should be that of reading its weights. For small weights, cuBLAS takes
two to four times as long, because each kernel starts, waits for its first bytes, and drains. The
kernel of this file is launched while the kernel before still runs. It asks for its weights at once,
and finds them in the L2 cache when the inputs are ready. Where cuBLAS is as fast, it is used.

Each program computes one tile of the output. If there are fewer tiles than multiprocessors, several
programs share a tile, each with a part of K. The last program to end adds up the parts in order, so
the result is deterministic. Written for Hopper, whose tensor memory accelerator fetches the tiles.

An instruction of Hopper's tensor cores takes 64 rows of one operand, and 8 or more of the other.
For few rows of x, tiles are turned: rows of weights are those of the first operand. A turned tile
whose program has all its inputs in one step is fetched before the inputs are there.

invariant_linear.py uses the kernel, too. If no programs share a tile, a sum is one chain.

Shapes: M rows, K inputs, N outputs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    MAX_ROWS,
    TensorDescriptor,
    admit_next,
    arrivals,
    ask_for,
    can_overlap,
    cdiv,
    has_large_shared_memory,
    is_hopper,
    launch,
    next_power_of_2,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.elementwise import activated

SHARED_MEMORY = 200_000  # bytes that a program may fill with tiles that it fetches in advance
ALL_SHARED_MEMORY = 228 << 10  # bytes of a multiprocessor of Hopper
BLOCK_WEIGHTS = 64  # rows of weights of a turned tile: tensor cores take no fewer
# Each program prefetches the weights of so many inputs. The cache would not hold more.
PREFETCH = 1024
# How `turned_tiling` cuts a product. Measured on an H200 (torch 2.11, Triton 3.6) by whole decode
# steps: with Qwen3-0.6B's shape, 8 and 16 rows took 1,146 and 1,274 us by cuBLAS, and 962 and 1,030
# us by turned tiles; with Qwen3-8B's, 4,916 and 5,040 us, and 4,737 and 4,867 us. Products alone
# chose the other numbers. With 64 rows, turned tiles took 1.2 to 1.4 times as long as others.
TURNED_ROWS = 32  # up to so many rows of x, tiles are turned
PROGRAMS = 2  # that a multiprocessor runs at a time
TURNED_PREFETCH = 256  # inputs: fewer than PREFETCH, since more programs run at a time
SPANS = 1024, 512  # inputs of a program that fetches all its weights at once
MAX_SPLITS = 12  # programs that share a tile
GATES = 64, 32  # of a tile; a tile has as many ups
GATED_STEP = 64  # inputs of a step of a gated product


class Tiling(NamedTuple):
    """The tiling of a product: how it is cut into programs."""

    block_m: int  # rows of a tile
    block_n: int  # outputs of a tile; a tile of a gated product has as many gates and ups
    block_k: int  # inputs of a step
    splits: int  # programs that share a tile
    stages: int  # steps whose tiles are in shared memory or on their way
    warps: int = 4
    turned: bool = False  # whether rows of weights are the first operand's
    prefetch: int = PREFETCH  # inputs whose weights each program prefetches
    lead: int = 0  # inputs left when a program lets the next kernel start; 0: it starts at once


def tiling(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tiling | None:
    """Choose how to cut the product into programs; None: cuBLAS is as fast."""
    if not is_able(x, weight):
        return None
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if gated:
        outputs //= 2
    if rows > TURNED_ROWS:
        if inputs % 128:  # a step would reach beyond the last input, which was not tried
            return None
        return upright_tiling(rows, outputs, inputs, gated, num_processors(x.device))
    if is_hopper(x.device):
        return turned_tiling(rows, outputs, inputs, gated, num_processors(x.device))
    return None


def is_able(x: Tensor, weight: Tensor) -> bool:
    """Tell whether the kernel can compute the product as the tilings of this file have it."""
    return (
        TensorDescriptor is not None
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % 64 == 0
        and 0 < x.shape[0] <= MAX_ROWS
        and x.is_contiguous()
        and weight.is_contiguous()
        and can_overlap(x.device)
        and has_large_shared_memory(x.device)
    )


def turned_tiling(
    rows: int, outputs: int, inputs: int, gated: bool, processors: int
) -> Tiling | None:
    """Choose a turned tile, and how many programs share it."""
    block_m, block_n = max(16, next_power_of_2(rows)), BLOCK_WEIGHTS
    block_k = GATED_STEP if gated else 128
    most, least = PROGRAMS * processors, 2 * processors / 3  # with fewer programs, many idle
    if gated:
        enough = [gates for gates in GATES if cdiv(outputs, gates) >= least]
        block_n = enough[0] if enough else GATES[-1]
    tiles = cdiv(outputs, block_n)
    if tiles > most:  # larger products are left to cuBLAS
        return None
    column = (block_m + (2 if gated else 1) * block_n) * 2  # bytes
    splits = 1
    if not gated:
        for span in SPANS:
            splits = cdiv(inputs, span)
            is_enough = splits == 1 or tiles * splits >= least or span == SPANS[-1]
            beside = cdiv(tiles * splits, processors)  # programs of a multiprocessor
            if (
                is_enough
                and beside <= PROGRAMS
                and splits <= MAX_SPLITS
                and span * column <= room_of(beside)
            ):
                return Tiling(block_m, block_n, span, splits, stages=1, turned=True)
        steps = cdiv(inputs, block_k)
        splits = max(1, min(most // tiles, steps // 2, MAX_SPLITS))
        splits = cdiv(steps, cdiv(steps, splits))  # none is left without a step
    stages = room_of(PROGRAMS) // (block_k * column)
    return Tiling(block_m, block_n, block_k, splits, stages, turned=True, prefetch=TURNED_PREFETCH)


def room_of(programs: int) -> int:
    """Return the bytes of tiles that each of the programs of a multiprocessor may have."""
    return ALL_SHARED_MEMORY // programs - 2048


def upright_tiling(
    rows: int, outputs: int, inputs: int, gated: bool, processors: int
) -> Tiling | None:
    """Choose a tile of 64 rows. The limits were measured on an H200."""
    tensors = 2 if gated else 1
    if rows > (128 if gated else MAX_ROWS) or tensors * outputs * inputs > 1 << 23:
        return None
    block_m, block_k = 64, 128
    # Tiles of which most rows are padding are slow: the accelerator takes longer to fetch padding
    # than rows.
    if 0 < rows % block_m < 48 and tensors * outputs > 1024:
        return None
    for block_n in (32, 64) if gated else (32, 64, 128):
        tiles = cdiv(rows, block_m) * (outputs // block_n)
        if outputs % block_n == 0 and tiles <= processors:
            splits = 1
            while (
                not gated
                and splits < 4
                and 2 * splits * tiles <= processors
                and inputs % (2 * splits * block_k) == 0
            ):
                splits *= 2
            stage = (block_m + tensors * block_n) * block_k * 2
            return Tiling(block_m, block_n, block_k, splits, min(6, SHARED_MEMORY // stage))
    return None


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiling: Tiling,
    *,
    gated: bool = False,
    gelu: bool = False,
    chain: int = 0,
) -> Tensor:
    """Compute x @ weight.T + bias, x [M, K] -> [M, N]; with `gated`, activate the product.

    weight: [N, K]; with `gated` [2 N, K], gates and then ups. Then the result is
        silu(gates) * ups or, with `gelu`, gelu(gates) * ups. No running kernel may write to it.
    chain: inputs whose products are a sum of their own; 0: all.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    block_m, block_n, block_k, splits, stages, warps, turned, ahead, lead = tiling
    w_tiles = TensorDescriptor.from_tensor(weight, [block_n, block_k])
    if gated:
        assert splits == 1
        outputs //= 2
        if turned and block_n < BLOCK_WEIGHTS:
            # One operand has gates and ups. Tensor cores read tiles of two dimensions from shared
            # memory; one of three passes through registers first.
            pairs = weight.view(2, outputs, inputs)
            w_tiles = TensorDescriptor.from_tensor(pairs, [2, block_n, block_k])
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    grid = cdiv(rows, block_m), cdiv(outputs, block_n), splits
    parts = counters = None
    if splits > 1:
        parts = torch.empty(*grid, block_m * block_n, dtype=torch.float32, device=x.device)
        counters = arrivals(x.device)
        assert grid[0] * grid[1] <= len(counters)
    launch(
        _product_kernel,
        grid,
        *(out, TensorDescriptor.from_tensor(x, [block_m, block_k]), w_tiles),
        *(weight, bias, parts, counters, outputs, inputs, chain),
        *(block_m, block_n, block_k, splits, turned, gated, gelu, ahead, lead),
        turned and not gated and splits * block_k >= inputs,  # a program's inputs are one step
        num_warps=warps,
        num_stages=stages,
        **overlap(x),
    )
    return out


# M is read from the descriptor of x: as an argument of its own, each number of rows would be
# another launch to `launch`.
@triton.jit
def _product_kernel(
    out,
    x_tiles,
    w_tiles,
    weight,
    bias,
    parts,
    arrivals,
    N,
    K,
    CHAIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    TURNED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    PREFETCH: tl.constexpr,
    LEAD: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    m, n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    begin = split * span
    end = tl.minimum(begin + span, K)
    # Gates and ups of a narrow tile share an operand, whose rows would not suffice for two.
    PAIRED: tl.constexpr = GATED and TURNED and BLOCK_N < 64
    WIDTH: tl.constexpr = 2 * BLOCK_N if PAIRED else BLOCK_N
    if TURNED:
        acc = tl.zeros([WIDTH, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    other, total = acc, acc
    if WHOLE:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()  # before the wait for the weights
        weights = w_tiles.load([n * BLOCK_N, begin])
        wait_for_inputs(PDL)
        acc = tl.dot(weights, x_tiles.load([m * BLOCK_M, begin]).T)
    else:
        if PDL and m == 0 and (n + 1) * BLOCK_N <= N:
            last = tl.minimum(begin + PREFETCH, end) // BLOCK_K * BLOCK_K
            prefetch(weight, n * BLOCK_N, K, begin, last, BLOCK_N, BLOCK_K)
            if GATED:
                prefetch(weight, N + n * BLOCK_N, K, begin, last, BLOCK_N, BLOCK_K)
        wait_for_inputs(PDL, LATE=LEAD > 0)
        for k in range(begin, end, BLOCK_K):
            admit_next(end - k, LEAD, PDL)
            inputs = x_tiles.load([m * BLOCK_M, k])
            if PAIRED:
                weights = w_tiles.load([0, n * BLOCK_N, k]).reshape(WIDTH, BLOCK_K)
                acc = tl.dot(weights, inputs.T, acc)
            elif TURNED:
                acc = tl.dot(w_tiles.load([n * BLOCK_N, k]), inputs.T, acc)
                if GATED:
                    other = tl.dot(w_tiles.load([N + n * BLOCK_N, k]), inputs.T, other)
            else:
                acc = tl.dot(inputs, w_tiles.load([n * BLOCK_N, k]).T, acc)
                if GATED:
                    other = tl.dot(inputs, w_tiles.load([N + n * BLOCK_N, k]).T, other)
            if CHAIN > 0:
                if (k + BLOCK_K) % CHAIN == 0:
                    total += acc
                    acc = tl.zeros(acc.shape, tl.float32)
    if CHAIN > 0:
        acc = total
    is_last = True
    if SPLITS > 1:
        tile = m * tl.num_programs(1) + n
        rows: tl.constexpr = acc.shape[0]
        cols: tl.constexpr = acc.shape[1]
        inside = tl.arange(0, rows)[:, None] * cols + tl.arange(0, cols)[None, :]
        parts += tile * SPLITS * BLOCK_M * BLOCK_N
        tl.store(parts + split * BLOCK_M * BLOCK_N + inside, acc)
        # The program that arrives last sees what the others wrote before they arrived.
        tl.debug_barrier()  # wait until all threads have stored
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrivals + tile, 0)
            acc = tl.zeros([rows, cols], tl.float32)
            for part in tl.static_range(SPLITS):
                acc += tl.load(parts + part * BLOCK_M * BLOCK_N + inside)
    if is_last:
        if PAIRED:
            gates, ups = acc.T.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        elif TURNED:
            gates, ups = acc.T, other.T
        else:
            gates, ups = acc, other
        row, col = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        dtype = out.dtype.element_ty
        if GATED:
            result = gated_product(gates, ups, bias, col, N, dtype, GELU)
        else:
            result = gates
            if bias is not None:
                result += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        wanted = (row < x_tiles.shape[0])[:, None] & (col < N)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * N + col[None, :], result.to(dtype), mask=wanted)


@triton.jit
def prefetch(weight, first_row, K, begin, end, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Ask for rows of the weights, by lines of 128 bytes, without waiting for them.

    The memory delivers them to the L2 cache.
    """
    row = (first_row + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * K
    line = tl.arange(0, BLOCK_K // 64)[None, :] * 64
    for k in range(begin, end, BLOCK_K):
        ask_for(weight + row + k + line)


@triton.jit
def gated_product(gate, up, bias, col, N, dtype: tl.constexpr, GELU: tl.constexpr):
    """Compute silu(gate) * up or, with GELU, gelu(gate) * up. Round as separate kernels would."""
    if bias is not None:
        gate += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return activated(gate, GELU).to(dtype).to(tl.float32) * up
