"""A weight in few bits: a code for each number, and a scale for each row and group of columns.

All formats are held in this form. Where a checkpoint has one scale for a block of rows, each row
keeps a copy of it. So a scale belongs to its row however rows are merged or shared out to ranks.
Where ranks split the columns, a rank holds the scales of all groups that its share touches.

The weight is dequantised as it is used, some rows at a time. This plain form runs on any device,
and it is the reference for every faster form.

Shapes: [N, K] is a weight of N outputs and K inputs, [E, N, K] one for each of E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice

# Numbers that are dequantised at a time. On a CPU they stay in its cache. A GPU takes more, because
# each part costs it launches.
CHUNK = 2**20
CHUNK_ON_GPU = 2**25
# Numbers that are quantised at a time on a GPU. Meanwhile each takes 17 bytes (FP8 by rows) to 36
# (MXFP4), counted on a CPU. There several threads quantise, so each takes CHUNK.
QUANTISED_ON_GPU = 2**23


@dataclass(frozen=True)
class Piece:
    """The part of a weight that one projection of a checkpoint fills: some rows, all columns."""

    name: str  # of the projection's module in the checkpoint
    expert: int | None
    here: slice  # the rows in the weight
    rows: slice  # the rows in the checkpoint
    columns: slice  # the columns in the checkpoint
    shape: tuple[int, int]  # of the checkpoint's weight, [out, in]
    # How many experts a checkpoint's tensor stacks, each transposed; None: it has one weight.
    experts: int | None

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]


def piece_of(part: WeightSlice, weight: Tensor) -> Piece:
    """Describe the part of a plain `weight` that a slice of the plain layer fills."""
    height, width = weight.shape[-2:]
    row = part.destination.storage_offset() // width
    expert = row // height if weight.dim() == 3 else None
    if len(part.index) == 3:
        _, columns, rows = part.index
        experts, in_features, out_features = part.shape
        count = part.destination.shape[2]
    else:
        rows, columns = part.index
        out_features, in_features = part.shape
        experts, count = None, part.destination.shape[0]
    return Piece(
        name=part.name.removesuffix(".weight"),
        expert=expert,
        here=slice(row % height, row % height + count),
        rows=slice(*rows.indices(out_features)),
        columns=slice(*columns.indices(in_features)),
        shape=(out_features, in_features),
        experts=experts,
    )


class PackedWeight(nn.Module):
    """The base of all formats.

    A format makes its parameters. Those that the checkpoint or `encode` fills belong to rows:
    [..., N, any width].
    """

    codes: nn.Parameter
    scales: nn.Parameter
    made: tuple[str, ...] = ("codes", "scales")  # parameters that `encode` makes of a plain weight
    kept: tuple[str, ...] = ()  # parameters that an update by plain weights leaves as they are
    block_rows = 1  # rows, counted from the first, that share their scales; kernels rely on it
    # Whether a token's results must not depend on the number of tokens (batch_invariant). Then no
    # kernel is chosen that cannot promise this, and the codes are not put into its order.
    is_invariant = False

    def __init__(
        self, weight: Tensor, parts: Sequence[WeightSlice], group: int, ranks: ParallelGroup
    ) -> None:
        """Prepare to take the place of a plain layer's weight.

        weight: The plain weight; it needs no memory.
        parts: The slices by which the plain layer fills it.
        group: How many columns share a scale; 0: all of a row.
        ranks: The ranks that may share the columns.
        """
        super().__init__()
        self.plain = weight
        *self.lead, self.height, self.width = weight.shape  # [E], N, K; without experts [], N, K
        pieces = [piece_of(part, weight) for part in parts]
        self.columns, self.in_features = pieces[0].columns, pieces[0].in_features
        self.is_split = self.width < self.in_features
        self.ranks = ranks
        self.group = group or self.in_features
        # The groups that this rank's columns touch.
        self.groups = covering(self.columns, self.group)
        self.num_groups = self.groups.stop - self.groups.start
        self.starts = sorted({piece.here.start for piece in pieces})  # the first row of each piece

    @property
    def begins_inside_group(self) -> bool:
        """True if this rank's share has several groups and begins inside one, not at its edge."""
        return self.num_groups > 1 and self.columns.start % self.group > 0

    def copy_parameters(self, source: nn.Module) -> None:
        """Copy the parameters of another packed weight of the same format and sizes."""
        for name, parameter in source.named_parameters(recurse=False):
            self.get_parameter(name).copy_(parameter)

    def check_groups_of_inputs(self, name: str, group: int) -> None:
        """Raise ValueError if ranks split the columns inside a group of quantised inputs."""
        begin, end = self.columns.start, self.columns.stop
        if self.is_split and (begin % group or (end % group and end < self.in_features)):
            raise ValueError(
                f"{name} has {self.in_features} columns, of which each of {self.ranks.size} ranks "
                f"takes {end - begin}, but inputs are quantised in groups of {group}: choose a "
                "tensor_parallel_size that splits no group"
            )

    @property
    def chunks(self) -> list[tuple[int, slice]]:
        """The rows to dequantise at a time, each with the index of the piece that they lie in."""
        step = max(1, (CHUNK_ON_GPU if self.codes.is_cuda else CHUNK) // self.width)
        ends = [*self.starts[1:], self.height]
        return [
            (index, slice(row, min(row + step, end)))
            for index, (begin, end) in enumerate(zip(self.starts, ends))
            for row in range(begin, end, step)
        ]

    def index_of(self, piece: Piece) -> int:
        """Return the index of a piece among those of its expert."""
        return self.starts.index(piece.here.start)

    def at(self, parameter: Tensor, piece: Piece) -> Tensor:
        """Return the rows of a parameter that belong to a piece."""
        return self.rows_of(parameter, piece.here, piece.expert)

    def rows_of(self, parameter: Tensor, rows: slice, expert: int | None) -> Tensor:
        """Return rows of a parameter, or of an expert's part of it."""
        return (parameter if expert is None else parameter[expert])[rows]

    def spread(self, x: Tensor) -> Tensor:
        """Give each column the value of its group: [..., groups] -> [..., K].

        A single group stays [..., 1], which PyTorch broadcasts.
        """
        if self.num_groups == 1:
            return x
        skipped = self.columns.start - self.groups.start * self.group
        return x.repeat_interleave(self.group, dim=-1)[..., skipped : skipped + self.width]

    def forward(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        """Multiply inputs [T, K] by the weight, or by that of an expert: -> [T, N]."""
        parts = [
            F.linear(x, self.dequantise(rows, index, expert).to(x.dtype))
            for index, rows in self.chunks
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return out if bias is None else out + bias

    def dequantise(self, rows: slice, index: int, expert: int | None) -> Tensor:
        """Compute rows of the weight, which lie within the piece of this index: [rows, K]."""
        raise NotImplementedError

    def packed_slices(self, piece: Piece) -> Iterator[WeightSlice]:
        """Yield how a checkpoint of this format fills a piece."""
        raise NotImplementedError

    def unread(self, piece: Piece) -> Iterator[tuple[str, Callable[[Tensor], Any] | None]]:
        """Yield the tensors that a checkpoint may have for a piece and that fill no parameter.

        Each comes with a check of its values, which raises ValueError; None: any values will do.
        """
        return iter(())

    def plain_slices(self, part: WeightSlice) -> Iterator[WeightSlice]:
        """Yield slices that quantise the tensor of a plain weight and fill a part with it.

        All groups that this rank's columns touch are quantised whole. So scales do not depend on
        the number of ranks. Each parameter of `made` has a slice, which quantises by itself.
        """
        piece = piece_of(part, self.plain)
        end = min(self.groups.stop * self.group, self.in_features)
        columns = slice(self.groups.start * self.group, end)
        skipped = self.columns.start - columns.start

        def convert(name: str, values: Tensor) -> Tensor:
            if piece.experts is not None:
                values = values[0].mT
            most = QUANTISED_ON_GPU if values.is_cuda else CHUNK
            rows = max(1, most // values.shape[1])
            rows += -rows % self.block_rows
            parts = [self.encode(part.float(), skipped)[name] for part in values.split(rows)]
            return torch.cat(parts)

        for name in self.made:
            index: tuple[slice, ...] = piece.rows, columns
            if piece.experts is not None:
                index = part.index[0], columns, piece.rows
            destination = self.at(self.get_parameter(name), piece)
            yield WeightSlice(
                part.name, destination, index, part.shape, convert=partial(convert, name)
            )

    def encode(self, values: Tensor, skipped: int) -> dict[str, Tensor]:
        """Quantise rows of a weight in float32, whose columns are whole groups.

        Returns the rows of each parameter; of the codes, those of K columns after `skipped`.
        """
        raise NotImplementedError

    def grouped(self, values: Tensor) -> Tensor:
        """Split rows into groups: [rows, columns] -> [rows, groups, columns of a group].

        A last group that is short is filled up with zeros.
        """
        missing = -values.shape[1] % self.group
        return F.pad(values, (0, missing)).unflatten(1, (-1, self.group))


def covering(part: slice, unit: int) -> slice:
    """Return the units of `unit` elements that hold the elements of a slice."""
    return slice(part.start // unit, -(-part.stop // unit))


def cut(x: Tensor, part: slice, unit: int, dim: int) -> Tensor:
    """Return the elements of `part`, where x begins with the first unit that holds some of them."""
    return x.narrow(dim, part.start % unit, part.stop - part.start)


def unpack(words: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Take integers of 4 or 8 bits out of int32 words: [..., W] -> [..., W * 32 / bits], uint8.

    order: which integer lies in the lowest bits of a word, which in the next; empty: in order.
    """
    integers = words.contiguous().view(torch.uint8)  # the lowest bits first
    if bits == 4:
        integers = torch.stack((integers & 15, integers >> 4), dim=-1).flatten(-2)
    if order:
        places = torch.tensor(order, device=words.device).argsort()
        integers = integers.unflatten(-1, (-1, len(order)))[..., places].flatten(-2)
    return integers


def pack(integers: Tensor, bits: int) -> Tensor:
    """Put integers into int32 words, the first into the lowest bits. The last word may be short."""
    count = 32 // bits
    whole = F.pad(integers.long(), (0, -integers.shape[-1] % count)).unflatten(-1, (-1, count))
    shifts = torch.arange(0, 32, bits, device=integers.device)
    return (whole << shifts).sum(dim=-1).to(torch.int32)
