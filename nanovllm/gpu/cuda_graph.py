"""Capture the decode step at a few batch sizes; replay the smallest that holds a batch.

A replay launches the whole step at once, so the host's cost no longer grows with the number of
layers. Knows nothing of what the step computes: only that it runs the first n rows of a fixed
buffer and that padding rows are harmless.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def sizes_up_to(max_num_seqs: int) -> list[int]:
    return [size for size in SIZES if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """`step(n, variant)` runs n rows and returns the tensors it leaves behind.

    They stay valid until the next replay.
    """

    def __init__(self, step: Callable[[int, bool], NamedTuple], max_num_seqs: int) -> None:
        self.step = step
        self.sizes = sizes_up_to(max_num_seqs)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, NamedTuple]] = {}
        self._pool: Any = None

    def capture(self, sizes: list[int], variant: bool = False) -> None:
        """The largest size comes first: the others then fit into its memory.

        All rows must be padding, and the current stream must not be the default one.
        """
        for size in sorted(sizes, reverse=True):
            # Compiles kernels and lets the libraries allocate: neither may happen in a capture.
            self.step(size, variant)
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream()
            # Other threads of the process may use CUDA meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                left = self.step(size, variant)
            self._pool = graph.pool()
            self._graphs[size, variant] = graph, left._make(map(_borrow, left))
            del left  # so that the next capture finds its memory free

    def size_for(self, num_rows: int) -> int | None:
        """The size that holds `num_rows`; None: they are too many."""
        index = bisect_left(self.sizes, num_rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def has(self, size: int, variant: bool) -> bool:
        return (size, variant) in self._graphs

    def replay(self, size: int, variant: bool) -> NamedTuple:
        graph, left = self._graphs[size, variant]
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
