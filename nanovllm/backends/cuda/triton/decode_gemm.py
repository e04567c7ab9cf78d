"""Linear layers of a decode step's rows on tensor cores, which fetch weights before the inputs.

The time of such a product should be that of reading its weights. For small weights, cuBLAS takes
two to four times as long, because each kernel starts, waits for its first bytes, and drains. The
kernels of this file are launched while the kernel before still runs. They ask for their weights at
once, and find them in the L2 cache when the inputs are ready. Where cuBLAS is as fast, it is used.

Each program computes one tile of the output. If there are fewer tiles than multiprocessors, several
programs share a tile, each with a part of K. The last program to end adds up the parts in order, so
the result is deterministic. Written for Hopper, whose tensor memory accelerator fetches the tiles.

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
    arrivals,
    can_overlap,
    has_large_shared_memory,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.elementwise import activated

BLOCK_M = 64
BLOCK_K = 128
SHARED_MEMORY = 200_000  # bytes that a program may fill with tiles that it fetches in advance
# Each program prefetches the weights of so many inputs. The cache would not hold more.
PREFETCH = tl.constexpr(1024)


class Tiling(NamedTuple):
    """The tiling of a product: how it is cut into programs."""

    block_n: int  # outputs of a tile
    splits: int  # programs that share a tile
    stages: int  # steps of BLOCK_K whose tiles are in shared memory or on their way


def tiling(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tiling | None:
    """Choose how to cut the product into one wave of programs; None: cuBLAS is as fast.

    The limits were measured on an H200.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if (
        TensorDescriptor is None
        or x.dtype not in (torch.bfloat16, torch.float16)
        or inputs % BLOCK_K
    ):
        return None
    if not 32 < rows <= (128 if gated else MAX_ROWS) or outputs * inputs > 1 << 23:
        return None
    # Tiles of which most rows are padding are slow: the accelerator takes longer to fetch padding
    # than rows.
    if 0 < rows % BLOCK_M < 48 and outputs > 1024:
        return None
    if not (
        x.is_contiguous()
        and weight.is_contiguous()
        and can_overlap(x.device)
        and has_large_shared_memory(x.device)
    ):
        return None
    processors = num_processors(x.device)
    outputs, tensors = (outputs // 2, 2) if gated else (outputs, 1)
    for block_n in (32, 64) if gated else (32, 64, 128):
        tiles = triton.cdiv(rows, BLOCK_M) * (outputs // block_n)
        if outputs % block_n == 0 and tiles <= processors:
            splits = 1
            while (
                not gated
                and splits < 4
                and 2 * splits * tiles <= processors
                and inputs % (2 * splits * BLOCK_K) == 0
            ):
                splits *= 2
            stage = (BLOCK_M + tensors * block_n) * BLOCK_K * x.element_size()
            return Tiling(block_n, splits, min(6, SHARED_MEMORY // stage))
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling) -> Tensor:
    """Compute x @ weight.T + bias: x [M, K], weight [N, K], bias [N] -> [M, N].

    No running kernel may write to the weights.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    block_n, splits, stages = tiling
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, BLOCK_M), outputs // block_n, splits)
    parts = counters = None
    if splits > 1:
        parts = torch.empty(*grid, BLOCK_M, block_n, dtype=torch.float32, device=x.device)
        counters = arrivals(x.device)
    _linear_kernel[grid](
        *_descriptors(x, weight, block_n),
        weight,
        bias,
        out,
        parts,
        counters,
        rows,
        outputs,
        inputs,
        BLOCK_M,
        block_n,
        BLOCK_K,
        splits,
        num_warps=4,
        num_stages=stages,
        **overlap(x),
    )
    return out


def gated_linear(x: Tensor, weight: Tensor, tiling: Tiling, gelu: bool = False) -> Tensor:
    """Compute silu(x @ gate.T) * (x @ up.T), or with gelu: x [M, K] -> [M, N].

    weight [2 N, K] consists of gate and then up. No running kernel may write to it.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    outputs //= 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _gated_linear_kernel[(triton.cdiv(rows, BLOCK_M), outputs // tiling.block_n)](
        *_descriptors(x, weight, tiling.block_n),
        weight,
        out,
        rows,
        outputs,
        inputs,
        BLOCK_M,
        tiling.block_n,
        BLOCK_K,
        gelu,
        num_warps=4,
        num_stages=tiling.stages,
        **overlap(x),
    )
    return out


def _descriptors(x: Tensor, weight: Tensor, block_n: int) -> tuple:
    return TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K]), TensorDescriptor.from_tensor(
        weight, [block_n, BLOCK_K]
    )


@triton.jit
def prefetch(weight, first_row, K, begin, end, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Ask for rows of the weights, by lines of 128 bytes, without waiting for them.

    The memory delivers them to the L2 cache.
    """
    row = (first_row + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * K
    line = tl.arange(0, BLOCK_K // 64)[None, :] * 64
    for k in range(begin, end, BLOCK_K):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [weight + row + k + line],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x_tiles,
    w_tiles,
    weight,
    bias,
    out,
    parts,
    arrivals,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    m, n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = K // SPLITS
    begin = split * span
    if PDL and m == 0:
        prefetch(
            weight, n * BLOCK_N, K, begin, begin + tl.minimum(span, PREFETCH), BLOCK_N, BLOCK_K
        )
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(begin, begin + span, BLOCK_K):
        acc = tl.dot(x_tiles.load([m * BLOCK_M, k]), w_tiles.load([n * BLOCK_N, k]).T, acc)
    is_last = True
    if SPLITS > 1:
        tile = m * tl.num_programs(1) + n
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts += tile * SPLITS * BLOCK_M * BLOCK_N
        tl.store(parts + split * BLOCK_M * BLOCK_N + inside, acc)
        # The program that arrives last sees what the others wrote before they arrived.
        tl.debug_barrier()  # wait until all threads have stored
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrivals + tile, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in tl.static_range(SPLITS):
                acc += tl.load(parts + part * BLOCK_M * BLOCK_N + inside)
    if is_last:
        if bias is not None:
            acc += tl.load(bias + n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.float32)[None, :]
        _store(out, acc, m * BLOCK_M, n * BLOCK_N, M, N, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["M"])
def _gated_linear_kernel(
    x_tiles,
    w_tiles,
    weight,
    out,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    m, n = tl.program_id(0), tl.program_id(1)
    if PDL and m == 0:
        prefetch(weight, n * BLOCK_N, K, 0, tl.minimum(K, PREFETCH), BLOCK_N, BLOCK_K)
        prefetch(weight, N + n * BLOCK_N, K, 0, tl.minimum(K, PREFETCH), BLOCK_N, BLOCK_K)
    wait_for_inputs(PDL)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        inputs = x_tiles.load([m * BLOCK_M, k])
        gate = tl.dot(inputs, w_tiles.load([n * BLOCK_N, k]).T, gate)
        up = tl.dot(inputs, w_tiles.load([N + n * BLOCK_N, k]).T, up)
    # Round where separate kernels for the product and the activation would round.
    dtype = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    active = activated(gate, GELU).to(dtype).to(tl.float32)
    _store(out, active * up, m * BLOCK_M, n * BLOCK_N, M, N, BLOCK_M, BLOCK_N)


@triton.jit
def _store(out, tile, first_row, first_col, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col = first_row + tl.arange(0, BLOCK_M), first_col + tl.arange(0, BLOCK_N)
    tl.store(
        out + row[:, None] * N + col[None, :],
        tile.to(out.dtype.element_ty),
        mask=(row < M)[:, None],
    )
