"""The gated activation of SwiGLU, together with the product it follows: on a GPU both are one kernel."""

from torch import Tensor

from nanovllm import kernels
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.distributed.collectives import RowParts


class SiluGatedLinear(MergedColumnParallelLinear):
    """Two projections, gate and up: x [T, in] -> silu(gate(x)) * up(x) [T, out]."""

    def forward(self, x: Tensor | RowParts) -> Tensor | RowParts:
        if isinstance(x, RowParts):
            return RowParts(x.sizes, map(self.forward, x.parts))
        return kernels.gated_linear(x, self.weight, self.bias)
