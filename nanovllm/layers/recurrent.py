"""Layers that remember a sequence in a state of fixed size, instead of the K and V of its tokens.

A recurrent layer keeps one tensor `state` with a row for each sequence. The step's metadata
(layers/context.py) says which row belongs to which sequence. The layer reads a sequence's row at
the beginning of a step and writes it at the end. Before the first token of a sequence, its row is
zero. engine/recurrent_state.py allocates the rows, and copies them.
"""

import torch
from torch import Tensor, nn

from nanovllm.layers.context import current_metadata


class RecurrentLayer(nn.Module):
    """The base of recurrent layers. The model runner sets `state`, a tensor [rows, *state_shape].

    A subclass says how large a row is, and computes outputs in `decode` and `prefill`.
    """

    def __init__(self, state_shape: tuple[int, ...], state_dtype: torch.dtype):
        super().__init__()
        self.state_shape = state_shape  # of one row, on this rank
        self.state_dtype = state_dtype
        self.state = torch.empty(0)

    @property
    def state_bytes(self) -> int:
        """The number of bytes of one row."""
        return torch.Size(self.state_shape).numel() * self.state_dtype.itemsize

    def recur(self, *inputs: Tensor) -> Tensor:
        """Compute the outputs of a step's tokens from inputs [T, ...], and update their rows."""
        metadata = current_metadata()
        decodes, prefill, rows = metadata.num_decodes, metadata.prefill, metadata.state_rows
        assert rows is not None, "a model with recurrent layers gets rows in each step"
        parts = []
        if decodes:
            parts.append(self.decode(*[x[:decodes] for x in inputs], rows=rows[:decodes]))
        if prefill is not None:
            of_chunks = dict(rows=rows[decodes:], starts=prefill.cu_seqlens_q)
            parts.append(self.prefill(*[x[decodes:] for x in inputs], **of_chunks))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def decode(self, *inputs: Tensor, rows: Tensor) -> Tensor:
        """Compute one token of each of B sequences, whose rows are `rows` [B] int64."""
        raise NotImplementedError

    def prefill(self, *inputs: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
        """Compute N prompt chunks, whose rows are `rows` [N] int64.

        starts [N + 1] int32: where each chunk begins among the tokens, and the end of all.
        """
        raise NotImplementedError
