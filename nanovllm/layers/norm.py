"""Root-mean-square normalisation, alone or fused with the residual addition, and the sum over ranks, before it."""

from collections.abc import Iterator

from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.layers.linear import empty_parameter
from nanovllm.distributed.collectives import RowParts, UnfinishedSum
from nanovllm.weights.weight_slice import WeightSlice


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size)

    def forward(
        self, x: Tensor | UnfinishedSum, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor | RowParts, Tensor]:
        """norm(x); or, with a residual, (norm(residual + x), residual + x), which may overwrite both.

        Of a sum in parts, each part is normed and added to the residual when its turn comes.
        """
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.eps)
        if isinstance(x, UnfinishedSum):
            return self._finish(x, residual)
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def _finish(self, total: UnfinishedSum, residual: Tensor) -> tuple[Tensor | RowParts, Tensor]:
        if total.shared is not None:
            return kernels.sum_add_rms_norm(total.x, residual, self.weight, self.eps, total.shared)
        sizes = [len(part) for part, _ in total.parts]

        def parts() -> Iterator[Tensor]:
            for (part, work), rest in zip(total.parts, residual.split(sizes)):
                work.wait()
                normed, added = kernels.add_rms_norm(part, rest, self.weight, self.eps)
                rest.copy_(added)  # which is nothing where it was overwritten
                yield normed

        return RowParts(sizes, parts()), residual

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        yield WeightSlice(f"{path}.weight", self.weight, (slice(None),), tuple(self.weight.shape))
