"""Root-mean-square normalisation, alone or fused with the residual addition before it."""

from collections.abc import Iterator

from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.layers.linear import empty_parameter
from nanovllm.utils.source import Source


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x); or, with a residual, (norm(residual + x), residual + x), which may overwrite both."""
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.eps)
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def sources(self, path: str) -> Iterator[Source]:
        yield Source(f"{path}.weight", self.weight, (slice(None),), tuple(self.weight.shape))
