"""Fused linear layers whose weights are packed: kernels multiply by the codes of the weights.

`use_packed_kernels` gives a packed weight the class that multiplies by kernels, if there is one for
its format. The weights of other formats are dequantised as they are used, as in the plain layers.
The fused layers around them are the same for all formats.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.backends.cuda.fused_fp4 import FusedFp4Weight
from nanovllm.backends.cuda.fused_fp8 import FusedFp8Weight
from nanovllm.backends.cuda.fused_integers import FusedIntegerWeight
from nanovllm.backends.cuda.fused_weight import FusedWeight
from nanovllm.backends.cuda.triton.dispatch import MAX_ROWS
from nanovllm.backends.cuda.triton.elementwise import activate_and_mul
from nanovllm.backends.cuda.triton.fp8_inputs import Fp8Matrix
from nanovllm.backends.cuda.triton.moe_packed import PackedExperts
from nanovllm.backends.cuda.triton.unnormed import Stream
from nanovllm.backends.quantised.fp4 import Fp4Weight
from nanovllm.backends.quantised.fp8 import Fp8Weight
from nanovllm.backends.quantised.integers import IntegerWeight
from nanovllm.backends.quantised.packed import PackedWeight

# The class that multiplies by kernels, for each format.
FUSED_WEIGHTS: dict[type[PackedWeight], type[FusedWeight]] = {
    Fp4Weight: FusedFp4Weight,
    Fp8Weight: FusedFp8Weight,
    IntegerWeight: FusedIntegerWeight,
}


def use_packed_kernels(module: nn.Module, is_invariant: bool = False) -> None:
    """Let a packed weight multiply by the kernels for its format, if there are any.

    is_invariant: whether a row's results must not depend on the number of rows.
    """
    if isinstance(module, PackedWeight):
        module.is_invariant = is_invariant
    fused: Any = FUSED_WEIGHTS.get(type(module))  # type: ignore[arg-type]
    if fused is not None and (not hasattr(fused, "suits") or fused.suits(module)):
        module.__class__ = fused


def fused_weights(model: nn.Module) -> list[FusedWeight]:
    """Return the model's packed weights that multiply by kernels."""
    return [module for module in model.modules() if isinstance(module, FusedWeight)]


# The steps in the life of all fused weights of a model: see FusedWeight.


def await_weights(model: nn.Module) -> None:
    for weight in fused_weights(model):
        weight.await_weights()


def arrange_weights(model: nn.Module) -> None:
    for weight in fused_weights(model):
        weight.arrange()


def restore_weights(model: nn.Module) -> None:
    for weight in fused_weights(model):
        weight.restore()


def drop_copies(model: nn.Module) -> None:
    for weight in fused_weights(model):
        weight.drop()


def matrix_of(reader: Any, x: Tensor | None) -> Fp8Matrix | None:
    """Return the FP8 matrix by which the layer `reader` multiplies its inputs x [T, K].

    None: the layer has no such matrix, or takes inputs as they are. Otherwise the inputs may be
    quantised for the matrix before the layer gets them.

    x: the inputs; None: they are yet to be computed, as dense rows.
    """
    if isinstance(reader, FusedQuantised):
        weight = reader.packed["weight"]
        if isinstance(weight, FusedFp8Weight):
            return weight.matrix_for(x)
    return None


def joins(projection: Any, x: Any, residual: Tensor, reader: Any) -> bool:
    """Tell whether two products of one row can do the work of the kernel between them.

    If so, projection.add(x, residual) adds to the residual stream [1, N], and the product of
    `reader` norms it.
    """
    if len(residual) != 1 or projection.group.size > 1 or projection.multiplier is not None:
        return False
    if not (isinstance(projection, FusedQuantised) and isinstance(reader, FusedQuantised)):
        return False
    first, second = projection.packed["weight"], reader.packed["weight"]
    is_fused = isinstance(first, FusedWeight) and isinstance(second, FusedWeight)
    return is_fused and first.can_add(x) and second.can_norm(residual)


class FusedQuantised:
    """A mixin that stands before the fused class of a linear layer: its weight is packed."""

    packed: Any  # {"weight": PackedWeight}, a ModuleDict
    bias: Tensor | None

    def product(self, x: Any, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Multiply x [T, K] by the weight -> [T, N], which does not take the memory of `out`."""
        return self.packed["weight"](x, bias)

    def add(self, x: Tensor, residual: Tensor) -> Stream:
        """Multiply one row x [1, K] by the weight, and add the result to a residual stream."""
        layer: Any = self  # a RowParallelLinear
        return self.packed["weight"].add(x, layer.bias_of_this_rank, residual)

    def gated(self, x: Any, gelu: bool, reader: nn.Module | None = None) -> Any:
        """Compute silu(gates) * ups, or with gelu: x [T, K] -> [T, N]. The weight is [2 N, K].

        reader: the layer that takes the result, which may be quantised for it.
        """
        weight = self.packed["weight"]
        if isinstance(weight, FusedFp8Weight):
            return weight.gated(x, self.bias, gelu, matrix_of(reader, None))
        if isinstance(weight, FusedIntegerWeight):
            return weight.gated(x, self.bias, gelu)
        return activate_and_mul(self.product(x, self.bias), gelu)

    def warmup_gated(self, gelu: bool, reader: nn.Module | None) -> None:
        """Launch the kernels of `gated` that only steps with prompts launch."""
        weight = self.packed["weight"]
        if isinstance(weight, FusedIntegerWeight):
            return weight.warmup_gated(self.bias, gelu)
        device, dtype = weight.codes.device, weight.plain.dtype
        x = torch.zeros(MAX_ROWS + 1, weight.width, dtype=dtype, device=device)
        self.gated(x, gelu, reader)


def packed_experts(weight: nn.Module) -> Any:
    """Describe the packed weights of experts to the kernels, as PackedExperts or WovenExperts.

    None: no kernel knows their format.
    """
    assert isinstance(weight, PackedWeight)
    if isinstance(weight, FusedFp4Weight) and weight.is_woven:
        return weight.woven
    has_groups = weight.num_groups > 1
    group = weight.group if has_groups else weight.width
    if weight.begins_inside_group:
        return None
    # Kernels for integers take a power of 2 of columns at a time: of one group, or whole groups.
    is_divisible = not has_groups or group % 64 == 0 or group & -group == group
    if isinstance(weight, Fp4Weight) and not weight.scheme.is_nvidia:
        is_known = weight.width % 4 == 0
        return PackedExperts("e2m1", weight.codes, weight.scales, group) if is_known else None
    if isinstance(weight, IntegerWeight):
        scheme = weight.scheme
        if scheme.bits != 4 or scheme.has_g_idx or weight.width % 8 or not is_divisible:
            return None
        zeros = weight.zeros if scheme.has_zeros else None
        return PackedExperts("int4", weight.codes, weight.scales, group, zeros=zeros)
    if isinstance(weight, Fp8Weight):
        how = weight.scheme.activations
        # Ranks that split the columns must agree on the scale of a token's inputs.
        needs_ranks = how == "token" and weight.is_split
        is_divisible = not has_groups or group % 32 == 0
        if how == "tensor" or needs_ranks or weight.width % 2 or not is_divisible:
            return None
        sharing = {"group": group, "token": weight.width, None: None}[how]
        return PackedExperts("e4m3", weight.codes, weight.scales, group, sharing, weight.block_rows)
    return None
