"""The ranks a model is split over, as its layers see them. The one owner of torch.distributed.

Knows collectives. Knows nothing about processes: who starts the ranks, commands them and notices their death
is engine/tensor_parallel.py.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ParallelGroup:
    """Rank `rank` of `size`. At size 1 every collective is the identity and no process group exists."""

    rank: int = 0
    size: int = 1
    handle: "dist.ProcessGroup | None" = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.handle)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack the ranks' `x`: [...] -> [size, ...]."""
        if self.size == 1:
            return x.unsqueeze(0)
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self.handle)
        return gathered

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        """[B, own] -> [B, total], where rank r has the columns from total * r // size up to total * (r + 1) // size."""
        if self.size == 1:
            return x
        starts = [total * rank // self.size for rank in range(self.size + 1)]
        widest = -(-total // self.size)
        parts = self.all_gather(F.pad(x, (0, widest - x.shape[1])))  # [size, B, widest]
        return torch.cat([part[:, : end - begin] for part, begin, end in zip(parts, starts, starts[1:])], dim=1)

    def minimum(self, value: int) -> int:
        """The least of the ranks' values."""
        if self.size == 1:
            return value
        values: list[int] = [0] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return min(values)

    def share(self, total: int, what: str) -> int:
        """This rank's part of `total` things that must divide evenly."""
        if total % self.size:
            raise ValueError(f"{what} is {total}, which tensor_parallel_size={self.size} does not divide: choose a divisor")
        return total // self.size
