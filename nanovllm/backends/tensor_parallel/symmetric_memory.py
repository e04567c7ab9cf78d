"""Sums of small tensors over GPUs that read each other's memory (PyTorch's symmetric memory).

Knows which sums are faster so than by NCCL, and owns the memory that the kernels share. Uses none
of the multicast operations.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.backends.cuda.triton.allreduce_norm import SharedRows


class SymmetricMemorySum:
    """Sums a small tensor in one kernel, in which every rank reads the others' memory.

    NCCL would pass it around.

    Uses PyTorch's symmetric memory, and of that never the multicast operations. All ranks must sum
    in the same order.
    """

    # Bytes up to which a sum is faster in one shot than by NCCL, and directly than through owners,
    # measured on 2 and 4 H200s; for 8 they are estimates. One shot reads size - 1 times the bytes,
    # NCCL and owners twice whatever the size.
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
        return (
            x.nbytes <= self.max_bytes
            and x.nbytes % 16 == 0
            and x.dtype in (torch.bfloat16, torch.float32)
        )

    def rows_for(self, x: Tensor) -> SharedRows | None:
        """Where the next norm's kernel can sum the ranks' `x` [T, N]; None: it is too large."""
        row_bytes = x.shape[1] * x.itemsize
        fits = (
            x.shape[0] <= SharedRows.ROWS
            and row_bytes <= SharedRows.ROW_BYTES
            and row_bytes % 16 == 0
        )
        return self.shared if fits else None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' `x`."""
        shared = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        # Not one_shot_all_reduce_copy: there, the first threads of a block tell the other ranks
        # that the block's part is copied without waiting for its other threads. A copy that is a
        # kernel of its own has ended before the sum begins. The sum ends on each rank when all
        # ranks have read, so no rank still reads what the copy overwrites.
        shared.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self.group_name)
