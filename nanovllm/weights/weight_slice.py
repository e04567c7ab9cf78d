"""The link between parameters and checkpoint tensors: what layers tell the loader.

A layer with parameters has a method `weight_slices(path)`, where `path` is the layer's dotted name
in the model. It yields a WeightSlice for each checkpoint tensor that the layer needs. So only the
layer knows how it is split over the ranks and under which names a checkpoint stores it, and only
the loader knows files.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class WeightSlice:
    """The assignment `destination` = checkpoint[`name`][`index`]."""

    name: str
    destination: Tensor  # a view of this rank's parameter, without gaps; it may be transposed
    index: tuple[slice, ...]  # this rank's part of the checkpoint's tensor
    shape: tuple[int, ...]  # of the checkpoint's whole tensor


def sibling(path: str, name: str) -> str:
    """Return the dotted name of the module `name` next to the module at `path`."""
    parent, dot, _ = path.rpartition(".")
    return parent + dot + name
