"""The link between parameters and checkpoint tensors: what layers tell the loader.

A layer with parameters has a method `weight_slices(path)`, where `path` is the layer's dotted name
in the model. It yields a WeightSlice for each checkpoint tensor that the layer needs. So only the
layer knows how it is split over the ranks and under which names a checkpoint stores it, and only
the loader knows files.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, eq=False)
class WeightSlice:
    """The assignment `destination` = `convert`(checkpoint[`name`][`index`])."""

    name: str
    destination: Tensor  # a view of this rank's parameter, without gaps; it may be transposed
    index: tuple[slice, ...]  # this rank's part of the checkpoint's tensor
    # Of the checkpoint's whole tensor. (): one number, whatever the tensor's dimensions.
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS  # that the checkpoint's tensor may have, by safetensors' names
    # Makes the values to store from those that were read. It may raise ValueError, whose message
    # follows the tensor's name. None: they are stored as they are.
    convert: Callable[[Tensor], Tensor] | None = None
    # What to store if the checkpoint lacks the tensor. None: it must have it.
    default: float | None = None
    # Whether NaN and infinite numbers are refused. A row of an embedding may hold them, because it
    # concerns one token, which may never come.
    must_be_finite: bool = True

    def fill(self, values: Tensor) -> None:
        """Store the values of the checkpoint's tensor at `index`."""
        if self.convert is not None:
            values = self.convert(values)
        self.destination.copy_(values)


def are_finite(values: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinite numbers."""
    if values.dtype == torch.float8_e4m3fn:  # which has two NaN, and no infinity
        return not bool((values.view(torch.uint8) & 127 == 127).any())
    if not values.is_floating_point():
        return True
    # One pass that allocates nothing: isfinite().all() takes 40 times as long in bfloat16 (one
    # core of an AMD EPYC, PyTorch 2.13). The smallest number is NaN if any number is.
    return all(map(math.isfinite, map(float, values.aminmax())))


def sibling(path: str, name: str) -> str:
    """Return the dotted name of the module `name` next to the module at `path`."""
    parent, dot, _ = path.rpartition(".")
    return parent + dot + name
