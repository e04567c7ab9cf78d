"""Capture the decode step at a few batch sizes; replay the smallest that holds a batch.

A replay launches the whole step at once, so the host's cost no longer grows with the number of layers. Knows nothing of
what the step computes: only that it runs the first n rows of a fixed buffer and that padding rows are harmless.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


class DecodeGraphs:
    """`step(n)` runs n rows and returns the tensors it leaves behind; they stay valid until the next replay."""

    def __init__(self, step: Callable[[int], Any], max_num_seqs: int) -> None:
        self.step = step
        self.sizes = [size for size in SIZES if size < max_num_seqs] + [max_num_seqs]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool = None

    def capture(self, sizes: list[int] | None = None) -> None:
        """Capture `sizes`, or all. The largest comes first: the others then fit into its memory."""
        for size in sorted(sizes or self.sizes, reverse=True):
            self.step(size)  # compiles the kernels and lets the libraries allocate: neither may happen in a capture
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                left = self.step(size)
            self._pool = graph.pool()
            self._graphs[size] = graph, left

    def replay(self, num_rows: int) -> Any | None:
        """Run the captured step that holds `num_rows`; None: no captured size does."""
        index = bisect_left(self.sizes, num_rows)
        if index == len(self.sizes) or self.sizes[index] not in self._graphs:
            return None
        graph, left = self._graphs[self.sizes[index]]
        graph.replay()
        return left

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None
