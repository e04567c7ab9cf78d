"""Tables on the device with the sampling parameters of the sequences in the batch slots.

With these tables a step needs only one thing from the host: which of its rows ask for more. A new
parameter that changes logits or bars tokens is one more column, or one more table, in this file.

Shapes: S batch slots, V vocabulary entries.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.sampler import CELL
from nanovllm.sampling_params import SamplingMetadata, SamplingParams

Upload = Callable[[np.ndarray], Tensor]
Starting = Sequence[
    tuple[int, SamplingMetadata | None]
]  # batch slot, metadata (None: nothing more)
Asked = list[tuple[int, SamplingMetadata]]
REPETITION_BOUNDS = 1e-10, 1e10
FLOAT32_MAX = 3.4e38
LIMITS = 3  # columns of SlotParams.limits


class SlotParams:
    """Tables of S rows, one for each batch slot.

    A row holds the parameters of the last sequence that asked for more in its slot. At first, rows
    hold the parameters of `SamplingParams()`.

    Attributes:
        params: [S, 6] float32: temperature; top_p; temperature * log(min_p), which is how far below
            the greatest logit a logit may be; penalties of repetition, frequency and presence.
        limits: [S, 3] int32: top_k (V: no bound); the length from which on the sequence may end;
            the number of likeliest tokens to report (-1: not even the sampled token).
        table: params and limits side by side, as int32 bits; these two are views of it.
        counts: [S, V] int32: 0 for a token that is neither in prompt nor output, else 1 + how often
            it is in the output. None until a slot has penalties.
        barred: [S, V] bool: tokens that would end the sequence. None until a slot has min_tokens.
        cells: [S, C] bool: cells of the vocabulary in which counts or barred have entries. None
            until either table exists.
    """

    def __init__(self, num_slots: int, vocab_size: int, upload: Upload) -> None:
        self.num_slots, self.vocab_size = num_slots, vocab_size
        self._upload = upload
        self.table = upload(np.tile(_rows([SamplingParams()], [0], vocab_size), (num_slots, 1)))
        self.params = self.table[:, :-LIMITS].view(torch.float32)
        self.limits = self.table[:, -LIMITS:]
        self.counts: Tensor | None = None
        self.barred: Tensor | None = None
        self.cells: Tensor | None = None

    def start(self, asked: Asked, temperatures: Tensor) -> None:
        """Fill the rows of sequences that ask for more and start to sample in these slots.

        temperatures [S] float32 are those of the first sampling pass. They are set below 0 for
        sequences whose parameters can change the sampled token.
        """
        params = [one.params for _, one in asked]
        lengths = [one.num_prompt_tokens for _, one in asked]
        first = [one.params.temperature if one.samples_plainly else -1.0 for _, one in asked]
        # One upload brings the temperatures and the rows.
        columns = np.array(first, dtype=np.float32).view(np.int32)[:, None]
        rows = self._upload(np.hstack((columns, _rows(params, lengths, self.vocab_size))))
        slots = self._upload(np.array([slot for slot, _ in asked], dtype=np.int64))
        temperatures[slots] = rows[:, 0].view(torch.float32)
        self.table[slots] = rows[:, 1:]
        if self.cells is not None:
            self.cells.index_fill_(0, slots, False)
        if penalized := [(slot, one) for slot, one in asked if one.params.penalizes]:
            self._start_counts(penalized)
        if barring := [(slot, one) for slot, one in asked if one.params.min_tokens]:
            self._start_barred(barring)

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
            self.cells = torch.zeros(
                self.num_slots, size, dtype=torch.bool, device=self.table.device
            )
        return torch.zeros(shape, dtype=dtype, device=self.table.device)

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


def limit(params: SamplingParams, vocab_size: int) -> int:
    """Return top_k as a number of tokens: vocab_size if it sets no bound."""
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def _rows(params: list[SamplingParams], prompt_lens: list[int], vocab_size: int) -> np.ndarray:
    """Return the rows of `SlotParams.table` for these requests, as int32 bits."""
    rows = [_row(*row, vocab_size) for row in zip(params, prompt_lens)]
    floats, ints = map(list, zip(*rows))
    return np.hstack((np.array(floats, dtype=np.float32).view(np.int32), np.array(ints, np.int32)))


def _row(
    params: SamplingParams, num_prompt_tokens: int, vocab_size: int
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the rows of `SlotParams.params` and `SlotParams.limits` for one request."""
    top_p, margin, top_k = params.top_p, -math.inf, limit(params, vocab_size)
    if params.temperature == 0:  # a greedy row: the likeliest token passes every filter
        top_p, top_k = 1.0, vocab_size
    elif params.min_p > 0:
        margin = max(params.temperature * math.log(params.min_p), -FLOAT32_MAX)
    # Beyond these bounds logits would overflow float32, and their order would be lost.
    low, high = REPETITION_BOUNDS
    repetition = min(max(params.repetition_penalty, low), high)
    least_length = num_prompt_tokens + params.min_tokens if params.min_tokens else 0
    asked = -1 if params.logprobs is None else params.logprobs
    penalties = repetition, params.frequency_penalty, params.presence_penalty
    return (params.temperature, top_p, margin, *penalties), (
        top_k,
        min(least_length, 2**31 - 1),
        asked,
    )
