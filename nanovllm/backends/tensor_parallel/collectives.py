"""The ranks a model is split over, as its layers see them. The one owner of torch.distributed.

Knows collectives and how ranks find each other. Knows nothing about processes: who starts the
ranks, commands them and notices their death is distributed/tensor_parallel.py. A process is one
rank of one group for all its life.
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
# All ranks of a model are on one host, so nothing that they open listens beyond it.
LOOPBACK_ONLY = {
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": LOOPBACK,
}
ENVIRONMENT = {  # unless the user set something else
    "NCCL_RAS_ENABLE": "0",  # a service that tells every user of the host about the ranks
    # NVLink multicast stays off: a process that dies while it uses it can put all GPUs of the
    # host out of order.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # An all-reduce that runs beside a product gets the next multiprocessors that come free, not
    # those that the product leaves.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # Recording each collective's stack took the host 20 of the 50 us of a launch. The second name
    # is an older one.
    "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"),
}
# The same function under its name since PyTorch 2.13, or the one before.
all_gather_one = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
# Ranks wait for each other as long as the engine lets them: start_timeout is at most so long.
PATIENCE = timedelta(days=12)


@dataclass(frozen=True)
class DistributedGroup(ParallelGroup):
    """A ParallelGroup of several processes: by NCCL between GPUs, by gloo between CPUs."""

    device: torch.device = torch.device("cpu")  # of the tensors that the backend exchanges
    # For small tensors of GPUs that read each other's memory.
    symmetric: "SymmetricMemorySum | None" = None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.symmetric is not None and self.symmetric.can_sum(x):
            return self.symmetric.all_reduce(x)
        dist.all_reduce(x)
        return x

    def shared_rows(self, x: Tensor) -> "SharedRows | None":
        """Where a kernel can sum the ranks' `x` [T, N] on its own; None: nowhere, all-reduce it."""
        return self.symmetric.rows_for(x) if self.symmetric is not None else None

    def begin_all_reduce(self, x: Tensor) -> dist.Work:
        """Start to sum the ranks' `x` in place.

        Other work may go on until `wait` on what this returns.
        """
        return dist.all_reduce(x, async_op=True)

    def maximum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        # One after the other: gloo does not stack.
        all_gather_one(gathered.flatten(0, 1), x.contiguous())
        return gathered

    def minimum(self, value: int) -> int:
        # A tensor, since objects would be unpickled, and pickle runs whatever code a message names.
        least = torch.tensor([value], device=self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)


def join_group(
    rank: int, size: int, device: torch.device, store_path: str, *, symmetric_memory: bool
) -> ParallelGroup:
    """Become rank `rank` of `size`; returns when all have joined.

    Ranks tell each other their addresses through the file at `store_path`, which is empty at first.
    A file and not a TCPStore: that one serves every user of the host who connects, lists all keys
    and lets them be replaced, while only the ranks can open the file.
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
