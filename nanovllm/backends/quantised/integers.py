"""Weights in integers of 4 or 8 bits: those of GPTQ, AWQ and compressed-tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.backends.quantised.config import Integers
from nanovllm.backends.quantised.packed import (
    PackedWeight,
    Piece,
    covering,
    cut,
    pack,
    piece_of,
    unpack,
)
from nanovllm.layers.linear import empty_parameter
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the codes in a word of AWQ, from its lowest bits on
INT32 = ("I32",)


class IntegerWeight(PackedWeight):
    """A weight in integers: number = (code - zero) * scale.

    The codes are from 0 to 2^bits - 1, and neighbours in a row share an int32: the first is in its
    lowest bits. Without zero points, zero is 2^(bits - 1). The layouts of all checkpoints are
    converted to this one.
    """

    def __init__(
        self, weight: Tensor, parts: Sequence[WeightSlice], scheme: Integers, ranks: ParallelGroup
    ) -> None:
        super().__init__(weight, parts, scheme.group, ranks)
        self.scheme = scheme
        self.per_word = 32 // scheme.bits
        if self.columns.start % self.per_word or (self.is_split and self.width % self.per_word):
            raise ValueError(
                f"{parts[0].name} has {self.in_features} columns, of which each of {ranks.size} "
                f"ranks takes {self.width}, but {self.per_word} columns share a word: choose a "
                f"tensor_parallel_size that leaves each rank a multiple of {self.per_word}"
            )
        rows = weight.shape[:-1]
        if scheme.has_g_idx:  # then a rank's columns may belong to any group
            self.groups = slice(0, -(-self.in_features // self.group))
            self.num_groups = self.groups.stop
            pieces = len(self.starts)
            self.g_idx = empty_parameter(*self.lead, pieces, self.width, dtype=torch.int32)
        self.codes = empty_parameter(*rows, -(-self.width // self.per_word), dtype=torch.int32)
        self.scales = empty_parameter(*rows, self.num_groups)
        if scheme.has_zeros:
            self.zeros = empty_parameter(*rows, self.num_groups, dtype=torch.uint8)
            self.made = (*self.made, "zeros")

    def dequantise(self, rows: slice, index: int, expert: int | None) -> Tensor:
        of = partial(self.rows_of, rows=rows, expert=expert)
        spread = self.spread
        if self.scheme.has_g_idx:
            g_idx = (self.g_idx if expert is None else self.g_idx[expert])[index]

            def spread(x: Tensor) -> Tensor:
                return x[:, g_idx]

        bits, scales = self.scheme.bits, spread(of(self.scales))
        codes = unpack(of(self.codes), bits)[:, : self.width].to(scales.dtype)
        zeros = spread(of(self.zeros)) if self.scheme.has_zeros else 2 ** (bits - 1)
        return (codes - zeros) * scales

    def packed_slices(self, piece: Piece) -> Iterator[WeightSlice]:
        slices = {
            "gptq": self.gptq_slices,
            "awq": self.awq_slices,
            "compressed-tensors": self.compressed_slices,
        }
        return slices[self.scheme.layout](piece)

    def gptq_slices(self, piece: Piece) -> Iterator[WeightSlice]:
        """Yield slices of tensors whose rows are inputs, packed along the inputs."""
        codes, words = self.at(self.codes, piece).mT, covering(piece.columns, self.per_word)
        shape = -(-piece.in_features // self.per_word), piece.out_features
        yield WeightSlice(f"{piece.name}.qweight", codes, (words, piece.rows), shape, dtypes=INT32)
        yield from self.grouped_slices(piece, less=int(self.scheme.zeros_less_one))
        if self.scheme.has_g_idx:
            yield self.g_idx_slice(f"{piece.name}.g_idx", piece)

    def awq_slices(self, piece: Piece) -> Iterator[WeightSlice]:
        """Yield slices of tensors whose rows are inputs, packed along the outputs."""

        def by_row(words: Tensor) -> Tensor:
            codes = cut(unpack(words, 4, AWQ_ORDER), piece.rows, self.per_word, 1)
            return pack(codes.T, 4)

        index = piece.columns, covering(piece.rows, self.per_word)
        shape = piece.in_features, -(-piece.out_features // self.per_word)
        codes = self.at(self.codes, piece)
        name = f"{piece.name}.qweight"
        yield WeightSlice(name, codes, index, shape, dtypes=INT32, convert=by_row)
        yield from self.grouped_slices(piece, order=AWQ_ORDER)

    def grouped_slices(
        self, piece: Piece, *, less: int = 0, order: Sequence[int] = ()
    ) -> Iterator[WeightSlice]:
        """Yield slices of scales and zero points whose rows are groups."""
        bits = self.scheme.bits

        def by_group(words: Tensor) -> Tensor:
            zeros = cut(unpack(words, bits, order), piece.rows, self.per_word, 1)
            return zeros + less & 2**bits - 1  # of 4 bits, one more than 15 is 0

        count = -(-piece.in_features // self.group)
        scales = self.at(self.scales, piece).mT
        shape = count, piece.out_features
        yield WeightSlice(f"{piece.name}.scales", scales, (self.groups, piece.rows), shape)
        zeros = self.at(self.zeros, piece).mT
        index = self.groups, covering(piece.rows, self.per_word)
        shape = count, -(-piece.out_features // self.per_word)
        name = f"{piece.name}.qzeros"
        yield WeightSlice(name, zeros, index, shape, dtypes=INT32, convert=by_group)

    def compressed_slices(self, piece: Piece) -> Iterator[WeightSlice]:
        """Yield slices of tensors whose rows are outputs, packed along the inputs."""
        scheme, name, rows = self.scheme, piece.name, piece.rows
        count = -(-piece.in_features // self.group)
        codes, words = self.at(self.codes, piece), covering(piece.columns, self.per_word)
        shape = piece.out_features, -(-piece.in_features // self.per_word)
        yield WeightSlice(f"{name}.weight_packed", codes, (rows, words), shape, dtypes=INT32)
        scales, shape = self.at(self.scales, piece), (piece.out_features, count)
        yield WeightSlice(f"{name}.weight_scale", scales, (rows, self.groups), shape)
        if scheme.has_zeros:  # packed along the outputs

            def by_row(words: Tensor) -> Tensor:
                return cut(unpack(words.mT, scheme.bits), rows, self.per_word, 1).mT

            shape = -(-piece.out_features // self.per_word), count
            yield WeightSlice(
                f"{name}.weight_zero_point",
                self.at(self.zeros, piece),
                (covering(rows, self.per_word), self.groups),
                shape,
                dtypes=INT32,
                convert=by_row,
            )
        if scheme.has_g_idx:
            yield self.g_idx_slice(f"{name}.weight_g_idx", piece)

    def g_idx_slice(self, name: str, piece: Piece) -> WeightSlice:
        """Return the slice of the tensor that says which group each column belongs to."""
        count = self.groups.stop

        def checked(g_idx: Tensor) -> Tensor:
            if not ((g_idx >= 0) & (g_idx < count)).all():
                raise ValueError(f"must hold numbers of groups, from 0 to {count - 1}")
            return g_idx

        g_idx = self.g_idx_of(piece)
        shape = (piece.in_features,)
        return WeightSlice(name, g_idx, (piece.columns,), shape, dtypes=INT32, convert=checked)

    def g_idx_of(self, piece: Piece) -> Tensor:
        whole = self.g_idx if piece.expert is None else self.g_idx[piece.expert]
        return whole[self.index_of(piece)]

    def unread(self, piece: Piece) -> Iterator[tuple[str, Callable[[Tensor], Any] | None]]:
        if self.scheme.layout == "gptq" and not self.scheme.has_g_idx:
            yield f"{piece.name}.g_idx", self.check_g_idx
        if self.scheme.layout == "gptq":  # AutoGPTQ gives layers without a bias one of zeros
            yield f"{piece.name}.bias", check_zeros
        if self.scheme.layout == "compressed-tensors":
            yield f"{piece.name}.weight_shape", lambda shape: check_shape(shape, piece.shape)

    def check_g_idx(self, g_idx: Tensor) -> None:
        """Raise ValueError unless the groups consist of neighbouring columns."""
        if not torch.equal(g_idx.cpu().long(), torch.arange(self.in_features) // self.group):
            raise ValueError(
                "says another order of groups than desc_act false means, which is neighbouring "
                f"columns in groups of {self.group}"
            )

    def plain_slices(self, part: WeightSlice) -> Iterator[WeightSlice]:
        yield from super().plain_slices(part)
        if self.scheme.has_g_idx:
            piece = piece_of(part, self.plain)
            columns = torch.arange(piece.columns.start, piece.columns.stop)
            yield replace(
                part,
                destination=self.g_idx_of(piece),
                convert=lambda values: columns // self.group,
            )

    def encode(self, values: Tensor, skipped: int) -> dict[str, Tensor]:
        bits, groups = self.scheme.bits, self.grouped(values)
        half, most = 2 ** (bits - 1), 2**bits - 1
        if self.scheme.has_zeros:
            low = groups.amin(dim=-1, keepdim=True).clamp(max=0)
            high = groups.amax(dim=-1, keepdim=True).clamp(min=0)
            scales = (high - low).clamp(min=1e-8) / most
            zeros = (-low / scales).round()
        else:
            scales = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / (most / 2)
            zeros = torch.full_like(scales, half)
        codes = (groups / scales + zeros).round().clamp(0, most).flatten(1)
        return {
            "codes": pack(codes[:, skipped : skipped + self.width], bits),
            "scales": scales.squeeze(-1),
            "zeros": zeros.squeeze(-1),
        }


def check_zeros(bias: Tensor) -> None:
    """Raise ValueError unless a bias of a layer that has none is zero."""
    if bias.float().count_nonzero():
        raise ValueError("is not zero, but by config.json the layer has no bias")


def check_shape(found: Tensor, shape: tuple[int, int]) -> None:
    """Raise ValueError unless a tensor holds the shape of the weight."""
    if found.tolist() != [*shape]:
        raise ValueError(f"is {found.tolist()}, but by config.json it is {[*shape]}")
