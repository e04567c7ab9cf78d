"""Linear layers on a GPU, by the kernel that was measured to be the fastest for their shape."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from nanovllm.backends.cuda.triton import decode_gemm, gemv, prefill_gemm
from nanovllm.backends.cuda.triton.dispatch import MAX_ROWS
from nanovllm.backends.cuda.triton.elementwise import activate_and_mul


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute x @ weight.T + bias: x [M, K], weight [N, K], bias [N] -> [M, N].

    `out` [M, N]: memory that the result may take.
    """
    if tiling := decode_gemm.tiling(x, weight):
        return decode_gemm.linear(x, weight, bias, tiling)
    return gemv.linear(x, weight, bias, out)


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """Compute silu(gates) * ups, or gelu(gates) * ups by tanh: x [M, K] -> [M, N].

    weight [2 N, K] and bias [2 N] yield gates first, then ups: x @ weight.T + bias.
    """
    if bias is None and gemv.is_skinny(x, weight):
        return gemv.gated_linear(x, weight, gelu)
    if bias is None and (tiling := decode_gemm.tiling(x, weight, gated=True)):
        return decode_gemm.gated_linear(x, weight, tiling, gelu)
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
    """Functions that take the arguments of their namesakes in this file."""

    linear: Callable[..., Tensor]
    gated_linear: Callable[..., Tensor]
    warmup_gated_linear: Callable[..., None]
    # Whether a row's results do not depend on the number of rows. If so, layers with packed weights
    # and experts must hold this, too.
    is_invariant: bool = False


FASTEST = Products(linear, gated_linear, warmup_gated_linear)
