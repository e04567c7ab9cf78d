"""Fused linear layers whose weights are packed: kernels multiply by the codes of the weights.

`use_packed_kernels` gives a packed weight the class that multiplies by kernels, if there is one for
its format. The weights of other formats are dequantised as they are used, as in the plain layers.
The fused layers around them are the same for all formats.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.backends.cuda.triton.dispatch import MAX_ROWS
from nanovllm.backends.cuda.triton.elementwise import activate_and_mul
from nanovllm.backends.quantised.packed import PackedWeight

# The class that multiplies by kernels, for each format.
FUSED_WEIGHTS: dict[type[PackedWeight], type[PackedWeight]] = {}


def use_packed_kernels(module: nn.Module) -> None:
    """Let a packed weight multiply by the kernels for its format, if there are any."""
    if isinstance(module, PackedWeight):
        module.__class__ = FUSED_WEIGHTS.get(type(module), type(module))


class FusedQuantised:
    """A mixin that stands before the fused class of a linear layer: its weight is packed."""

    packed: Any  # {"weight": PackedWeight}, a ModuleDict
    bias: Tensor | None

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Multiply x [T, K] by the weight -> [T, N], which does not take the memory of `out`."""
        return self.packed["weight"](x, bias)

    def gated(self, x: Tensor, gelu: bool) -> Tensor:
        """Compute silu(gates) * ups, or with gelu: x [T, K] -> [T, N]. The weight is [2 N, K]."""
        return activate_and_mul(self.product(x, self.bias), gelu)

    def warmup_gated(self, gelu: bool) -> None:
        """Launch the kernels of `gated` that only steps with prompts launch."""
        weight = self.packed["weight"]
        device, dtype = weight.codes.device, weight.plain.dtype
        self.gated(torch.zeros(MAX_ROWS + 1, weight.width, dtype=dtype, device=device), gelu)
