"""Capture what the device does at a few sizes; replay the smallest that holds a batch.

A replay launches a whole step at once, so the host's cost no longer grows with the number of
layers. Knows nothing of what is computed: only that it reads and writes fixed buffers, and that
padding rows are harmless.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def sizes_up_to(max_num_seqs: int) -> list[int]:
    return [size for size in SIZES if size < max_num_seqs] + [max_num_seqs]


def size_for(count: int, sizes: Sequence[int]) -> int | None:
    """The first of the ascending sizes that holds `count`; None: none does."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


class Graphs:
    """CUDA graphs that share their memory, so only one of them is replayed at a time.

    What it leaves behind stays valid until the next replay.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._pool: Any = None

    def capture(self, key: Hashable, run: Callable[[], tuple[Tensor, ...]]) -> None:
        """Record what `run` launches, to be replayed by `key`. None of it runs yet.

        The largest is best captured first: the others then fit into its memory. What `run` launches
        must have been launched before, since a capture can neither load kernels nor let libraries
        allocate. The current stream must not be the default one.
        """
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which waits for the device and gives PyTorch's free memory back.
        # Other threads of the process may use CUDA meanwhile.
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
        graph, left = self._graphs[key]
        graph.replay()
        return left

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None


class _Memory:
    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = dict(
            shape=(tensor.nbytes,), typestr="|u1", data=(tensor.data_ptr(), False), version=3
        )


def _borrow(tensor: Tensor) -> Tensor:
    """The same elements, in memory that is free for the graphs captured next.

    Only one graph is replayed at a time.
    """
    assert tensor.is_contiguous()
    return (
        torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
    )
