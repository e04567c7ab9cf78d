"""Linear layers, split over the ranks of a group (tensor parallelism; Shoeybi et al. 2019).

Each layer knows which rows or columns of a weight its rank holds, and which checkpoint tensors they
come from. A column-parallel layer computes a rank's shard of the outputs. A row-parallel layer
takes that shard as its inputs, and an all-reduce sums the partial results of the ranks. So a pair
of them needs one all-reduce. With one rank, each is a plain linear layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice, sibling

_parameter_device: ContextVar[str | None] = ContextVar("parameter_device", default=None)


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Make a parameter that the loader fills, on the default device.

    dtype: None means the default dtype.
    """
    values = torch.empty(shape, dtype=dtype, device=_parameter_device.get())
    return nn.Parameter(values, requires_grad=False)


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Let the parameters that are made inside the block have no memory until `give_memory`."""
    token = _parameter_device.set("meta")
    try:
        yield
    finally:
        _parameter_device.reset(token)


def give_memory(model: nn.Module) -> None:
    """Give each parameter that has no memory some on the default device, and keep its identity."""
    for parameter in model.parameters():  # yields a shared parameter once
        if parameter.is_meta:
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=False))


@dataclass(frozen=True)
class Shard:
    """A rank's part of a projection: outputs start to start + count of `total`."""

    name: str | None  # of the projection, next to the layer; None: the layer's own name
    total: int
    start: int
    count: int


def stack(shards: Sequence[Shard]) -> list[Shard]:
    """Move shards of single tensors to their places in one tensor that stacks the projections."""
    starts = list(accumulate((shard.total for shard in shards), initial=0))
    return [
        Shard(None, starts[-1], begin + shard.start, shard.count)
        for begin, shard in zip(starts, shards)
    ]


class StackedLinear(nn.Module):
    """Several projections of one input: x [T, in] -> [T, sum of the shards' outputs].

    `stacked`: the checkpoint, too, holds the projections as one tensor, under the layer's own name.
    """

    def __init__(
        self, in_features: int, shards: Sequence[Shard], bias: bool, stacked: bool = False
    ):
        super().__init__()
        self.in_features = in_features
        self.shards = stack(shards) if stacked else shards
        out_features = sum(shard.count for shard in shards)
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        row = 0
        for shard in self.shards:
            name = sibling(path, shard.name) if shard.name else path
            here = slice(row, row + shard.count)
            there = slice(shard.start, shard.start + shard.count)
            shape = (shard.total, self.in_features)
            yield WeightSlice(f"{name}.weight", self.weight[here], (there, slice(None)), shape)
            if self.bias is not None:
                yield WeightSlice(f"{name}.bias", self.bias[here], (there,), (shard.total,))
            row += shard.count


class SensitiveLinear(StackedLinear):
    """Small projections whose rounding errors weigh most, such as those to gates.

    They stay plain if the library itself quantises the weights.
    """


class ReplicatedLinear(StackedLinear):
    """One projection, whole on every rank: a router, or the gate of a shared expert."""

    is_never_quantised = True  # because it is small, and decides much

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False):
        super().__init__(in_features, [Shard(None, out_features, 0, out_features)], bias)


class MergedColumnParallelLinear(StackedLinear):
    """Projections of the same width, such as gate and up. Each rank computes a shard of each."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ParallelGroup,
        *,
        names: Sequence[str],
        bias: bool = False,
        stacked: bool = False,
    ):
        shards = []
        for name in names:
            count = group.shard(out_features, name)
            shards.append(Shard(name, out_features, group.rank * count, count))
        super().__init__(in_features, shards, bias, stacked)


class QKVParallelLinear(StackedLinear):
    """The projection to queries, keys and values: [T, in] -> [T, (H + 2G) D].

    H and G are the query heads and the key-value heads of this rank. Ranks share the heads evenly.
    Where there are more ranks than key-value heads, neighbouring ranks hold the same one.

    `projections`: those of q_proj, k_proj and v_proj that the layer has.

    `gated`: a gate for each element of a query follows the values, [T, (2H + 2G) D]. A checkpoint's
    q_proj then holds, for each head, the rows of its query and after them those of its gate.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: ParallelGroup,
        *,
        bias: bool = False,
        stacked: bool = False,
        projections: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        gated: bool = False,
    ):
        heads = group.shard(num_heads, "num_attention_heads")
        kv_heads, first_kv_head = shard_kv_heads(num_kv_heads, group)
        q = num_heads * head_dim, group.rank * heads * head_dim, heads * head_dim
        kv = num_kv_heads * head_dim, first_kv_head * head_dim, kv_heads * head_dim
        shards = [Shard("q_proj", *q), Shard("k_proj", *kv), Shard("v_proj", *kv)]
        if gated:
            ours = range(group.rank * heads, (group.rank + 1) * heads)
            queries, gates = (
                [
                    Shard("q_proj", 2 * num_heads * head_dim, start * head_dim, head_dim)
                    for start in range(2 * ours.start + part, 2 * ours.stop, 2)
                ]
                for part in (0, 1)
            )
            shards = [*queries, *shards[1:], *gates]
        shards = [shard for shard in shards if shard.name in projections]
        super().__init__(in_features, shards, bias, stacked)
        self.num_heads, self.num_kv_heads = heads, kv_heads


def shard_kv_heads(
    num_kv_heads: int, group: ParallelGroup, what: str = "num_key_value_heads"
) -> tuple[int, int]:
    """Return how many key-value heads this rank holds, and the index of the first.

    `what`: the configuration's name for the number of these heads.
    """
    if num_kv_heads >= group.size:
        count = group.shard(num_kv_heads, what)
        return count, group.rank * count
    if group.size % num_kv_heads:
        raise ValueError(
            f"{what} is {num_kv_heads}, of which tensor_parallel_size={group.size} is "
            "no multiple: choose a multiple or a divisor"
        )
    return 1, group.rank * num_kv_heads // group.size


class RowParallelLinear(nn.Module):
    """x [T, in / size], a rank's shard of the inputs -> [T, out], summed over the ranks."""

    def __init__(
        self, in_features: int, out_features: int, group: ParallelGroup, *, bias: bool = False
    ):
        super().__init__()
        self.in_features = in_features
        self.group = group
        self.weight = empty_parameter(out_features, group.shard(in_features, "in_features"))
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(F.linear(x, self.weight, self.bias_of_this_rank))

    @property
    def bias_of_this_rank(self) -> Tensor | None:
        """The bias on rank 0, None elsewhere: the sum over the ranks must count it once."""
        return self.bias if self.group.rank == 0 else None

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        out_features, count = self.weight.shape
        start = self.group.rank * count
        columns = (slice(None), slice(start, start + count))
        yield WeightSlice(f"{path}.weight", self.weight, columns, (out_features, self.in_features))
        if self.bias is not None:
            yield WeightSlice(f"{path}.bias", self.bias, (slice(None),), (out_features,))
