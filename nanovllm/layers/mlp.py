"""The gated MLP of a transformer layer (SwiGLU and GeGLU; Shazeer 2020)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.parallel import ParallelGroup


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU by its approximation with tanh (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


# The keys are the names that configurations use.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu_pytorch_tanh": gelu_tanh,
}


class GatedMLP(nn.Module):
    """The gated MLP down(activation(gate(x)) * up(x)): [T, hidden] -> [T, hidden]."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        group: ParallelGroup,
        *,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] = F.silu,
        stacked: bool = False,  # the checkpoint has gate and up as one tensor, gate_up_proj
        names: tuple[str, str] = ("gate_proj", "up_proj"),  # that the checkpoint has for them
    ):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, intermediate_size, group, names=names, bias=bias, stacked=stacked
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up)
