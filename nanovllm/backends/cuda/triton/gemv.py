"""Linear layers of a few rows, as fast as their weights can be read.

Knows that such a product is bound by the bytes of its weights, which cuBLAS reads at a third of the
memory's speed when the layer is small, and where it is not bound by them any more: there
`torch.nn.functional.linear`, its twin, takes over.
Shapes: M rows, K inputs, N outputs. Each output is summed by one program in a fixed order: the
result is deterministic.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import MAX_ROWS, overlap, wait_for_inputs
from nanovllm.backends.cuda.triton.elementwise import activated

# 32 a thread, in flight at once; measured from 0.6B to 8B shapes on an H200
WEIGHTS_PER_PROGRAM = 4096


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, spare: Tensor | None = None
) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N], of many rows in `spare`, if there is one.

    With few rows, the weights must not be written by a running kernel.
    """
    if not is_skinny(x, weight):
        if bias is None and _suits_cublaslt(x, weight):
            bias = _zero_bias(weight.shape[0], x.dtype, x.device)
        if spare is not None and x.shape[0] > MAX_ROWS and bias is None:
            return torch.mm(x, weight.t(), out=spare)
        return F.linear(x, weight, bias)
    return _multiply(_skinny_linear_kernel, x, weight.shape[0], weight, bias, bias is not None)


def gated_linear(x: Tensor, weight: Tensor, gelu: bool = False) -> Tensor:
    """silu, or gelu, of x @ gate.T, times x @ up.T: x [M, K] -> [M, N], where `is_skinny` holds.

    weight [2 N, K] holds gate and then up, and must not be written by a running kernel.
    """
    gates, ups = weight.chunk(2)
    return _multiply(_skinny_gated_linear_kernel, x, len(gates), gates, ups, gelu)


def _multiply(
    kernel: Any, x: Tensor, outputs: int, weight: Tensor, other: Tensor | None, option: bool
) -> Tensor:
    """What one of the two kernels makes of x [M, K], `weight` and `other`: [M, outputs]."""
    rows, inputs = x.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    block_k = triton.next_power_of_2(inputs)
    block_n = max(1, WEIGHTS_PER_PROGRAM // block_k)
    kernel[(triton.cdiv(outputs, block_n),)](
        *(x, weight, other, out),
        *(outputs, inputs, rows, block_n, block_k, option),
        num_warps=4,
        **overlap(x),
    )
    return out


def is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Where the kernels beat cuBLAS on an H200.

    Their arithmetic grows with the rows; cuBLAS's, on tensor cores, does not.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if inputs > 16384:  # a program holds at least one output's weights in registers
        return False
    return (
        rows == 1 or rows == 2 and inputs <= 4096 or rows in (3, 4) and outputs * inputs <= 1 << 23
    ) and (x.is_contiguous() and weight.is_contiguous())


def _suits_cublaslt(x: Tensor, weight: Tensor) -> bool:
    """Where cuBLASLt picks better kernels: up to a fifth faster in 8B shapes, on an H200. Of 12
    shapes with fewer outputs and 12 numbers of rows each, it was 4 to 8 % slower on average in the
    7 of up to 1,536 outputs, and from 3 % faster to 4 % slower in the others.

    PyTorch leaves a product to it where there is a bias to add.
    """
    outputs, inputs = weight.shape
    is_large = 3072 <= outputs <= 4 * inputs // 3
    return x.dtype != torch.float32 and 16 < x.shape[0] <= 384 and is_large


@lru_cache
def _zero_bias(outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(outputs, dtype=dtype, device=device)


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
    # All of a program's weights are asked for at once, and before its input is there: memory need
    # not wait for either.
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
        # Round where the product and the activation would, were they apart.
        gate = tl.sum(gates.to(tl.float32) * inputs, axis=1).to(dtype).to(tl.float32)
        up = tl.sum(ups.to(tl.float32) * inputs, axis=1).to(dtype).to(tl.float32)
        active = activated(gate, GELU).to(dtype).to(tl.float32)
        tl.store(out + row * N + n, (active * up).to(dtype), mask=n < N)
