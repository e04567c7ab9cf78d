"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanovllm.layers.linear import Shard, empty_parameter
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice


class RMSNorm(nn.Module):
    """The norm that scales rows of x [..., N] to root mean square 1, then by a weight [N].

    It computes in float32.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        yield WeightSlice(f"{path}.weight", self.weight, (slice(None),), tuple(self.weight.shape))


def normalize(x: Tensor, eps: float) -> Tensor:
    """Scale rows of x [..., N] to root mean square 1, without a weight. Returns float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)


class WideRMSNorm(RMSNorm):
    """An RMSNorm that multiplies by its weight in float32, too. It rounds once, at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return (normalize(x, self.eps) * self.weight.float()).to(x.dtype)


class ZeroCenteredRMSNorm(RMSNorm):
    """An RMSNorm whose weight is stored as its difference from 1. It rounds once, at the end."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class ShardedRMSNorm(RMSNorm):
    """A norm over all heads of a token, which are split over the ranks: x [T, H, D].

    `shard`: this rank's part of the elements of all heads.
    """

    def __init__(self, shard: Shard, eps: float, group: ParallelGroup):
        super().__init__(shard.count, eps)
        self.shard = shard
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float().flatten(1)  # [T, H D]
        # Ranks that hold the same heads all count them, so the mean of means is the overall mean.
        mean = self.group.all_reduce(wide.square().mean(dim=-1, keepdim=True)) / self.group.size
        wide = wide * torch.rsqrt(mean + self.eps)
        return (wide.to(x.dtype) * self.weight).view(x.shape)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        shard = self.shard
        ours = (slice(shard.start, shard.start + shard.count),)
        yield WeightSlice(f"{path}.weight", self.weight, ours, (shard.total,))
