"""Penalties for repeated tokens, and the tables of counted and barred tokens that they read.

The tables are on the device. min_tokens, too, reads from them which tokens it bars.

Shapes: R rows of a step, S batch slots, V vocabulary entries, C cells of the vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.features.sampling.slot_params import Asked, Upload
from nanovllm.layers.sampler import CELL


def apply_penalties(
    logits: Tensor, counts: Tensor, *, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Apply the penalties of repetition, frequency and presence to logits [R, V] float32.

    counts [R, V] int32: 0 for a token that is neither in prompt nor output, else 1 + how often it
    is in the output. The penalties are [R, 1] float32. Penalties of 1, 0 and 0 leave every bit of
    the logits as it is.
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    return logits - frequency * (counts - 1).clamp(min=0) - presence * (counts > 1)


class TokenTables:
    """Tables of the tokens that penalties count and min_tokens bars, a row for each batch slot.

    Attributes:
        counts: [S, V] int32: 0 for a token that is neither in prompt nor output, else 1 + how often
            it is in the output. None until a slot has penalties.
        barred: [S, V] bool: tokens that would end the sequence. None until a slot has min_tokens.
        cells: [S, C] bool: cells of the vocabulary in which counts or barred have entries. None
            until either table exists.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, upload: Upload
    ) -> None:
        self.num_slots, self.vocab_size, self.device = num_slots, vocab_size, device
        self._upload = upload
        self.counts: Tensor | None = None
        self.barred: Tensor | None = None
        self.cells: Tensor | None = None

    def start(self, asked: Asked, slots: Tensor) -> None:
        """Fill the rows of sequences that start to sample in these slots."""
        if self.cells is not None:
            self.cells.index_fill_(0, slots, False)
        if penalized := [(slot, one) for slot, one in asked if one.params.penalizes]:
            self._start_counts(penalized)
        if barring := [(slot, one) for slot, one in asked if one.params.min_tokens]:
            self._start_barred(barring)

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """Count the tokens [R] that were sampled in these slots. A token below 0 is no token."""
        assert self.counts is not None
        token = tokens.clamp(min=0)
        self.counts[slots, token] = self.counts[slots, token].clamp(min=1) + 1

    def _start_counts(self, asked: Asked) -> None:
        """Count the tokens of sequences with penalties."""
        if self.counts is None:
            self.counts = self._new_table(torch.int32)
        held = [self._places(slot, one.token_ids) for slot, one in asked]
        output_places = [places[one.num_prompt_tokens :] for places, (_, one) in zip(held, asked)]
        self._clear(self.counts, asked)
        counts = self.counts.view(-1)
        places = self._upload(np.concatenate(held))
        counts.index_fill_(0, places, 1)
        self._mark_cells(places)
        output = self._upload(np.concatenate(output_places))
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _start_barred(self, asked: Asked) -> None:
        """Mark the tokens that would end sequences with min_tokens."""
        if self.barred is None:
            self.barred = self._new_table(torch.bool)
        self._clear(self.barred, asked)
        held = [self._places(slot, list(one.stop_ids)) for slot, one in asked]
        places = self._upload(np.concatenate(held))
        self.barred.view(-1).index_fill_(0, places, True)
        self._mark_cells(places)

    def _new_table(self, dtype: torch.dtype) -> Tensor:
        """Make a table [S, V] of zeros, and `cells` with the first of them."""
        shape = self.num_slots, self.vocab_size
        if self.cells is None:
            size = -(-self.vocab_size // CELL)
            self.cells = torch.zeros(self.num_slots, size, dtype=torch.bool, device=self.device)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _mark_cells(self, places: Tensor) -> None:
        """Mark the cells of `places`, which are indices into a flattened table [S, V]."""
        assert self.cells is not None
        slots, tokens = places // self.vocab_size, places % self.vocab_size
        # Assignment by index would copy True to the device, and the host would wait for that.
        self.cells.view(-1).index_fill_(0, slots * self.cells.shape[1] + tokens // CELL, True)

    def _clear(self, table: Tensor, asked: Asked) -> None:
        """Zero the rows of the slots in `asked`."""
        slots = np.array([slot for slot, _ in asked], dtype=np.int64)
        table.index_fill_(0, self._upload(slots), 0)

    def _places(self, slot: int, token_ids: list[int]) -> np.ndarray:
        """Return the indices of a slot's tokens in a flattened table [S, V]."""
        tokens = np.array(token_ids, dtype=np.int64)
        return tokens[tokens < self.vocab_size] + slot * self.vocab_size
