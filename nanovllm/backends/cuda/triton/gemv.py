"""Linear layers of a few rows, as fast as the memory can deliver their weights.

The time of such a product is that of reading its weights. For small layers, cuBLAS reads them at a
third of the memory's speed. For more rows arithmetic takes longer, and cuBLAS takes over. The twin
of these kernels is `torch.nn.functional.linear`.

Each output is summed by one program in a fixed order, so the result is deterministic.

Shapes: M rows, K inputs, N outputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton import decode_gemm
from nanovllm.backends.cuda.triton.dispatch import cdiv, next_power_of_2, overlap, wait_for_inputs
from nanovllm.backends.cuda.triton.elementwise import activated

# Each thread loads 32 of them at once. Measured for shapes of 0.6B to 8B models on an H200.
WEIGHTS_PER_PROGRAM = 4096


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias: x [M, K], weight [N, K], bias [N] -> [M, N].

    `is_skinny` must hold. No running kernel may write to the weights: this one reads them before
    others have ended.
    """
    return _multiply(
        _skinny_linear_kernel,
        x,
        weight,
        bias,
        num_outputs=weight.shape[0],
        option=bias is not None,
    )


def gated_linear(x: Tensor, weight: Tensor, gelu: bool = False) -> Tensor:
    """Compute silu(x @ gate.T) * (x @ up.T), or with gelu: x [M, K] -> [M, N].

    `is_skinny` must hold. weight [2 N, K] consists of gate and then up. No running kernel may write
    to it.
    """
    gates, ups = weight.chunk(2)
    return _multiply(
        _skinny_gated_linear_kernel, x, gates, ups, num_outputs=len(gates), option=gelu
    )


def _multiply(
    kernel: Any,
    x: Tensor,
    weight: Tensor,
    other: Tensor | None,
    *,
    num_outputs: int,
    option: bool,
) -> Tensor:
    """Launch one of the two kernels with x [M, K], `weight` and `other` -> [M, num_outputs]."""
    rows, inputs = x.shape
    out = torch.empty(rows, num_outputs, dtype=x.dtype, device=x.device)
    block_k = next_power_of_2(inputs)
    block_n = max(1, WEIGHTS_PER_PROGRAM // block_k)
    kernel[(cdiv(num_outputs, block_n),)](
        *(x, weight, other, out),
        *(num_outputs, inputs, rows, block_n, block_k, option),
        num_warps=4,
        **overlap(x),
    )
    return out


def is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Tell whether these kernels are the fastest, as measured on an H200.

    The time of these kernels' arithmetic grows with the rows. That of cuBLAS and of decode_gemm.py,
    which use tensor cores, does not. decode_gemm.py takes no float32, and not all sizes: what it
    leaves is faster here than by cuBLAS.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if inputs > 16384:  # a program holds all weights of at least one output in registers
        return False
    if not (x.is_contiguous() and weight.is_contiguous()):
        return False
    if rows == 1 or rows == 2 and 1024 < inputs <= 4096:
        return True
    is_small = rows == 2 and inputs <= 1024 or rows in (3, 4) and outputs * inputs <= 1 << 23
    return is_small and decode_gemm.tiling(x, weight) is None


@triton.jit
def _skinny_linear_kernel(
    x,
    weight,
    bias,
    out,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    # Ask for all weights of the program at once, and before its inputs are ready, so that the
    # memory is never idle.
    weights = tl.load(weight + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
    wait_for_inputs(PDL)
    for row in tl.static_range(ROWS):
        inputs = tl.load(x + row * K + k, mask=k < K, other=0.0)
        total = tl.sum(weights.to(tl.float32) * inputs.to(tl.float32)[None, :], axis=1)
        if BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out + row * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _skinny_gated_linear_kernel(
    x,
    gate_weight,
    up_weight,
    out,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    gates = tl.load(gate_weight + at, mask=inside, other=0.0)
    ups = tl.load(up_weight + at, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    dtype = out.dtype.element_ty
    for row in tl.static_range(ROWS):
        inputs = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        # Round where separate kernels for the product and the activation would round.
        gate = tl.sum(gates.to(tl.float32) * inputs, axis=1).to(dtype).to(tl.float32)
        up = tl.sum(ups.to(tl.float32) * inputs, axis=1).to(dtype).to(tl.float32)
        active = activated(gate, GELU).to(dtype).to(tl.float32)
        tl.store(out + row * N + n, (active * up).to(dtype), mask=n < N)
