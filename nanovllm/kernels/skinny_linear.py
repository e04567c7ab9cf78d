"""Linear layers of a few rows, as fast as their weights can be read.

Knows that such a product is bound by the bytes of its weights, which cuBLAS reads at a third of the memory's speed when
the layer is small. From a measured number of rows on it hands over to `torch.nn.functional.linear`, its twin.
Shapes: M rows, K inputs, N outputs. Each output is summed by one program in a fixed order: the result is deterministic.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16  # what one tile of the tensor cores takes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N]."""
    if not 1 <= x.shape[0] <= MAX_ROWS or not (x.is_contiguous() and weight.is_contiguous()):
        return F.linear(x, weight, bias)
    rows, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows == 1:
        block_k = triton.next_power_of_2(inputs)
        block_n = max(1, 16384 // block_k)
        _one_row_kernel[(triton.cdiv(outputs, block_n),)](
            x, weight, bias, out, outputs, inputs, block_n, block_k, bias is not None, num_warps=4
        )
    else:
        block_n, block_k = (32, 128) if outputs >= 8192 else (16, 256)
        _few_rows_kernel[(triton.cdiv(outputs, block_n),)](
            x, weight, bias, out, rows, outputs, inputs, MAX_ROWS, block_n, block_k, bias is not None,
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return out


@triton.jit
def _one_row_kernel(
    x, weight, bias, out, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr
):
    """A program asks for all its weights at once: many loads in flight are what memory needs to run at full speed."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    weights = tl.load(weight + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
    inputs = tl.load(x + k, mask=k < K, other=0.0)
    total = tl.sum(weights.to(tl.float32) * inputs.to(tl.float32)[None, :], axis=1)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _few_rows_kernel(
    x, weight, bias, out, M, N, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inputs = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        weight_at = weight + n.to(tl.int64)[None, :] * K + k[:, None]
        weights = tl.load(weight_at, mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(inputs, weights, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
