"""The group of ranks that share a model, as layers see it: rank, size, shards and collectives.

With one rank every collective is the identity. A subclass in backends/tensor_parallel says how
several ranks exchange tensors.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Vocabulary entries that stay together on one rank. layers/sampler.py samples a cell of this many
# entries first, so sampling on several ranks equals sampling on one.
VOCAB_UNIT = 16
MAX_RANKS = 64  # the most that an error message recommends


@dataclass(frozen=True)
class ParallelGroup:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`. May overwrite `x`."""
        return self._alone(x)

    def maximum(self, x: Tensor) -> Tensor:
        """Return the maximum of all ranks' `x`, element by element. May overwrite `x`."""
        return self._alone(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack all ranks' `x`: [N, ...] -> [size, N, ...]."""
        return self._alone(x).unsqueeze(0)

    def minimum(self, value: int) -> int:
        """Return the minimum of all ranks' values."""
        return -int(self.maximum(torch.tensor(-value)))

    def _alone(self, x: Tensor) -> Tensor:
        assert self.size == 1, "several ranks need a group that can communicate"
        return x

    def shard(self, total: int, what: str) -> int:
        """Return how many of `total` things each rank holds.

        Raises ValueError, which calls the things `what`, if the ranks do not divide them evenly.
        """
        if total % self.size:
            divisors = [str(n) for n in range(1, min(total, MAX_RANKS) + 1) if total % n == 0]
            raise ValueError(
                f"{what} is {total}, which tensor_parallel_size={self.size} does not divide: use "
                f"one of {', '.join(divisors)}"
            )
        return total // self.size

    def vocab_starts(self, total: int) -> list[int]:
        """Return where each rank's shard of `total` vocabulary entries begins, and last `total`.

        Shards begin at multiples of VOCAB_UNIT, if there are enough for every rank, and may differ
        in size.
        """
        unit = VOCAB_UNIT if total >= VOCAB_UNIT * self.size else 1
        return [total * rank // self.size // unit * unit for rank in range(self.size)] + [total]

    def gather_vocab(self, x: Tensor, total: int) -> Tensor:
        """Join the ranks' shards of the vocabulary: [B, this rank's entries] -> [B, total]."""
        if self.size == 1:
            return x
        starts = self.vocab_starts(total)
        widths = [end - begin for begin, end in zip(starts, starts[1:])]
        shards = self.all_gather(F.pad(x, (0, max(widths) - x.shape[1])))  # [size, B, widest]
        return torch.cat([shard[:, :width] for shard, width in zip(shards, widths)], dim=1)
