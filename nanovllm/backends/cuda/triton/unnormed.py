"""The residual stream of one row, which products add to and norm, so that no kernel stands between.

The product before a norm adds its result to the stream. Each of its programs also sums the squares
of the elements that it has. The product after the norm adds up these sums, and norms the row while
it loads it.
"""

from typing import NamedTuple

from torch import Tensor


class Stream(NamedTuple):
    """A residual stream of one row."""

    total: Tensor  # [1, N]
    squares: Tensor  # [P] float32: of each part of the row, the sum of its elements' squares


class Unnormed(NamedTuple):
    """A row that the product which reads it norms."""

    stream: Stream
    weight: Tensor  # of the norm
    eps: float
    zero_centered: bool = False

    def __len__(self) -> int:
        return 1
