"""The memory of the KV cache: its tensor, and the number of blocks that a machine has room for.

The state of recurrent layers shares this room, and is allocated in the same way.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from nanovllm.engine.snapshots import StateRows
from nanovllm.models import usable_ram

GIB = 2**30


def allocate_kv_cache(
    layers, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate the memory of the KV cache of all layers; `parts_of_layers` divides it.

    The memory is zeroed, because a masked position must not hold a NaN. Raises ValueError if a CPU
    has too little memory.
    """
    elements = num_blocks * elements_per_block(layers, block_size)
    what = f"the KV cache of {num_blocks} blocks of {block_size} tokens"
    return allocate_zeros(
        elements, dtype, device, what, "set num_kvcache_blocks or kvcache_block_size lower"
    )


def allocate_zeros(
    elements: int, dtype: torch.dtype, device: torch.device, what: str, remedy: str
) -> Tensor:
    """Allocate zeros, for which the system of a CPU provides memory only as it is used.

    Raises ValueError, which names `what` and the remedy, if a CPU has too little memory.
    """
    if device.type != "cpu" or not elements:
        return torch.zeros(elements, dtype=dtype, device=device)
    # The system provides a zero page when the page is first touched. Huge pages are requested,
    # because touching many small pages is slow. The mapping is private, so that a forked process
    # gets a copy.
    size = elements * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"{what} takes {size / GIB:,.1f} GiB, which this machine does not have: {remedy} "
            f"({error})"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has no huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)


def parts_of_layers(memory: Tensor, layers, num_blocks: int, block_size: int) -> list[Tensor]:
    """Return each layer's part of the memory: [2 (K, V), blocks, block_size, G, D].

    Layers may differ in the number and the size of their heads, and have the same blocks.
    """
    sizes = [num_blocks * elements_per_block([layer], block_size) for layer in layers]
    return [
        part.view(2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
        for part, layer in zip(memory.split(sizes), layers)
    ]


def bytes_per_block(layers, block_size: int, dtype: torch.dtype) -> int:
    """Return the number of bytes that one block takes in all layers together."""
    return elements_per_block(layers, block_size) * dtype.itemsize


def elements_per_block(layers, block_size: int) -> int:
    """Return the number of elements that one block has in all layers together."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim for layer in layers)


def bytes_in_ram(ranks: int) -> int:
    """Return the number of bytes that each rank on a CPU may take for KV and states.

    This is a quarter of the memory that this process may use, shared by all ranks.
    """
    there_is, _ = usable_ram()
    return there_is // 4 // ranks


def divide_memory(
    room: int,
    *,
    block_bytes: int,
    least_kv: int,
    row_bytes: int,
    max_num_seqs: int,
    snapshot_share: float,
) -> tuple[int, StateRows]:
    """Divide `room` bytes among KV blocks and rows of state. Returns how many there are of each.

    KV gets `least_kv` bytes at least, and snapshots their share if they can. Running sequences get
    at most half of what is left, because their KV needs memory, too: if that is too little for the
    states of max_num_seqs sequences, fewer run. Without recurrent layers, `row_bytes` is 0.
    """
    if not row_bytes:
        return max(1, room // block_bytes), StateRows(max_num_seqs, 0)
    most_rows = (room - least_kv) // row_bytes
    of_one = StateRows(1, 0).total
    num_snapshots = max(0, min(int(room * snapshot_share / row_bytes), most_rows - of_one))
    rows = min((room - num_snapshots * row_bytes) // 2 // row_bytes, most_rows - num_snapshots)
    num_slots = max(1, min(max_num_seqs, rows - of_one + 1))
    state_rows = StateRows(num_slots, num_snapshots)
    return max(1, (room - state_rows.total * row_bytes) // block_bytes), state_rows
