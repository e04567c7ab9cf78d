"""The ranks a model is split over, as its layers see them. The one owner of torch.distributed.

Knows collectives and how ranks find each other. Knows nothing about processes: who starts the ranks, commands them and
notices their death is engine/tensor_parallel.py. A process is one rank of one group for all its life.
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.layers.parallel import ParallelGroup

if TYPE_CHECKING:
    from nanovllm.distributed.symmetric_memory import SymmetricMemorySum
    from nanovllm.kernels.triton.allreduce_norm import SharedRows

HOST = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ENVIRONMENT = {  # unless the user set something else
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": LOOPBACK,
    # NVLink multicast stays off: a process that dies while it uses it can put all GPUs of the host out of order.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # A sum that runs beside a product gets the next processors that come free, not those that the product leaves.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # To record each collective's stack took the host 20 of the 50 us of a launch. The other name is an older one.
    "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"),
}
# The same function under its name since PyTorch 2.13, or the one before.
all_gather_one = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
# Ranks wait for each other while they load, however long that takes: who is late or dead is the engine's to judge.
PATIENCE = timedelta(hours=1)


@dataclass(frozen=True)
class DistributedGroup(ParallelGroup):
    """A ParallelGroup of several processes, by torch.distributed: NCCL between GPUs, gloo between CPUs."""

    symmetric: "SymmetricMemorySum | None" = None  # faster sums of small tensors, where GPUs can read each other's memory

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.symmetric is not None and self.symmetric.can_sum(x):
            return self.symmetric.all_reduce(x)
        dist.all_reduce(x)
        return x

    def shared_rows(self, x: Tensor) -> "SharedRows | None":
        """Where a kernel can sum the ranks' `x` [T, N] on its own; None: nowhere, all-reduce it."""
        return self.symmetric.rows_for(x) if self.symmetric is not None else None

    def begin_all_reduce(self, x: Tensor) -> dist.Work:
        """Start to sum the ranks' `x` in place. Other work may go on until `wait` on what this returns."""
        return dist.all_reduce(x, async_op=True)

    def maximum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        all_gather_one(gathered.flatten(0, 1), x.contiguous())  # one after the other: gloo does not stack
        return gathered

    def minimum(self, value: int) -> int:
        values: list[int] = [0] * self.size
        dist.all_gather_object(values, value)
        return min(values)


def host_store() -> tuple[dist.Store, int]:
    """The place where ranks find each other, on a port that the system chooses; and that port."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    return store, store.port


def connect_store(port: int) -> dist.Store:
    return dist.TCPStore(HOST, port, is_master=False, timeout=PATIENCE)


def join_group(rank: int, size: int, device: torch.device, store: dist.Store, *, symmetric_memory: bool) -> ParallelGroup:
    """Become rank `rank` of the `size` that meet at `store`; returns when all are there."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=PATIENCE, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    group = DistributedGroup(rank, size)
    if device.type == "cuda":
        from nanovllm.distributed.symmetric_memory import SymmetricMemorySum

        if group.minimum(int(symmetric_memory and SymmetricMemorySum.is_available(size, device))):
            group = DistributedGroup(rank, size, SymmetricMemorySum(size, device))
    return group
