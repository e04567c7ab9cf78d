"""Sums of small tensors over GPUs that read each other's memory (PyTorch's symmetric memory).

This file decides which sums are faster this way than by NCCL, and owns the memory that the kernels
share. It uses none of the multicast operations.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.backends.cuda.triton.allreduce_norm import SharedRows


class SymmetricMemorySum:
    """The sum of a small tensor in one kernel, in which every rank reads the other ranks' memory.

    NCCL would pass parts of the tensor from rank to rank. All ranks must call for sums in the same
    order.
    """

    # Up to MAX_BYTES, a sum in one shot is faster than NCCL's. Up to MAX_DIRECT_BYTES, it is faster
    # than a sum in which each rank owns a part. Both were measured on 2 and 4 H200s; for 8 they are
    # estimates. One shot reads the bytes size - 1 times; NCCL and owners read them twice, whatever
    # the size of the group.
    MAX_BYTES = {2: 4 << 20, 4: 512 << 10, 8: 256 << 10}
    MAX_DIRECT_BYTES = {2: 4 << 20, 4: 256 << 10, 8: 128 << 10}

    def __init__(self, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        world = dist.group.WORLD
        assert world is not None, "the ranks have joined"
        self.group_name = world.group_name
        self.max_bytes = self.MAX_BYTES[size]
        self.buffer = symmetric_memory.empty(self.max_bytes, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self.buffer, self.group_name)
        self.rows = symmetric_memory.empty(
            SharedRows.BYTES, dtype=torch.uint8, device=device
        ).zero_()
        torch.cuda.synchronize(device)  # no rank may count in this memory before it is zeroed
        handle = symmetric_memory.rendezvous(self.rows, self.group_name)
        pieces = [handle.get_buffer(rank, self.rows.shape, torch.uint8) for rank in range(size)]
        addresses = torch.tensor([piece.data_ptr() for piece in pieces], device=device)
        self.shared = SharedRows(addresses, handle.rank, self.MAX_DIRECT_BYTES[size])

    @classmethod
    def is_available(cls, size: int, device: torch.device) -> bool:
        """Return whether this rank can read the memory of every other rank.

        Another rank may still be unable to read this one's.
        """
        return (
            device.type == "cuda"
            and size in cls.MAX_BYTES
            and hasattr(torch.ops.symm_mem, "one_shot_all_reduce")
            and all(
                torch.cuda.can_device_access_peer(device, peer)
                for peer in range(
                    device.index - dist.get_rank(), device.index - dist.get_rank() + size
                )
                if peer != device.index
            )
        )

    def can_sum(self, x: Tensor) -> bool:
        """Return whether `all_reduce` takes `x`, by its size and dtype."""
        return (
            x.nbytes <= self.max_bytes
            and x.nbytes % 16 == 0
            and x.dtype in (torch.bfloat16, torch.float32)
        )

    def rows_for(self, x: Tensor) -> SharedRows | None:
        """Return the memory in which the next norm's kernel can sum the ranks' `x` [T, N].

        Returns None if `x` does not fit it.
        """
        row_bytes = x.shape[1] * x.itemsize
        fits = (
            x.shape[0] <= SharedRows.ROWS
            and row_bytes <= SharedRows.ROW_BYTES
            and row_bytes % 16 == 0
        )
        return self.shared if fits else None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' `x`."""
        shared = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        # one_shot_all_reduce_copy is not used: in it, the first threads of a block tell the other
        # ranks that the block's part is copied without waiting for the block's other threads. A
        # copy that is a kernel of its own has ended before the sum begins. The sum ends on each
        # rank when all ranks have read, so no rank still reads what the next copy overwrites.
        shared.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self.group_name)
