"""The memory of the state of recurrent layers, and the copies between its rows.

engine/snapshots.py says what the rows are for.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.snapshots import StateRows
from nanovllm.layers.recurrent import RecurrentLayer


class RecurrentState:
    """The states of the recurrent layers of a model, one row for each sequence or snapshot."""

    def __init__(self, layers: Iterable[RecurrentLayer], device: torch.device) -> None:
        self.layers = list(layers)
        self.device = device
        self.rows = StateRows(0, 0)

    @property
    def row_bytes(self) -> int:
        """The number of bytes that one row takes in all layers together."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all rows."""
        return sum(layer.state.nbytes for layer in self.layers)

    def allocate(self, rows: StateRows) -> None:
        """Allocate rows in each layer, filled with zeros."""
        self.release()
        self.rows = rows
        for layer in self.layers:
            shape = (rows.total, *layer.state_shape)
            layer.state = torch.zeros(shape, dtype=layer.state_dtype, device=self.device)

    def release(self) -> None:
        """Give back the memory of all rows."""
        self.rows = StateRows(0, 0)
        for layer in self.layers:
            layer.state = torch.empty(0)

    def rows_of(self, slots: Tensor) -> Tensor:
        """Return the rows of batch slots [N] int64. Slots of padding have higher numbers."""
        return slots.clamp(max=self.rows.padding)

    def copy(
        self, copies: Sequence[tuple[int, int]], upload: Callable[[np.ndarray], Tensor]
    ) -> None:
        """Copy rows, given as pairs (source, destination), as if one after the other.

        upload: copies an array to the device.
        """
        for independent in split_at_hazards(copies):
            source, destination = upload(np.array(independent, dtype=np.int64).T.copy())
            for layer in self.layers:
                layer.state[destination] = layer.state[source]


def split_at_hazards(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split copies into runs. The copies of a run may read all their sources before they write."""
    runs: list[list[tuple[int, int]]] = []
    written: set[int] = set()
    for source, destination in copies:
        if not runs or source in written or destination in written:
            runs.append([])
            written.clear()
        runs[-1].append((source, destination))
        written.add(destination)
    return runs
