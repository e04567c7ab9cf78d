"""The choice of the kernel that multiplies in a linear layer.

The format of the weight and the number of rows decide. With few rows, a product takes as long as
its weight takes to read; with many, as long as its arithmetic. The functions of this file choose:

    weight             few rows            rows of a decode step          rows of a prompt
    plain              gemv, whole_gated   decode_gemm or cuBLAS          cuBLAS or prefill_gemm
    INT4, INT8         packed_linear       packed_linear                  dequantised, then as plain
    INT4 on Hopper     woven_row           woven_linear                   dequantised, then as plain
    FP8                fp8_gemv            fp8_linear                     fp8_linear
    FP8 on Hopper      fp8_row, fp8_gemv   fp8_linear, fp8_splitk or      cuBLASLt or fp8_linear
                                           cuBLASLt
    batch_invariant    whole_gated, decode_gemm, invariant_linear, cuBLAS; FP8: fp8_linear alone

What each kernel can compute, and by which measurements it is chosen, stands beside it in triton/:
in `is_skinny`, `tiling`, `suits`, `takes_woven` and the like. Weights in other formats are
dequantised as they are used (PackedWeight.forward). Experts are a matter of their own:
triton/moe.py chooses; in decode steps, triton/router.py multiplies by their router's weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.cuda import cublas
from nanovllm.backends.cuda.triton import (
    decode_gemm,
    fp8_gemv,
    fp8_linear,
    gemv,
    invariant_linear,
    packed_linear,
    prefill_gemm,
)
from nanovllm.backends.cuda.triton.dispatch import MAX_ROWS
from nanovllm.backends.cuda.triton.elementwise import activate_and_mul
from nanovllm.backends.cuda.triton.fp8_inputs import (
    Fp8Matrix,
    Rows,
    activate_and_quantise,
    as_rows,
)
from nanovllm.backends.cuda.triton.invariant_linear import whole_gated  # None without Gluon
from nanovllm.backends.cuda.triton.packed_linear import PackedTensors
from nanovllm.backends.cuda.triton.unnormed import Unnormed

fp8_row: Any
fp8_splitk: Any
try:
    from nanovllm.backends.cuda.triton import fp8_row
except ImportError:  # older releases of Triton lack Gluon, or parts of it
    fp8_row = None
try:
    from nanovllm.backends.cuda.triton import fp8_splitk
except ImportError:
    fp8_splitk = None

# Plain weights.


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute x @ weight.T + bias: x [M, K], weight [N, K], bias [N] -> [M, N].

    `out` [M, N]: memory that the result may take. No running kernel may write to the weights: the
    kernels for few rows read them before others have ended.
    """
    if gemv.is_skinny(x, weight):
        return gemv.linear(x, weight, bias)
    if tiling := decode_gemm.tiling(x, weight):
        return decode_gemm.multiply(x, weight, bias, tiling)
    return cublas.linear(x, weight, bias, out)


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """Compute silu(gates) * ups, or gelu(gates) * ups by tanh: x [M, K] -> [M, N].

    weight [2 N, K] and bias [2 N] yield gates first, then ups: x @ weight.T + bias.
    """
    if bias is None and gemv.is_skinny(x, weight):
        return gemv.gated_linear(x, weight, gelu)
    if bias is None and whole_gated is not None and whole_gated.takes(x, weight):
        return whole_gated.gated_linear(x, weight, gelu)
    if bias is None and (tiling := decode_gemm.tiling(x, weight, gated=True)):
        return decode_gemm.multiply(x, weight, None, tiling, gated=True, gelu=gelu)
    if bias is None and prefill_gemm.suits(x, weight):
        return prefill_gemm.gated_linear(x, weight, gelu)
    return activate_and_mul(linear(x, weight, bias), gelu)


