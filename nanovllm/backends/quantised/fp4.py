"""Weights in FP4 (E2M1): MXFP4, as checkpoints of gpt-oss hold experts, and NVFP4.

MXFP4 is a format of OCP Microscaling Formats, version 1.0.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.backends.quantised.config import Fp4
from nanovllm.backends.quantised.fp8 import repeat
from nanovllm.backends.quantised.packed import PackedWeight, Piece
from nanovllm.layers.attention import one_scale
from nanovllm.layers.e4m3 import E4M3, to_e4m3
from nanovllm.layers.linear import empty_parameter
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.mxfp4 import ELEMENTS
from nanovllm.weights.weight_slice import WeightSlice

LARGEST = 6.0  # the largest number that E2M1 holds
BIAS, NAN = 127, 255  # a scale of MXFP4 stands for 2^(scale - BIAS), and one of NAN for NaN
# The divisor of NVFP4 weights that are quantised here. With it, the scale of a group lies in the
# range of e4m3 if the group's largest number is from 4e-4 to 10, as in usual weights.
DIVISOR = 256.0
U8 = ("U8",)


class Fp4Weight(PackedWeight):
    """A weight in FP4. A byte holds the codes of two neighbours in a row, the first in low bits.

    MXFP4: number = E2M1 * 2^(scale - 127).
    NVFP4: number = E2M1 * (e4m3 scale / divisor), where the divisor is the tensor's.
    """

    def __init__(
        self, weight: Tensor, parts: Sequence[WeightSlice], scheme: Fp4, ranks: ParallelGroup
    ) -> None:
        super().__init__(weight, parts, scheme.group, ranks)
        self.scheme = scheme
        if self.columns.start % 2 or self.width % 2:
            raise ValueError(
                f"{parts[0].name} has {self.in_features} columns, of which each of {ranks.size} "
                f"ranks takes {self.width}, but two columns share a byte: choose a "
                "tensor_parallel_size that leaves each rank an even number"
            )
        rows = weight.shape[:-1]
        self.codes = empty_parameter(*rows, self.width // 2, dtype=torch.uint8)
        kind = E4M3 if scheme.is_nvidia else torch.uint8
        self.scales = empty_parameter(*rows, self.num_groups, dtype=kind)
        if scheme.is_nvidia:
            self.divisors = empty_parameter(*rows, 1, dtype=torch.float32)
        self.made = tuple(dict(self.named_parameters()))

    def dequantise(self, rows: slice, index: int, expert: int | None) -> Tensor:
        of = partial(self.rows_of, rows=rows, expert=expert)
        if not self.scheme.is_nvidia:
            return self.numbers_of(of(self.codes), of(self.scales))
        scales = of(self.scales).float() / of(self.divisors)
        return from_e2m1(of(self.codes)) * self.spread(scales)

    def numbers_of(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Compute the numbers of rows in MXFP4: codes [N, K / 2] and scales [N, groups]."""
        bits = scales.int()
        factors = torch.ldexp(torch.ones_like(bits, dtype=torch.float32), bits - BIAS)
        return from_e2m1(codes) * self.spread(factors.masked_fill(bits == NAN, torch.nan))

    def packed_slices(self, piece: Piece) -> Iterator[WeightSlice]:
        name, rows = piece.name, piece.rows
        codes, scales = self.at(self.codes, piece), self.at(self.scales, piece)
        halves = slice(piece.columns.start // 2, piece.columns.stop // 2)
        count = -(-piece.in_features // self.group)
        if not self.scheme.is_nvidia:  # gpt-oss: all experts of a layer in one tensor
            assert piece.experts is not None and piece.expert is not None
            one = slice(piece.expert, piece.expert + 1)
            lead = piece.experts, piece.out_features, count
            blocks = (one, rows, self.groups)
            skipped = halves.start - self.groups.start * self.group // 2

            def in_row(blocks: Tensor) -> Tensor:
                return blocks.flatten(2)[0, :, skipped : skipped + self.width // 2]

            whole = *lead, self.group // 2
            yield WeightSlice(f"{name}_blocks", codes, blocks, whole, dtypes=U8, convert=in_row)
            yield WeightSlice(
                f"{name}_scales",
                scales.unsqueeze(0),
                blocks,
                lead,
                dtypes=U8,
                convert=without_nan,
            )
            return
        shape = piece.out_features, piece.in_features // 2
        yield WeightSlice(f"{name}.weight_packed", codes, (rows, halves), shape, dtypes=U8)
        shape = piece.out_features, count
        index = rows, self.groups
        yield WeightSlice(f"{name}.weight_scale", scales, index, shape, dtypes=("F8_E4M3",))
        divisors, name = self.at(self.divisors, piece), f"{name}.weight_global_scale"

        def by_row(scale: Tensor) -> Tensor:
            return repeat(one_scale(scale), like=divisors)

        yield WeightSlice(name, divisors, (), (), convert=by_row)

    def unread(self, piece: Piece) -> Iterator[tuple[str, Callable[[Tensor], Any] | None]]:
        if self.scheme.is_nvidia:  # inputs stay as they are
            yield f"{piece.name}.input_global_scale", None

    def encode(self, values: Tensor, skipped: int) -> dict[str, Tensor]:
        groups = self.grouped(values)
        largest = groups.abs().amax(dim=-1, keepdim=True)
        made: dict[str, Tensor] = {}
        if self.scheme.is_nvidia:
            stored = to_e4m3((largest * DIVISOR / LARGEST).clamp(min=2.0**-9))
            scales = stored.float() / DIVISOR
            made["divisors"] = torch.full_like(values[:, :1], DIVISOR)
        else:
            # The exponent of the largest number becomes that of E2M1's largest, which is 2.
            exponents = torch.frexp(largest.clamp(min=1e-30)).exponent - 1 - 2
            stored = (exponents + BIAS).clamp(0, 254).to(torch.uint8)
            scales = torch.ldexp(torch.ones_like(largest), stored.int() - BIAS)
        made["scales"] = stored.squeeze(-1)
        numbers = (groups / scales).flatten(1)[:, skipped : skipped + self.width].contiguous()
        middles = [(a + b) / 2 for a, b in zip(ELEMENTS[:7], ELEMENTS[1:8])]
        codes = torch.bucketize(numbers.abs(), torch.tensor(middles, device=numbers.device))
        codes = (codes + 8 * (numbers < 0)).to(torch.uint8)
        made["codes"] = codes[:, ::2] | codes[:, 1::2] << 4
        return made


def without_nan(scales: Tensor) -> Tensor:
    """Return the scales of MXFP4. Raises ValueError if one stands for NaN."""
    if (scales == NAN).any():
        raise ValueError(f"has scales of {NAN}, which are NaN")
    return scales


def from_e2m1(pairs: Tensor) -> Tensor:
    """Compute the float32 numbers of bytes that hold two codes each: [..., N] -> [..., 2 N].

    Sign, exponent and mantissa of E2M1 lie side by side in float16 as well, whose exponents have a
    bias of 15 instead of 1.
    """
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).short()
    bits = (codes & 8) << 12 | (codes & 7) << 9
    return bits.view(torch.float16).float() * 2.0 ** (15 - 1)
