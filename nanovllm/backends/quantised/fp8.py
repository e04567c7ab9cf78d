"""Weights in FP8 (e4m3), alone or with inputs in FP8."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.backends.quantised.config import Fp8
from nanovllm.backends.quantised.packed import PackedWeight, Piece, covering, cut, piece_of
from nanovllm.layers.attention import one_scale
from nanovllm.layers.e4m3 import E4M3, LARGEST, to_e4m3
from nanovllm.layers.linear import empty_parameter
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice

SMALLEST = 1e-12  # a scale is made from no smaller number, so that rows of zeros have one, too
TILE = 128  # rows of the weight that a kernel may multiply at a time


class Fp8Weight(PackedWeight):
    """A weight in FP8: number = code * scale.

    Where inputs are quantised as well, the product is computed from the FP8 codes of both:

        scale_x = largest |x| of a token, or of a token and group of columns, / 448
        y = sum over columns k of (e4m3(x_k / scale_x) * scale_x) * (code_k * scale_k)

    in float32, and rounded to the dtype of x. Values beyond 448 scales become 448 scales.
    """

    def __init__(
        self, weight: Tensor, parts: Sequence[WeightSlice], scheme: Fp8, ranks: ParallelGroup
    ) -> None:
        super().__init__(weight, parts, scheme.columns, ranks)
        self.scheme = scheme
        self.codes = empty_parameter(*weight.shape, dtype=E4M3)
        self.scales = empty_parameter(*weight.shape[:-1], self.num_groups, dtype=torch.float32)
        if scheme.activations == "tensor":
            self.kept = ("input_scales",)
            self.input_scales = empty_parameter(*self.lead, len(self.starts), dtype=torch.float32)
        if scheme.rows and scheme.rows % TILE == 0:
            # Rows counted from the weight's first share scales only if each piece begins a block.
            pieces = [piece_of(part, weight) for part in parts]
            edges = [edge for piece in pieces for edge in (piece.here.start, piece.rows.start)]
            if not any(edge % scheme.rows for edge in edges):
                self.block_rows = scheme.rows
        if scheme.activations == "group":
            self.check_groups_of_inputs(parts[0].name, self.group)

    def forward(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        how = self.scheme.activations
        if how is None:
            return super().forward(x, bias, expert)
        if how == "tensor":
            scales = self.input_scales if expert is None else self.input_scales[expert]
            inputs = [rounded(x.float(), scale) for scale in scales]
        else:
            inputs = [self.quantised_inputs(x.float())] * len(self.starts)
        parts = [
            F.linear(inputs[index], self.dequantise(rows, index, expert))
            for index, rows in self.chunks
        ]
        out = torch.cat(parts, dim=-1)
        return (out if bias is None else out + bias).to(x.dtype)

    def quantised_inputs(self, x: Tensor) -> Tensor:
        """Round inputs [T, K] to what FP8 holds with scales made from the inputs: float32."""
        if self.scheme.activations == "group":
            groups = self.grouped(x)
            largest = groups.abs().amax(dim=-1, keepdim=True)
            return rounded(groups, scale_for(largest)).flatten(1)[:, : self.width]
        largest = x.abs().amax(dim=-1, keepdim=True)
        if self.is_split:
            largest = self.ranks.maximum(largest)
        return rounded(x, scale_for(largest))

    def dequantise(self, rows: slice, index: int, expert: int | None) -> Tensor:
        scales = self.spread(self.rows_of(self.scales, rows, expert))
        return from_e4m3(self.rows_of(self.codes, rows, expert)) * scales

    def packed_slices(self, piece: Piece) -> Iterator[WeightSlice]:
        scheme, name = self.scheme, piece.name
        index, shape = (piece.rows, piece.columns), piece.shape
        codes = self.at(self.codes, piece)
        yield WeightSlice(f"{name}.weight", codes, index, shape, dtypes=("F8_E4M3",))
        scales, scale_name = self.at(self.scales, piece), f"{name}.{scheme.scale_name}"
        if (scheme.rows, scheme.columns) == (0, 0):
            yield WeightSlice(scale_name, scales, (), (), convert=partial(repeat, like=scales))
        else:
            height = scheme.rows
            shape = -(-piece.out_features // height), -(-piece.in_features // self.group)
            index = covering(piece.rows, height), self.groups

            def by_row(x: Tensor) -> Tensor:
                return cut(x.repeat_interleave(height, dim=0), piece.rows, height, 0)

            yield WeightSlice(scale_name, scales, index, shape, convert=by_row)
        if scheme.activations == "tensor":
            scale, name = self.input_scale_of(piece), f"{name}.{scheme.input_scale_name}"
            yield WeightSlice(name, scale, (), (), convert=one_scale)

    def input_scale_of(self, piece: Piece) -> Tensor:
        whole = self.input_scales if piece.expert is None else self.input_scales[piece.expert]
        index = self.index_of(piece)
        return whole[index : index + 1]

    def plain_slices(self, part: WeightSlice) -> Iterator[WeightSlice]:
        yield from super().plain_slices(part)
        if self.scheme.activations == "tensor":
            # A plain weight says nothing of inputs. With a scale of 1, FP8 holds those up to 448.
            scale = self.input_scale_of(piece_of(part, self.plain))
            yield replace(part, destination=scale, convert=lambda values: torch.ones(1))

    def encode(self, values: Tensor, skipped: int) -> dict[str, Tensor]:
        groups = self.grouped(values)
        largest = groups.abs().amax(dim=-1, keepdim=True)
        if self.block_rows > 1:
            blocks = largest.split(self.block_rows)
            largest = torch.cat([block.amax(0, keepdim=True).expand_as(block) for block in blocks])
        scales = scale_for(largest)
        codes = to_e4m3(groups / scales).flatten(1)[:, skipped : skipped + self.width]
        return {"codes": codes, "scales": scales.squeeze(-1)}


def scale_for(largest: Tensor) -> Tensor:
    """Return the scales with which e4m3 just holds the largest numbers; both have one shape."""
    # On a GPU, PyTorch would multiply by the reciprocal of a Python number. That is another scale
    # in its last bit, and inputs that lie between two numbers of FP8 would become the other one.
    return largest.clamp(min=SMALLEST) / largest.new_full((), LARGEST)


def from_e4m3(codes: Tensor) -> Tensor:
    """Compute the float32 numbers of codes that are no NaN.

    Sign, exponent and mantissa of e4m3 lie side by side in float16 as well, whose exponents have a
    bias of 15 instead of 7. PyTorch's own conversion took 12 times as long on a CPU (AMD EPYC,
    PyTorch 2.13), and Triton has none for GPUs without FP8.
    """
    bits = codes.view(torch.int8).short() << 7 & ~(1 << 14)
    return bits.view(torch.float16).float() * 2.0 ** (15 - 7)


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Round x to the float32 numbers that FP8 holds with a scale. NaN stays NaN."""
    return to_e4m3(x / scale).float() * scale


def repeat(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(()).expand(like.shape)
