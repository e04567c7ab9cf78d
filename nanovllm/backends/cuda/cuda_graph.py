"""CUDA graphs of a few batch sizes. A batch uses the smallest graph that holds it.

A replay launches a whole step at once, so that the host's time no longer grows with the number of
layers. This file does not know what a graph computes. It relies on two properties: the work reads
and writes fixed buffers, and rows of padding do no harm.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def sizes_up_to(max_num_seqs: int) -> list[int]:
    """List the batch sizes to capture, ascending; the last is max_num_seqs."""
    return [size for size in SIZES if size < max_num_seqs] + [max_num_seqs]


def size_for(count: int, sizes: Sequence[int]) -> int | None:
    """Return the first of the ascending sizes that is at least `count`, or None if all are less."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


class Graphs:
    """CUDA graphs that share memory, so that only one of them may run at a time.

    The results of a replay are valid until the next replay.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._pool: Any = None

    def capture(self, key: Hashable, run: Callable[[], tuple[Tensor, ...]]) -> None:
        """Record the kernels that `run` launches, without running them, as the graph `key`.

        Capture the largest graph first: the others then fit into its memory. Call `run` once before
        its capture, because a capture can neither load kernels nor let libraries allocate memory.
        The current stream must not be the default stream.
        """
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would wait for the device and give PyTorch's free memory back: begin and
        # end the capture by hand. "thread_local" lets other threads use CUDA meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            left = run()
        finally:
            graph.capture_end()
        self._pool = graph.pool()
        self._graphs[key] = graph, tuple(map(_borrow, left))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def replay(self, key: Hashable) -> tuple[Tensor, ...]:
        """Launch the graph `key`; return the tensors that its `run` returned, with new values."""
        graph, left = self._graphs[key]
        graph.replay()
        return left

    def clear(self) -> None:
        """Delete all graphs and give up their memory."""
        self._graphs.clear()
        self._pool = None


class _Memory:
    """The bytes of a tensor, as an object that torch.as_tensor wraps without owning them."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = dict(
            shape=(tensor.nbytes,), typestr="|u1", data=(tensor.data_ptr(), False), version=3
        )


def _borrow(tensor: Tensor) -> Tensor:
    """Return a tensor of the same elements that does not keep their memory from being reused.

    The next graph that is captured may use that memory, because only one graph runs at a time.
    """
    assert tensor.is_contiguous()
    return (
        torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
    )
