"""The memory of the KV cache: its tensor, and the number of blocks that a machine has room for."""

import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor

GIB = 2**30


def allocate_kv_cache(
    layers, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate the memory of the KV cache of all layers; `parts_of_layers` divides it.

    The memory is zeroed, because a masked position must not hold a NaN. Raises ValueError if a CPU
    has too little memory.
    """
    elements = num_blocks * block_elements(layers, block_size)
    if device.type == "cpu" and num_blocks:
        # The system provides a zero page when the page is first touched. Huge pages are requested,
        # because touching many small pages is slow. The mapping is private, so that a forked
        # process gets a copy.
        size = elements * dtype.itemsize
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"the KV cache of {num_blocks} blocks of {block_size} tokens takes "
                f"{size / GIB:,.1f} GiB, which this machine does not have: set num_kvcache_blocks "
                f"or kvcache_block_size lower ({error})"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the kernel has no huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype)
    return torch.zeros(elements, dtype=dtype, device=device)


def parts_of_layers(memory: Tensor, layers, num_blocks: int, block_size: int) -> list[Tensor]:
    """Return each layer's part of the memory: [2 (K, V), blocks, block_size, G, D].

    Layers may differ in the number and the size of their heads, and have the same blocks.
    """
    sizes = [num_blocks * block_elements([layer], block_size) for layer in layers]
    return [
        part.view(2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
        for part, layer in zip(memory.split(sizes), layers)
    ]


def block_bytes(layers, block_size: int, dtype: torch.dtype) -> int:
    """Return the number of bytes that one block takes in all layers together."""
    return block_elements(layers, block_size) * dtype.itemsize


def block_elements(layers, block_size: int) -> int:
    """Return the number of elements that one block has in all layers together."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim for layer in layers)


def num_blocks_in_ram(block: int, needed: int, ranks: int) -> int:
    """Return the number of blocks of `block` bytes for each rank on a CPU.

    This is `needed`, the most that running sequences can need, unless the blocks of all ranks would
    take more than a quarter of the memory.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(needed, physical // 4 // ranks // block))
