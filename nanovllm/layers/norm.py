"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanovllm.layers.linear import empty_parameter
from nanovllm.weights.weight_slice import WeightSlice


class RMSNorm(nn.Module):
    """Scale each row of x [..., N] to root mean square 1, then by a weight [N].

    Computed in float32.
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
