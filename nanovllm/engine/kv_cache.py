"""The KV cache's memory: its tensors, and how many blocks fit beside the model.

On a GPU an LLM's budget is a part of the whole memory. What it needs at its peak is measured by running the largest step.
What others hold there is not subtracted from the budget; it matters only if it leaves less than that free.
"""

import math
import mmap
import os
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

GIB = 2**30


def allocate_kv_cache(layers, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[layers, 2 (K, V), blocks, block_size, G, D]. Zeroed: a masked position must not hold a NaN."""
    shape = (len(layers), 2, num_blocks, block_size, layers[0].num_kv_heads, layers[0].head_dim)
    if device.type == "cpu":
        # The system provides zero pages when they are first touched, huge ones where it can:
        # touching small ones is slow. They are private: a forked process gets a copy.
        size = math.prod(shape) * dtype.itemsize
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"num_kvcache_blocks is {num_blocks} of {block_size} tokens, {size / GIB:,.1f} GiB, which this machine does "
                f"not have: use fewer ({error})"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def block_bytes(layers, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim for layer in layers) * dtype.itemsize


def num_blocks_in_ram(block: int, needed: int, ranks: int) -> int:
    """Blocks of `block` bytes for a CPU: what running sequences can need, for all ranks at most a quarter of the memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(needed, physical // 4 // ranks // block))


class GpuBudget:
    """Made before anything is loaded, asked once the model and its largest step have been run."""

    def __init__(self, device: torch.device, utilization: float) -> None:
        self.device = device
        self.utilization = utilization
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_allocated(device)  # another LLM of this process has it
        self._others_before = self._outside_pytorch()

    def num_blocks(self, block: int, needed_for_one: int, run_largest_step: Callable[[], None], graphs: int) -> int:
        """Blocks of `block` bytes that fit; the largest step runs with one, and `graphs` bytes are left for CUDA graphs.

        Raises ValueError if there is no room for `needed_for_one` blocks, one sequence of full length.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        run_largest_step()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - self._before - block
        peak_reserved = torch.cuda.max_memory_reserved(self.device)
        torch.cuda.empty_cache()
        more = peak_reserved - torch.cuda.memory_reserved(self.device)
        libraries = max(0, self._outside_pytorch() - self._others_before)
        free, total = torch.cuda.mem_get_info(self.device)
        within_budget = total * self.utilization - peak - libraries - graphs
        # PyTorch's allocator needs a little slack when memory is all but full.
        within_free = free - more - graphs - GIB // 4
        room = min(within_budget, within_free)
        if room < needed_for_one * block:
            raise ValueError(
                f"gpu_memory_utilization is {self.utilization} of {total / GIB:.1f} GiB, {free / GIB:.1f} GiB of it free; "
                f"model and activations take {(peak + libraries + graphs) / GIB:.1f} GiB and leave {max(room, 0) / GIB:.1f} "
                f"GiB for the KV cache, but one sequence of max_model_len needs {needed_for_one * block / GIB:.1f} GiB: raise "
                f"gpu_memory_utilization, lower max_model_len or max_num_batched_tokens, or free memory on the GPU"
            )
        return int(room // block)

    def _outside_pytorch(self) -> int:
        """Bytes in use on the device that PyTorch's allocator of this process does not hold."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)
