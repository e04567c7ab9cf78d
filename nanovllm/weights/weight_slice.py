"""The link between parameters and checkpoint tensors: what layers tell the loader.

A layer with parameters has a method `weight_slices(path)`, where `path` is the layer's dotted name
in the model. It yields a WeightSlice for each checkpoint tensor that the layer needs. So only the
layer knows how it is split over the ranks and under which names a checkpoint stores it, and only
the loader knows files.
"""

from collections.abc import Callable
from dataclasses import dataclass

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

    def fill(self, values: Tensor) -> None:
        """Store the values of the checkpoint's tensor at `index`."""
        if self.convert is not None:
            values = self.convert(values)
        self.destination.copy_(values)


def sibling(path: str, name: str) -> str:
    """Return the dotted name of the module `name` next to the module at `path`."""
    parent, dot, _ = path.rpartition(".")
    return parent + dot + name
