"""The memory of the state of recurrent layers, and the copies between its rows.

engine/snapshots.py says what the rows are for.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nanovllm.engine.kv_cache import allocate_zeros
from nanovllm.engine.snapshots import StateRows
from nanovllm.layers.recurrent import RecurrentLayer


class RecurrentState:
    """The states of the recurrent layers of a model, one row for each sequence or snapshot."""

    def __init__(self, layers: Iterable[RecurrentLayer], device: torch.device) -> None:
        self.layers = list(layers)
        self.device = device
        self.rows = StateRows(0, 0)
        # The states of all layers of a kind: [layers, rows, *state_shape]. So one operation copies
        # a row of all of them.
        self._memory: list[Tensor] = []

    @property
    def row_bytes(self) -> int:
        """The number of bytes that one row takes in all layers together."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all rows."""
        return sum(memory.nbytes for memory in self._memory)

    def allocate(self, rows: StateRows) -> None:
        """Allocate rows in each layer, filled with zeros.

        Raises ValueError if a CPU has too little memory.
        """
        self.release()
        self.rows = rows
        kinds: dict[tuple, list[RecurrentLayer]] = {}
        for layer in self.layers:
            kinds.setdefault((layer.state_shape, layer.state_dtype), []).append(layer)
        for (shape, dtype), layers in kinds.items():
            size = (len(layers), rows.total, *shape)
            what = f"{rows.total} rows of the state of {len(layers)} layers"
            remedy = "set max_num_seqs or state_snapshot_share lower"
            memory = allocate_zeros(math.prod(size), dtype, self.device, what, remedy).view(size)
            self._memory.append(memory)
            for layer, part in zip(layers, memory):
                layer.state = part

    def release(self) -> None:
        """Give back the memory of all rows."""
        self.rows = StateRows(0, 0)
        self._memory.clear()
        for layer in self.layers:
            layer.state = torch.empty(0)

    def rows_of(self, slots: Tensor) -> Tensor:
        """Return the rows of batch slots [N] int64. Slots of padding have higher numbers."""
        return slots.clamp(max=self.rows.padding)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy rows, given as pairs (source, destination), one after the other."""
        for source, destination in copies:
            for memory in self._memory:
                memory[:, destination] = memory[:, source]
