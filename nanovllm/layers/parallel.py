"""What a layer knows of the ranks that share a model: which one it is on, what its shard is, and
the collectives.

Knows how to divide and what each collective means. How ranks exchange tensors is for a subclass to
know: with one rank every collective is the identity.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Vocabulary entries that stay together on one rank, so that sampling on several ranks equals
# sampling on one: layers/sampler.py weighs so many entries as one.
VOCAB_UNIT = 16
MAX_RANKS = 64  # what an error recommends at most


@dataclass(frozen=True)
class ParallelGroup:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' `x`, which may be overwritten."""
        return self._alone(x)

    def maximum(self, x: Tensor) -> Tensor:
        """The greatest of the ranks' `x`, element by element; `x` may be overwritten."""
        return self._alone(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack the ranks' `x`: [N, ...] -> [size, N, ...]."""
        return self._alone(x).unsqueeze(0)

    def minimum(self, value: int) -> int:
        """The least of the ranks' values."""
        return -int(self.maximum(torch.tensor(-value)))

    def _alone(self, x: Tensor) -> Tensor:
        assert self.size == 1, "several ranks need a group that can communicate"
        return x

    def shard(self, total: int, what: str) -> int:
        """How many of `total` things each rank has.

        ValueError, which calls them `what`, if they do not divide evenly.
        """
        if total % self.size:
            divisors = [str(n) for n in range(1, min(total, MAX_RANKS) + 1) if total % n == 0]
            raise ValueError(
                f"{what} is {total}, which tensor_parallel_size={self.size} does not divide: use "
                f"one of {', '.join(divisors)}"
            )
        return total // self.size

    def vocab_starts(self, total: int) -> list[int]:
        """Where each rank's shard of `total` vocabulary entries begins, and at last where they end.

        Shards begin at multiples of VOCAB_UNIT where every rank can have one, and need not be of
        one size.
        """
        unit = VOCAB_UNIT if total >= VOCAB_UNIT * self.size else 1
        return [total * rank // self.size // unit * unit for rank in range(self.size)] + [total]

    def gather_vocab(self, x: Tensor, total: int) -> Tensor:
        """[B, this rank's entries] -> [B, total]: the shards of the vocabulary side by side."""
        if self.size == 1:
            return x
        starts = self.vocab_starts(total)
        widths = [end - begin for begin, end in zip(starts, starts[1:])]
        shards = self.all_gather(F.pad(x, (0, max(widths) - x.shape[1])))  # [size, B, widest]
        return torch.cat([shard[:, :width] for shard, width in zip(shards, widths)], dim=1)