def warmup_gated_linear(weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> None:
    """Launch the kernels that `gated_linear` uses only for more rows than a decode step has."""
    x = weight.new_zeros(1, weight.shape[1])
    if bias is None and prefill_gemm.is_able(x, weight):
        prefill_gemm.gated_linear(x, weight, gelu)
    activate_and_mul(weight.new_zeros(MAX_ROWS + 1, weight.shape[0]), gelu)


class Products(NamedTuple):
    """The functions for plain weights: they take the arguments of their namesakes in this file."""

    linear: Callable[..., Tensor]
    gated_linear: Callable[..., Tensor]
    warmup_gated_linear: Callable[..., None]
    # Whether a row's results do not depend on the number of rows. If so, layers with packed
    # weights, experts and sums over ranks must hold this, too.
    is_invariant: bool = False


FASTEST = Products(linear, gated_linear, warmup_gated_linear)
INVARIANT = Products(
    invariant_linear.linear,
    invariant_linear.gated_linear,
    invariant_linear.warmup_gated_linear,
    is_invariant=True,
)


# Weights in INT4 and INT8.


def linear_int(
    x: Tensor | Unnormed,
    weight: PackedTensors,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Any:
    """Compute x @ weight.T + bias: x [M, K], bias [N] -> [M, N].

    No running kernel may write to the weights. Woven weights also take an Unnormed row, and a
    `residual` [1, N], to which the result of one row is added; then a Stream is returned.
    """
    if weight.woven and 0 < len(x) <= MAX_ROWS:
        return packed_linear.woven_product(x, weight, bias, residual=residual)
    assert isinstance(x, Tensor) and residual is None, "only woven_row.py norms and adds"
    x = x.contiguous()
    if not len(x):  # an expert may have none
        return x.new_empty(0, weight.outputs)
    if len(x) <= packed_linear.FEW_ROWS and weight.inputs % 8 == 0:
        return packed_linear.few_rows_linear(x, weight, bias)
    if len(x) <= MAX_ROWS:
        return packed_linear.tiled_linear(x, weight, bias, packed_linear.tiling(x, weight))
    return linear(x, packed_linear.dequantise(weight, x.dtype), bias)


def gated_linear_int(
    x: Tensor | Unnormed, weight: PackedTensors, bias: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """Compute silu(gates) * ups, or gelu(gates) * ups by tanh: x [M, K] -> [M, N].

    The weight [2 N, K] and bias [2 N] yield gates first, then ups.
    """
    if weight.woven and len(x) <= MAX_ROWS:
        return packed_linear.woven_product(x, weight, bias, gated=True, gelu=gelu)
    assert isinstance(x, Tensor), "only woven_row.py norms"
    x = x.contiguous()
    if len(x) <= packed_linear.FEW_ROWS and weight.inputs % 8 == 0:
        return packed_linear.few_rows_linear(x, weight, bias, gated=True, gelu=gelu)
    if len(x) <= MAX_ROWS:
        tiling = packed_linear.tiling(x, weight)
        return packed_linear.tiled_linear(x, weight, bias, tiling, gated=True, gelu=gelu)
    return gated_linear(x, packed_linear.dequantise(weight, x.dtype), bias, gelu)


def warmup_gated_linear_int(
    weight: PackedTensors, dtype: torch.dtype, bias: Tensor | None = None, gelu: bool = False
) -> None:
    """Launch the kernels that `gated_linear_int` uses only for more rows than a decode step has."""
    warmup_gated_linear(packed_linear.dequantise(weight, dtype), bias, gelu)


# Weights in FP8.


def linear_fp8(
    x: Tensor | Rows | Unnormed,
    matrix: Fp8Matrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    largest: Tensor | None = None,
    residual: Tensor | None = None,
) -> Any:
    """Compute x @ weight.T + bias, where `fp8_linear.suits` holds: x [M, K], bias [N] -> [M, N].

    largest: [M], the largest |x| of each token, where other ranks have some of its inputs.
    No running kernel may write to the weight: kernels read it before others have ended.
    residual: [1, N], what the result of one row is added to, where `fp8_row.suits` holds; then a
        Stream is returned.
    """
    if fp8_row is not None and fp8_row.suits(x, matrix):
        return fp8_row.linear(x, matrix, bias, residual=residual)
    assert not isinstance(x, Unnormed), "only fp8_row.py norms"
    x = as_rows(x, matrix, largest)
    if fp8_gemv.suits(x, matrix):
        return fp8_gemv.linear(x, matrix, bias, dtype)
    if fp8_splitk is not None and fp8_splitk.suits(x, matrix, dtype):
        return fp8_splitk.linear(x, matrix, bias, dtype)
    if fp8_linear.suits_cublas(x, matrix, dtype):
        return fp8_linear.multiply_by_cublas(x, matrix, bias)
    return fp8_linear.multiply(x, matrix, bias, dtype, fp8_linear.tiling(x, matrix))


def gated_linear_fp8(
    x: Tensor | Rows | Unnormed,
    matrix: Fp8Matrix,
    dtype: torch.dtype,
    gelu: bool = False,
    reader: Fp8Matrix | None = None,
    linear: Callable[..., Tensor] = linear_fp8,
) -> Tensor | Rows:
    """Compute silu(gates) * ups, or gelu(gates) * ups by tanh: x [M, K] -> [M, N].

    The weight [2 N, K] yields gates first, then ups. If the result is for a matrix `reader`, it may
    be quantised already.

    linear: `linear_fp8`, or `fp8_linear.invariant_linear`.
    """
    if linear is linear_fp8 and fp8_row is not None and fp8_row.suits(x, matrix):
        return fp8_row.linear(x, matrix, gated=True, gelu=gelu)
    product = linear(x, matrix, None, dtype)
    if reader is None:
        return activate_and_mul(product, gelu)
    return activate_and_quantise(product, reader, gelu)
