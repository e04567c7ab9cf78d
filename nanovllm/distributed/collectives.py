"""The ranks a model is split over, as its layers see them. The one owner of torch.distributed.

Knows collectives and how ranks find each other. Knows nothing about processes: who starts the ranks, commands them and
notices their death is distributed/tensor_parallel.py. A process is one rank of one group for all its life.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.layers.parallel import ParallelGroup

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
    """A ParallelGroup of several processes, by torch.distributed: NCCL between GPUs, gloo between CPUs."""

    device: torch.device = torch.device("cpu")  # of the tensors that the backend exchanges
    one_shot: "OneShotSum | None" = None
    exchange: "Exchange | None" = None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.one_shot is not None and self.one_shot.can_sum(x):
            return self.one_shot(x)
        dist.all_reduce(x)
        return x

    def sum_in_norm(self, x: Tensor) -> "Tensor | UnfinishedSum":
        """The sum of the ranks' `x` [T, N], or what the next norm makes it of: it sums a few rows in its own kernel."""
        if self.one_shot is not None and self.one_shot.can_sum_in_norm(x):
            return UnfinishedSum(x, shared=self.one_shot.shared)
        return self.all_reduce(x)

    def sum_buffers(self, rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Where this rank's share of a large sum goes, and where the sum will be: [rows, width], perhaps the same."""
        if self.exchange is not None:
            return self.exchange.buffers(rows, width, like)
        out = like.new_empty(rows, width)
        return out, out

    def begin_sum(self, share: Tensor, total: Tensor) -> "dist.Work | Fetch":
        """Start to sum rows of those buffers; other work may go on until `wait` on what this returns."""
        if self.exchange is None:
            return dist.all_reduce(share, async_op=True)
        return self.exchange.begin(share, total)

    def maximum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        all_gather_one(gathered.flatten(0, 1), x.contiguous())  # one after the other: gloo does not stack
        return gathered

    def minimum(self, value: int) -> int:
        # A tensor, since objects would be unpickled, and pickle runs whatever code a message names.
        least = torch.tensor([value], device=self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)


@dataclass(frozen=True)
class SharedRows:
    """A piece of memory on every rank that all of them read and write: kernels/triton_sum.py says how.

    It begins with three counters for each row, int64s that are 0 at first; then each row has four places for its elements.
    """

    ROWS: ClassVar[int] = 512
    ROW_BYTES: ClassVar[int] = 16 << 10
    BYTES: ClassVar[int] = ROWS * (3 * 8 + 4 * ROW_BYTES)

    addresses: Tensor  # [size] int64: where each rank's piece begins, as this one sees it
    rank: int
    direct_bytes: int  # up to which a sum goes directly, and not through owners


@dataclass(frozen=True)
class UnfinishedSum:
    """Each rank's share of a sum [T, N]: what a row-parallel layer may give to the norm behind it, which finishes it."""

    x: Tensor | None = None
    shared: SharedRows | None = None  # through which the norm's kernel sums `x`
    parts: Sequence[tuple[Tensor, "dist.Work | Fetch"]] = ()  # or some rows after the other, each with what is summing them


@dataclass(frozen=True)
class RowParts:
    """An activation [T, N] some rows at a time: each part is computed when it is asked for, once, while ranks sum the next."""

    sizes: list[int]  # rows of each
    parts: Iterator[Tensor]

    @classmethod
    def split(cls, x: Tensor, rows: int) -> "RowParts":
        """At least two parts, of about so many rows each."""
        parts = x.tensor_split(max(2, round(len(x) / rows)))
        return cls([len(part) for part in parts], iter(parts))


def whole(x: Tensor | RowParts) -> Tensor:
    return x if isinstance(x, Tensor) else torch.cat(list(x.parts))


class OneShotSum:
    """Sums a small tensor in one kernel: every rank reads the others' memory, where NCCL would pass it around.

    Uses PyTorch's symmetric memory, and of that never the multicast operations. All ranks must sum in the same order.
    """

    # Bytes up to which a sum is faster in one shot than by NCCL, and directly than through owners, measured on 2 and 4 H200s;
    # for 8 they are estimates. One shot reads size - 1 times the bytes, NCCL and owners twice whatever the size.
    MAX_BYTES = {2: 4 << 20, 4: 512 << 10, 8: 256 << 10}
    MAX_DIRECT_BYTES = {2: 4 << 20, 4: 256 << 10, 8: 128 << 10}

    def __init__(self, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.group_name = dist.group.WORLD.group_name
        self.max_bytes = self.MAX_BYTES[size]
        self.buffer = symmetric_memory.empty(self.max_bytes, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self.buffer, self.group_name)
        self.rows = symmetric_memory.empty(SharedRows.BYTES, dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)  # no rank may count here before the zeros are written
        handle = symmetric_memory.rendezvous(self.rows, self.group_name)
        pieces = [handle.get_buffer(rank, self.rows.shape, torch.uint8) for rank in range(size)]
        addresses = torch.tensor([piece.data_ptr() for piece in pieces], device=device)
        self.shared = SharedRows(addresses, handle.rank, self.MAX_DIRECT_BYTES[size])

    @classmethod
    def is_available(cls, size: int, device: torch.device) -> bool:
        """Whether this rank can read every other's memory; says nothing about the others."""
        return (
            device.type == "cuda"
            and size in cls.MAX_BYTES
            and hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy")
            and all(
                torch.cuda.can_device_access_peer(device, peer)
                for peer in range(device.index - dist.get_rank(), device.index - dist.get_rank() + size)
                if peer != device.index
            )
        )

    def can_sum(self, x: Tensor) -> bool:
        return x.nbytes <= self.max_bytes and x.nbytes % 16 == 0 and x.dtype in (torch.bfloat16, torch.float32)

    def can_sum_in_norm(self, x: Tensor) -> bool:
        row_bytes = x.shape[1] * x.itemsize
        return x.shape[0] <= SharedRows.ROWS and row_bytes <= SharedRows.ROW_BYTES and row_bytes % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        shared = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x.contiguous(), "sum", self.group_name)


class Exchange:
    """Large sums of two ranks: each fetches the other's share by the copy engine, and adds it to its own.

    NCCL's kernels take multiprocessors from the products beside which they run; the copy engine takes none.
    Sums take two places by turns, for one begins while parts of the one before are still fetched.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stream = torch.cuda.Stream(priority=-1)
        self.places: list[Place | None] = [None, None]

    def buffers(self, rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Both ranks ask for the same sizes in the same order, the next but one when they have waited for all of a sum."""
        size = rows * width * like.itemsize
        self.places.reverse()
        place = self.places[0]
        if place is None or place.mine.nbytes < size:
            torch.cuda.synchronize(like.device)  # nothing reads what this replaces any more
            place = self.places[0] = Place.allocate(size, like.device, 1 - self.rank)
        else:
            place.handle.barrier(channel=1)  # the other has fetched what the last sum but one put here
        return place.mine[:size].view(like.dtype).view(rows, width), like.new_empty(rows, width)

    def begin(self, share: Tensor, total: Tensor) -> "Fetch":
        """Of the last buffers: all of a sum begins before the next one's are asked for."""
        place = self.places[0]
        start = share.data_ptr() - place.mine.data_ptr()
        others = place.others[start : start + share.nbytes].view(share.dtype).view(share.shape)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            place.handle.barrier(channel=0)  # the other's share is there
            total.copy_(others)
            return Fetch(share, total, self.stream.record_event())


@dataclass(frozen=True)
class Place:
    """Memory of this rank that another reads, and that one's, which this rank reads."""

    mine: Tensor
    others: Tensor
    handle: Any

    @classmethod
    def allocate(cls, size: int, device: torch.device, other: int) -> "Place":
        import torch.distributed._symmetric_memory as symmetric_memory

        mine = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(mine, dist.group.WORLD.group_name)
        return cls(mine, handle.get_buffer(other, mine.shape, torch.uint8), handle)


@dataclass(frozen=True)
class Fetch:
    """The other rank's share on its way into `total`."""

    share: Tensor
    total: Tensor
    arrived: "torch.cuda.Event"

    def wait(self) -> None:
        self.arrived.wait()
        self.total.add_(self.share)


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
    options = dict(store=store, rank=rank, world_size=size, timeout=PATIENCE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
    group = DistributedGroup(rank, size, device)
    if group.minimum(int(symmetric_memory and OneShotSum.is_available(size, device))):
        exchange = Exchange(rank) if size == 2 else None
        group = DistributedGroup(rank, size, device, OneShotSum(size, device), exchange)
    return group
