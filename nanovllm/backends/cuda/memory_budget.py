"""The memory of a GPU that KV blocks and states may take beside the model.

An LLM's budget is a fraction of the GPU's whole memory. Its peak need is measured by running the
largest step. Memory that others hold on the GPU is not subtracted from the budget; it counts only
if it leaves less free memory than the budget allows.
"""

from collections.abc import Callable

import torch

from nanovllm.engine.kv_cache import GIB


class MemoryBudget:
    """The memory budget of one LLM.

    Make it before anything is loaded, and call `num_bytes` when the model is loaded.
    """

    def __init__(self, device: torch.device, utilization: float) -> None:
        self.device = device
        self.utilization = utilization
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_allocated(device)  # by other LLMs of this process
        self._others_before = self._outside_pytorch()

    def num_bytes(
        self, block: int, needed_for_one: int, run_largest_step: Callable[[], None], graphs: int
    ) -> int:
        """Count the bytes that are left for KV blocks and for the state of recurrent layers.

        Args:
            block: bytes of a KV block.
            needed_for_one: bytes that one sequence of max_model_len tokens needs.
            run_largest_step: runs the largest step, with a KV cache of one block.
            graphs: bytes that CUDA graphs will take.
        Raises:
            ValueError: if fewer than `needed_for_one` bytes are left.
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
        # PyTorch's allocator needs a little slack when memory is almost full: 256 MiB are left.
        within_free = free - more - graphs - GIB // 4
        room = min(within_budget, within_free)
        if room < needed_for_one:
            raise ValueError(
                f"gpu_memory_utilization is {self.utilization} of {total / GIB:.1f} GiB, "
                f"{free / GIB:.1f} GiB of it free; model and activations take "
                f"{(peak + libraries + graphs) / GIB:.1f} GiB and leave {max(room, 0) / GIB:.1f} "
                "GiB for the KV cache, but one sequence of max_model_len needs "
                f"{needed_for_one / GIB:.1f} GiB: raise gpu_memory_utilization, lower "
                "max_model_len or max_num_batched_tokens, or free memory on the GPU"
            )
        return int(room)

    def _outside_pytorch(self) -> int:
        """Count the bytes in use on the device outside of this process's PyTorch allocator."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)
