"""The gated activation of SwiGLU."""

from torch import Tensor, nn

from nanovllm import kernels


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """[T, 2F] -> [T, F]: SiLU of the gate, the first half, times the second."""
        return kernels.silu_and_mul(x)
