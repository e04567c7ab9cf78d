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
from nanovllm.utils.parallel import ParallelGroup, UnfinishedSum
from nanovllm.utils.source import Source, sibling

OVERLAP_ROWS = 4096  # from here on a part's product takes longer than to launch it
OVERLAP_PARTS = 4


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
        count = group.share(total, what)
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

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)

    def sources(self, path: str) -> Iterator[Source]:
        row = 0
        for part in self.projections:
            name = sibling(path, part.name) if part.name else path
            here, there = slice(row, row + part.count), slice(part.start, part.start + part.count)
            shape = (part.total, self.in_features)
            yield Source(f"{name}.weight", self.weight[here], (there, slice(None)), shape)
            if self.bias is not None:
                yield Source(f"{name}.bias", self.bias[here], (there,), (part.total,))
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
        heads = group.share(num_heads, "num_attention_heads")
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
        count = group.share(num_kv_heads, "num_key_value_heads")
        return count, group.rank * count
    if group.size % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads is {num_kv_heads}, of which tensor_parallel_size={group.size} is no multiple: "
            "choose a multiple or a divisor"
        )
    return 1, group.rank * num_kv_heads // group.size


class RowParallelLinear(nn.Module):
    """Each rank has its share of the inputs, [T, in / size]; their results are summed: -> [T, out].

    A norm must follow, for the sum may be left to it. The result may take the memory of `spare`, which has its shape.
    """

    def __init__(self, in_features: int, out_features: int, group: ParallelGroup, *, bias: bool = False):
        super().__init__()
        self.in_features = in_features
        self.group = group
        self.weight = empty_parameter(out_features, group.share(in_features, "in_features"))
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor, spare: Tensor | None = None) -> Tensor | UnfinishedSum:
        bias = self.bias if self.group.rank == 0 else None  # the sum must count it once
        if self.group.size > 1 and x.shape[0] >= OVERLAP_ROWS:
            return self._forward_in_parts(x, bias)
        return self.group.sum_in_norm(kernels.linear(x, self.weight, bias, spare))

    def _forward_in_parts(self, x: Tensor, bias: Tensor | None) -> UnfinishedSum:
        """Sum one part's results over the ranks while the next part's are computed, or the one before is normed."""
        share, total = self.group.sum_buffers(x.shape[0], self.weight.shape[0], x)
        parts = []
        for part, mine, summed in zip(*(tensor.chunk(OVERLAP_PARTS) for tensor in (x, share, total))):
            torch.mm(part, self.weight.t(), out=mine)
            if bias is not None:
                mine += bias
            parts.append((summed, self.group.begin_sum(mine, summed)))
        return UnfinishedSum(total, parts=parts)

    def sources(self, path: str) -> Iterator[Source]:
        out_features, count = self.weight.shape
        start = self.group.rank * count
        columns = (slice(None), slice(start, start + count))
        yield Source(f"{path}.weight", self.weight, columns, (out_features, self.in_features))
        if self.bias is not None:
            yield Source(f"{path}.bias", self.bias, (slice(None),), (out_features,))
