"""Weights in int8 and inputs in int8, made of the weights of a checkpoint that is not quantised."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.backends.quantised.config import Int8
from nanovllm.backends.quantised.packed import PackedWeight, Piece
from nanovllm.layers.linear import empty_parameter
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice

LARGEST = 127  # -128 is not used, so that the codes of x and of -x differ in their sign alone
SMALLEST = 1e-12  # a scale is made from no smaller number, so that zeros have one, too
GROUP = 32  # inputs that share a scale


class Int8Weight(PackedWeight):
    """A weight in int8: number = code * scale, with a scale for each row.

    Inputs are quantised as well, each token with a scale for each group of 32 columns:

        scale_x = largest |x| of the group / 127
        y = sum over groups of (sum over columns k of round(x_k / scale_x) * code_k) * scale_x
        out = y * scale

    The sum over the columns of a group is an integer and exact. The groups are added in their
    order. So a token's result does not depend on the other tokens.
    """

    def __init__(
        self, weight: Tensor, parts: Sequence[WeightSlice], scheme: Int8, ranks: ParallelGroup
    ) -> None:
        super().__init__(weight, parts, 0, ranks)
        self.check_groups_of_inputs(parts[0].name, GROUP)
        self.codes = empty_parameter(*weight.shape, dtype=torch.int8)
        self.scales = empty_parameter(*weight.shape[:-1], 1, dtype=torch.float32)

    def forward(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        inputs = [quantise(part) for part in x.float().split(GROUP, dim=-1)]
        parts = []
        for _, rows in self.chunks:
            codes = self.rows_of(self.codes, rows, expert).float()
            sums = x.new_zeros(len(x), len(codes), dtype=torch.float32)
            for (of_group, scales), weights in zip(inputs, codes.split(GROUP, dim=-1)):
                # float32 holds sums of so few products of codes exactly.
                sums += F.linear(of_group.float(), weights) * scales
            parts.append(sums * self.rows_of(self.scales, rows, expert).squeeze(-1))
        out = torch.cat(parts, dim=-1)
        return (out if bias is None else out + bias).to(x.dtype)

    def dequantise(self, rows: slice, index: int, expert: int | None) -> Tensor:
        of_rows = self.rows_of(self.scales, rows, expert)
        return self.rows_of(self.codes, rows, expert) * of_rows

    def packed_slices(self, piece: Piece) -> Iterator[WeightSlice]:
        raise AssertionError("no checkpoint has this format")

    def encode(self, values: Tensor, skipped: int) -> dict[str, Tensor]:
        codes, scales = quantise(values)
        return {"codes": codes[:, skipped : skipped + self.width], "scales": scales}


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to int8, with the scale that just holds the largest number of each row.

    Returns codes [rows, K] and scales [rows, 1].
    """
    largest = x.abs().amax(dim=-1, keepdim=True)
    # Divide by a tensor, not by a Python number: see scale_for in fp8.py.
    scales = largest.clamp(min=SMALLEST) / largest.new_full((), LARGEST)
    return (x / scales).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales
