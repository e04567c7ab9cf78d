"""Linear layers, split over the ranks of a group.

Knows which rows or columns of a weight a rank holds, and the checkpoint tensors they come from. A column-parallel layer
makes a rank's share of the outputs; a row-parallel one takes that share as its inputs and sums the ranks' results, so
the pair needs one all-reduce. At size 1 each is a plain linear layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.distributed.collectives import RowParts, UnfinishedSum
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice, sibling

# With so many rows and several ranks, what lies between one attention and the next goes in parts of about PART_ROWS: while
# the ranks sum one part's results, the next part's are computed. More and smaller parts take the host longer to launch.
OVERLAP_ROWS = 4096
PART_ROWS = 6144


def empty_parameter(*shape: int) -> nn.Parameter:
    """Uninitialised, in the default dtype on the default device: the loader fills every element."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def lay_out_for_cpu(model: nn.Module) -> None:
    """Keep every matrix [N, K] transposed in memory: a CPU then multiplies a few rows by it 1.3 to 2 times as fast."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.t().contiguous().t()


@dataclass(frozen=True)
class Rows:
    """A rank's part of one projection: rows [start, start + count) of the checkpoint's `total`."""

    name: str | None  # the projection's name next to the layer; None: the layer's own
    total: int
    start: int
    count: int

    @classmethod
    def share(cls, name: str | None, total: int, group: ParallelGroup, what: str) -> "Rows":
        count = group.shard(total, what)
        return cls(name, total, group.rank * count, count)


class StackedLinear(nn.Module):
    """Projections of one input, stacked into one product: x [T, in] -> [T, sum of the projections' rows]."""

    def __init__(self, in_features: int, projections: Sequence[Rows], bias: bool):
        super().__init__()
        self.in_features = in_features
        self.projections = projections
        rows = sum(projection.count for projection in projections)
        self.weight = empty_parameter(rows, in_features)
        self.bias = empty_parameter(rows) if bias else None

    def forward(self, x: Tensor | RowParts) -> Tensor:
        if isinstance(x, Tensor):
            return kernels.linear(x, self.weight, self.bias)
        out = self.weight.new_empty(sum(x.sizes), self.weight.shape[0])
        for part, its_out in zip(x.parts, out.split(x.sizes)):
            _multiply_into(its_out, part, self.weight, self.bias)
        return out

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        row = 0
        for part in self.projections:
            name = sibling(path, part.name) if part.name else path
            here, there = slice(row, row + part.count), slice(part.start, part.start + part.count)
            shape = (part.total, self.in_features)
            yield WeightSlice(f"{name}.weight", self.weight[here], (there, slice(None)), shape)
            if self.bias is not None:
                yield WeightSlice(f"{name}.bias", self.bias[here], (there,), (part.total,))
            row += part.count


class ColumnParallelLinear(StackedLinear):
    """One projection; each rank makes its share of the outputs."""

    def __init__(self, in_features: int, out_features: int, group: ParallelGroup, *, bias: bool = False):
        super().__init__(in_features, [Rows.share(None, out_features, group, "out_features")], bias)


class MergedColumnParallelLinear(StackedLinear):
    """Several projections of the same width, such as gate and up; each rank makes its share of each."""

    def __init__(
        self, in_features: int, out_features: int, group: ParallelGroup, *, names: Sequence[str], bias: bool = False
    ):
        super().__init__(in_features, [Rows.share(name, out_features, group, name) for name in names], bias)


class QKVParallelLinear(StackedLinear):
    """Queries, keys and values: [T, in] -> [T, (H + 2G) D] with this rank's H query and G key-value heads.

    Ranks share the heads evenly. When there are more ranks than key-value heads, neighbouring ranks hold the same one.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: ParallelGroup,
        *,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        bias: bool = False,
    ):
        heads = group.shard(num_heads, "num_attention_heads")
        kv_heads, first_kv_head = kv_share(num_kv_heads, group)
        q, *kv = names
        parts = [(q, num_heads, group.rank * heads, heads)]
        parts += [(name, num_kv_heads, first_kv_head, kv_heads) for name in kv]
        rows = [Rows(name, *(heads * head_dim for heads in counts)) for name, *counts in parts]
        super().__init__(in_features, rows, bias)
        self.num_heads, self.num_kv_heads = heads, kv_heads


def kv_share(num_kv_heads: int, group: ParallelGroup) -> tuple[int, int]:
    """How many key-value heads this rank has, and the first of them."""
    if num_kv_heads >= group.size:
        count = group.shard(num_kv_heads, "num_key_value_heads")
        return count, group.rank * count
    if group.size % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads is {num_kv_heads}, of which tensor_parallel_size={group.size} is no multiple: "
            "choose a multiple or a divisor"
        )
    return 1, group.rank * num_kv_heads // group.size


def _multiply_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class RowParallelLinear(nn.Module):
    """Each rank has its share of the inputs, [T, in / size]; their results are summed: -> [T, out].

    A norm must follow, for the sum may be left to it. Where `x` is whole, the result may take the memory of `spare`, which
    then is whole too, and of its shape.
    """

    def __init__(self, in_features: int, out_features: int, group: ParallelGroup, *, bias: bool = False):
        super().__init__()
        self.in_features = in_features
        self.group = group
        self.weight = empty_parameter(out_features, group.shard(in_features, "in_features"))
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor | RowParts, spare: Tensor | RowParts | None = None) -> Tensor | UnfinishedSum:
        bias = self.bias if self.group.rank == 0 else None  # the sum must count it once
        if isinstance(x, Tensor):
            if self.group.size == 1:
                return kernels.linear(x, self.weight, bias, spare)
            if x.shape[0] < OVERLAP_ROWS:
                return self.group.sum_in_norm(kernels.linear(x, self.weight, bias, spare))
            x = RowParts.split(x, PART_ROWS)
        share, total = self.group.sum_buffers(sum(x.sizes), self.weight.shape[0], self.weight)
        sums = []
        for part, mine, summed in zip(x.parts, share.split(x.sizes), total.split(x.sizes)):
            _multiply_into(mine, part, self.weight, bias)
            sums.append((summed, self.group.begin_sum(mine, summed)))
        return UnfinishedSum(parts=sums)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        out_features, count = self.weight.shape
        start = self.group.rank * count
        columns = (slice(None), slice(start, start + count))
        yield WeightSlice(f"{path}.weight", self.weight, columns, (out_features, self.in_features))
        if self.bias is not None:
            yield WeightSlice(f"{path}.bias", self.bias, (slice(None),), (out_features,))
