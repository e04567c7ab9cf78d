"""The memory of a GPU that KV blocks and states may take beside the model.

An LLM's budget is a fraction of the GPU's whole memory. Its peak need is measured by running the
largest step. Memory that others hold on the GPU is not subtracted from the budget; it counts only
if it leaves less free memory than the budget allows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm.engine.kv_cache import GIB

# Bytes that are left for PyTorch's allocator. The sizes of tensors differ from step to step, so it
# reserves more than the largest step alone needs: 178 MB for Qwen3-8B's shape in INT4 on an H100.
SLACK = GIB // 4


class Room(NamedTuple):
    """The memory of a GPU beside the model, in bytes."""

    left: int  # for KV blocks and states; below 0 if there is too little for the model
    taken: int  # by the model and the largest step
    free: int
    total: int
    utilization: float

    def check(self, needed: int, block_bytes: int, block_size: int) -> None:
        """Raise ValueError if fewer than `needed` bytes are left, which one sequence needs.

        A KV block of `block_size` tokens takes `block_bytes` bytes.
        """
        if self.left >= needed:
            return
        raise ValueError(
            f"gpu_memory_utilization is {self.utilization} of {self.total / GIB:.1f} GiB, "
            f"{self.free / GIB:.1f} GiB of it free; model and activations take "
            f"{self.taken / GIB:.1f} GiB and leave {max(self.left, 0) / GIB:.1f} "
            "GiB for the KV cache, but one sequence of max_model_len needs "
            f"{needed / GIB:.1f} GiB: {self.remedy(block_bytes, block_size)}"
        )

    def remedy(self, block_bytes: int, block_size: int) -> str:
        """Say what would make the model fit."""
        tokens = self.left // block_bytes * block_size
        if tokens > 0:
            return (
                f"lower max_model_len to {tokens} or less, set kv_cache_dtype to 'fp8', raise "
                "gpu_memory_utilization, or free memory on the GPU"
            )
        return (
            "lower max_num_seqs, raise gpu_memory_utilization, free memory on the GPU, split the "
            "model by tensor_parallel_size, or take weights of fewer bytes: quantization='fp8' "
            "halves those of bfloat16, a checkpoint in INT4 has a quarter"
        )


class MemoryBudget:
    """The memory budget of one LLM.

    Make it before anything is loaded, and call `measure` when the model is loaded.
    """

    def __init__(self, device: torch.device, utilization: float) -> None:
        self.device = device
        self.utilization = utilization
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(device)  # by other LLMs of this process
        self._others_before = self._outside_pytorch()

    def measure(
        self,
        block_bytes: int,
        run_largest_step: Callable[[], None],
        graph_bytes: int,
        *,
        may_fail: bool = False,
    ) -> "Room":
        """Measure what the model takes, and what is left for KV blocks and states.

        Args:
            block_bytes: those of a KV block.
            run_largest_step: runs the largest step, with a KV cache of one block.
            graph_bytes: those that CUDA graphs will take.
            may_fail: whether a step that runs out of memory leaves no room, and is no error.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        has_failed = False
        try:
            run_largest_step()
            torch.cuda.synchronize(self.device)
        except torch.cuda.OutOfMemoryError:
            if not may_fail:
                raise
            has_failed = True
        # What PyTorch's allocator has reserved counts: it keeps what it cannot give to a tensor.
        peak_reserved = torch.cuda.max_memory_reserved(self.device)
        peak = peak_reserved - self._before - block_bytes
        torch.cuda.empty_cache()
        more = peak_reserved - torch.cuda.memory_reserved(self.device)
        libraries = max(0, self._outside_pytorch() - self._others_before)
        free, total = torch.cuda.mem_get_info(self.device)
        taken = peak + libraries + graph_bytes
        within_budget = int(total * self.utilization) - taken
        within_free = free - more - graph_bytes
        left = -1 if has_failed else min(within_budget, within_free) - SLACK
        return Room(left, taken, free, total, self.utilization)

    def _outside_pytorch(self) -> int:
        """Count the bytes in use on the device outside of this process's PyTorch allocator."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)
