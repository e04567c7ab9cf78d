"""The group of ranks over which a model is split, with its collectives, as the layers see it.

Only this file and symmetric_memory.py use torch.distributed. This file knows how ranks find each
other, and nothing about processes: runner.py starts the ranks, commands them and notices when one
dies. A process is one rank of one group for its whole life.
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.layers.parallel import ParallelGroup

if TYPE_CHECKING:
    from nanovllm.backends.cuda.triton.allreduce_norm import SharedRows
    from nanovllm.backends.tensor_parallel.symmetric_memory import SymmetricMemorySum

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# All ranks of a model are on one host, so their sockets listen on its loopback interface alone.
LOOPBACK_ONLY = {
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": LOOPBACK,
}
# Environment variables that are set unless the user has set them.
ENVIRONMENT = {
    # This service of NCCL tells every user of the host about the ranks.
    "NCCL_RAS_ENABLE": "0",
    # NVLink multicast stays off: a process that dies while it uses multicast can leave all GPUs of
    # the host unusable.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # An all-reduce beside a product gets the multiprocessors that come free next. Without priority
    # it would get only those that the product does not use.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # Recording each collective's stack took the host 20 of the 50 us of a launch. The variable had
    # the second name in older releases of PyTorch.
    "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"),
}
# PyTorch 2.13 renamed this function; older releases have only the second name.
all_gather_one = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
# Ranks wait for each other until the engine ends them. No start_timeout is longer than this.
PATIENCE = timedelta(days=12)


@dataclass(frozen=True)
class DistributedGroup(ParallelGroup):
    """A ParallelGroup of several processes, which use NCCL between GPUs and gloo between CPUs."""

    device: torch.device = torch.device("cpu")  # where the tensors lie that the ranks exchange
    # Sums small tensors on GPUs that read each other's memory; None: NCCL sums all tensors.
    symmetric: "SymmetricMemorySum | None" = None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.symmetric is not None and self.symmetric.can_sum(x):
            return self.symmetric.all_reduce(x)
        dist.all_reduce(x)
        return x

    def shared_rows(self, x: Tensor) -> "SharedRows | None":
        """Return the memory in which a kernel can sum the ranks' `x` [T, N] on its own.

        Returns None if there is none for `x`, which must then be all-reduced.
        """
        return self.symmetric.rows_for(x) if self.symmetric is not None else None

    def begin_all_reduce(self, x: Tensor) -> dist.Work:
        """Begin to sum the ranks' `x` in place, and return a handle at once.

        The sum is complete when `wait` of the handle has returned.
        """
        return dist.all_reduce(x, async_op=True)

    def maximum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        # The ranks' rows go one after the other, because gloo cannot gather along a new dimension.
        all_gather_one(gathered.flatten(0, 1), x.contiguous())
        return gathered

    def minimum(self, value: int) -> int:
        # A tensor carries the value. An object would be unpickled, which runs whatever code a
        # message names.
        least = torch.tensor([value], device=self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)


def join_group(
    rank: int, size: int, device: torch.device, store_path: str, *, symmetric_memory: bool
) -> ParallelGroup:
    """Join the group as rank `rank` of `size`, and return the group when all ranks have joined.

    Ranks tell each other their addresses through the file at `store_path`, which is empty at first.
    Only the ranks can open the file. A TCPStore would serve every user of the host who connects,
    and would let that user list and replace all keys.
    """
    os.environ.update(LOOPBACK_ONLY)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    store = dist.FileStore(store_path, size)
    store.set_timeout(PATIENCE)
    options: dict[str, Any] = dict(store=store, rank=rank, world_size=size, timeout=PATIENCE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
    group = DistributedGroup(rank, size, device)
    if device.type == "cuda":
        from nanovllm.backends.tensor_parallel.symmetric_memory import SymmetricMemorySum

        if group.minimum(int(symmetric_memory and SymmetricMemorySum.is_available(size, device))):
            group = DistributedGroup(rank, size, device, SymmetricMemorySum(size, device))
    return group
