"""Linear layers of a decode step's rows, tile by tile on tensor cores, with the weights on their way early.

Knows that up to a few hundred rows such a product is bound by the bytes of its weights, yet takes cuBLAS twice as long
when they are small: a kernel starts, waits for its first bytes and drains. This kernel is launched while the one before
it still runs, and asks for its weights then, so that they are in the L2 cache when its input is ready.
Shapes: M rows, K inputs, N outputs. Where M N tiles do not fill the device, several programs share one, each with a part
of K, and the last of them to end adds up the parts in order: the result is deterministic.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import overlap, wait_for_inputs

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.3
    TensorDescriptor = None

MAX_ROWS = 256


def can_run(x: Tensor, weight: Tensor) -> bool:
    return False


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, config) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N]. The weights must not be written by a running kernel."""
    block_m, block_n, block_k, splits, stages, warps = config
    rows, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n)
    parts = arrivals = None
    if splits > 1:
        parts = torch.empty(tiles[0] * tiles[1] * splits, block_m, block_n, dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device)
    _tiled_linear_kernel[(*tiles, splits)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]), TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        weight, bias, out, parts, arrivals, rows, outputs, inputs, block_m, block_n, block_k, splits,
        num_warps=warps, num_stages=stages, **overlap(x),
    )  # fmt: skip
    return out


def gated(x: Tensor, weight: Tensor, config) -> Tensor:
    block_m, block_n, block_k, splits, stages, warps = config
    rows, (outputs, inputs) = x.shape[0], weight.shape
    outputs //= 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n)
    _gated_kernel[tiles](
        TensorDescriptor.from_tensor(x, [block_m, block_k]), TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        weight, out, rows, outputs, inputs, block_m, block_n, block_k,
        num_warps=warps, num_stages=stages, **overlap(x),
    )  # fmt: skip
    return out


@lru_cache
def _arrivals(device: torch.device) -> Tensor:
    return torch.zeros(4096, dtype=torch.int32, device=device)


@triton.jit
def _prefetch(weight, first_row, K, begin, end, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Ask for the bytes of a program's weights, a line of 128 each; they arrive in the L2 cache in their own time."""
    row = (first_row + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * K
    line = tl.arange(0, BLOCK_K // 64)[None, :] * 64
    for k in range(begin, end, BLOCK_K):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + row + k + line], dtype=tl.int32, is_pure=False, pack=1
        )


PREFETCH = tl.constexpr(1024)


@triton.jit
def _tiled_linear_kernel(
    x, w, weight, bias, out, parts, arrivals, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m, n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = K // SPLITS
    begin = split * span
    if PDL:
        if m == 0:
            _prefetch(weight, n * BLOCK_N, K, begin, begin + tl.minimum(span, PREFETCH), BLOCK_N, BLOCK_K)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(begin, begin + span, BLOCK_K):
        acc = tl.dot(x.load([m * BLOCK_M, k]), w.load([n * BLOCK_N, k]).T, acc)
    is_last = True
    if SPLITS > 1:
        tile = m * tl.num_programs(1) + n
        parts += tile.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_N
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(parts + split * BLOCK_M * BLOCK_N + inside, acc)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrivals + tile, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in tl.static_range(SPLITS):
                acc += tl.load(parts + part * BLOCK_M * BLOCK_N + inside)
    if is_last:
        row, col = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        if bias is not None:
            acc += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        at = row.to(tl.int64)[:, None] * N + col[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])


@triton.jit
def _gated_kernel(
    x, w, weight, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0), tl.program_id(1)
    if PDL:
        if m == 0:
            _prefetch(weight, n * BLOCK_N, K, 0, tl.minimum(K, PREFETCH), BLOCK_N, BLOCK_K)
            _prefetch(weight, N + n * BLOCK_N, K, 0, tl.minimum(K, PREFETCH), BLOCK_N, BLOCK_K)
    wait_for_inputs(PDL)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        inputs = x.load([m * BLOCK_M, k])
        gate = tl.dot(inputs, w.load([n * BLOCK_N, k]).T, gate)
        up = tl.dot(inputs, w.load([N + n * BLOCK_N, k]).T, up)
    row, col = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype = out.dtype.element_ty
    wide = gate.to(dtype).to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    product = silu.to(tl.float32) * up.to(dtype).to(tl.float32)
    at = row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(out + at, product.to(dtype), mask=(row < M)[:, None] & (col < N)[None, :])
