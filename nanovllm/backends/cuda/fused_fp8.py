"""Packed weights in FP8 whose products are computed by Triton kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.backends.cuda import products
from nanovllm.backends.cuda.fused_weight import FusedWeight
from nanovllm.backends.cuda.triton import fp8_linear
from nanovllm.backends.cuda.triton.elementwise import activate_and_mul
from nanovllm.backends.cuda.triton.fp8_inputs import CUBLAS_BLOCK, Fp8Matrix, Rows
from nanovllm.backends.cuda.triton.unnormed import Stream, Unnormed
from nanovllm.backends.quantised.fp8 import Fp8Weight


class FusedFp8Weight(FusedWeight, Fp8Weight):
    """A weight in FP8 that is multiplied by the kernels that products.py chooses.

    cuBLASLt and the kernel of fp8_splitk.py read the scales of blocks from a copy, `block_scales`.
    It is made when it is first needed, and again whenever weights have changed.
    """

    block_scales: Tensor | None = None  # [N / 128, G]
    _whole: Fp8Matrix | None = None  # the last result of `_whole_matrix`

    def can_norm(self, row: Tensor) -> bool:
        return self.can_add(row)

    def can_add(self, row: Any) -> bool:
        matrices = self.matrices(None)
        is_able = products.fp8_row is not None and not (self.is_invariant or self.lead)
        return is_able and len(matrices) == 1 and products.fp8_row.suits(row, matrices[0])

    def add(self, row: Tensor, bias: Tensor | None, residual: Tensor) -> Stream:
        matrix, dtype = self.matrices(None)[0], self.plain.dtype
        return products.linear_fp8(row, matrix, bias, dtype, residual=residual)

    def forward(
        self, x: Tensor | Rows | Unnormed, bias: Tensor | None = None, expert: int | None = None
    ) -> Tensor:
        matrices, dtype, linear = self.matrices(expert), self.plain.dtype, self.linear
        if isinstance(x, (Rows, Unnormed)):
            return linear(x, matrices[0], bias, dtype)
        if not all(fp8_linear.suits(x, matrix) for matrix in matrices):
            return super().forward(x, bias, expert)
        largest = None
        if self.is_split and self.scheme.activations == "token":
            largest = self.ranks.maximum(x.abs().amax(dim=-1).float())
        heights = [len(matrix.codes) for matrix in matrices]
        biases = [None] * len(matrices) if bias is None else bias.split(heights)
        parts = [linear(x, matrix, part, dtype, largest) for matrix, part in zip(matrices, biases)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @property
    def linear(self) -> Callable[..., Tensor]:
        """The function that multiplies by a matrix."""
        return fp8_linear.invariant_linear if self.is_invariant else products.linear_fp8

    def gated(
        self, x: Tensor | Rows | Unnormed, bias: Tensor | None, gelu: bool, reader: Fp8Matrix | None
    ) -> Tensor | Rows:
        """Compute silu(gates) * ups, or with gelu: x [T, K] -> [T, N]. The weight is [2 N, K].

        reader: the matrix that the result will be multiplied by, if it may be quantised for it.
        """
        matrix = self.matrices(None)[0]
        if bias is None and (isinstance(x, (Rows, Unnormed)) or self.matrix_for(x) is not None):
            dtype = self.plain.dtype
            return products.gated_linear_fp8(x, matrix, dtype, gelu, reader, self.linear)
        return activate_and_mul(self(x, bias), gelu)

    def matrix_for(self, x: Tensor | None) -> Fp8Matrix | None:
        """Return the matrix that inputs can be quantised for before `forward`; None: none.

        x: the inputs; None: they are yet to be computed, as dense rows.
        """
        matrices, activations = self.matrices(None), self.scheme.activations
        needs_ranks = self.is_split and activations == "token"
        if activations is None or needs_ranks or len(matrices) > 1:
            return None
        suits = fp8_linear.is_known(matrices[0]) if x is None else fp8_linear.suits(x, matrices[0])
        return matrices[0] if suits else None

    def matrices(self, expert: int | None) -> list[Fp8Matrix]:
        """Return the matrices whose results, side by side, are the weight's.

        Projections are one matrix, unless their inputs have scales of their own.
        """
        if self.scheme.activations != "tensor" and expert is None:
            return [self._whole_matrix()]
        codes, scales = (
            self.rows_of(parameter, slice(None), expert) for parameter in (self.codes, self.scales)
        )
        if self.scheme.activations != "tensor":
            return [Fp8Matrix(codes, scales, *self._sizes)]
        inputs = self.rows_of(self.input_scales, slice(None), expert)
        ends = [*self.starts[1:], self.height]
        return [
            Fp8Matrix(codes[begin:end], scales[begin:end], *self._sizes, inputs[number])
            for number, (begin, end) in enumerate(zip(self.starts, ends))
        ]

    def _whole_matrix(self) -> Fp8Matrix:
        """Return the weight as one matrix, which is kept: a layer asks for it seven times a step.

        It holds the parameters themselves, so it follows them when their memory moves.
        """
        kept, codes, scales = self._whole, self.codes, self.scales
        if kept is not None and kept.codes is codes and kept.scales is scales:
            return kept
        self.restore()
        self._whole = Fp8Matrix(codes, scales, *self._sizes, block_scales=self.block_scales)
        return self._whole

    @property
    def _sizes(self) -> tuple[int, int, str | None]:
        """The fields group, block_rows and activations of a matrix."""
        group = self.group if self.num_groups > 1 else self.width
        if self.begins_inside_group:
            group = 0  # which no kernel knows
        return group, self.block_rows, self.scheme.activations

    @torch.inference_mode()
    def arrange(self) -> None:
        is_for_cublas = not (self.lead or self.is_invariant)
        if self.block_rows == CUBLAS_BLOCK and is_for_cublas:
            blocks = self.scales[:: self.block_rows]
            if self.block_scales is None:
                self.block_scales = torch.empty_like(blocks, memory_format=torch.contiguous_format)
            self.block_scales.copy_(blocks)

    def restore(self) -> None:
        if self.block_scales is None:
            self.arrange()

    def drop(self) -> None:
        self.block_scales = self._whole = None

    def take_weights(self, plain: nn.Module) -> None:
        self.copy_parameters(plain)
        if self.block_scales is not None:  # otherwise `restore` follows, if there are any
            self.arrange()
