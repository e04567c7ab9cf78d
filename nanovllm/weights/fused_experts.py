"""Experts that a checkpoint stores in two tensors for all experts of a layer.

gate_up_proj [E, 2 I, N] holds the gates and then the ups of each expert, down_proj [E, N, I] the
outputs. Most checkpoints have three matrices for each expert, and layers ask for these.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """A matrix of one expert, which is read like a tensor of a safetensors file.

    `rows`: where the matrix lies among the rows that the tensor has for each expert.
    """

    stacked: Any
    expert: int
    rows: range

    def get_dtype(self) -> str:
        return self.stacked.get_dtype()

    def get_shape(self) -> list[int]:
        return [len(self.rows), self.stacked.get_shape()[2]]

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        rows = self.rows[index[0]]
        part = slice(self.expert, self.expert + 1), slice(rows.start, rows.stop), index[1]
        return self.stacked[part][0]


def split_experts(checkpoint: dict[str, tuple[Any, Any]]) -> None:
    """Replace each tensor of all experts of a layer by a matrix for each expert and projection.

    The checkpoint maps a tensor's name to its file and the tensor; it is changed.
    """
    for name in list(checkpoint):
        path, _, kind = name.rpartition(".")
        file, stacked = checkpoint[name]
        if not path.endswith(".experts") or kind not in ("gate_up_proj", "down_proj"):
            continue
        shape = stacked.get_shape()
        if len(shape) != 3 or kind == "gate_up_proj" and shape[1] % 2:
            continue  # something else, for which the model has no place
        count, size, _ = shape
        parts = {"down_proj": range(size)}
        if kind == "gate_up_proj":
            parts = {"gate_proj": range(size // 2), "up_proj": range(size // 2, size)}
        del checkpoint[name]
        for expert in range(count):
            for part, rows in parts.items():
                matrix = ExpertMatrix(stacked, expert, rows)
                checkpoint[f"{path}.{expert}.{part}.weight"] = file, matrix
