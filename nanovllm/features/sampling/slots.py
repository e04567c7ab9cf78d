"""What the sequences in the batch slots ask of the sampler, kept on the device.

So a step needs from the host only which of its rows ask for anything. A further thing to ask for
that changes logits or bars tokens is one more column, or one more table, here.

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
Starting = Sequence[tuple[int, SamplingMetadata | None]]  # a batch slot, and what is asked
Asked = list[tuple[int, SamplingMetadata]]
REPETITION_BOUNDS = 1e-10, 1e10
FLOAT32_MAX = 3.4e38
LIMITS = 3  # columns of SlotParams.limits


class SlotParams:
    """Tables of S rows, one a slot. A row holds what was last asked for in its slot; at
    first, nothing.

    params [S, 6] float32: temperature; top_p; temperature * log(min_p), how far below the greatest
        logit one may be; the penalties of repetition, frequency and presence.
    limits [S, 3] int32: top_k (V: no bound); the length from which on the sequence may end; how
        many log-probabilities it asks for (-1: not even the sampled token's).
    counts [S, V] int32: 0 for a token that the sequence does not hold, else 1 + how often it is in
        the output. None until a slot has penalties.
    barred [S, V] bool: tokens that would end the sequence. None until a slot has a least length.
    cells [S, C] bool: cells of the vocabulary where counts or barred hold anything. None like them.

    The first two are columns of one table.
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
        """Sequences that ask for more start to sample in these slots.

        temperatures [S] float32 are what the first pass samples with: below 0 from now on, if what
        is asked for changes which token is sampled.
        """
        params = [one.params for _, one in asked]
        lengths = [one.num_prompt_tokens for _, one in asked]
        first = [one.params.temperature if one.samples_plainly else -1.0 for _, one in asked]
        # One upload for both.
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
        if self.counts is None:
            self.counts = self._new_table(torch.int32)
        held = [self._places(slot, one.token_ids) for slot, one in asked]
        put_out = [places[one.num_prompt_tokens :] for places, (_, one) in zip(held, asked)]
        self._clear(self.counts, asked)
        counts = self.counts.view(-1)
        places = self._upload(np.concatenate(held))
        counts.index_fill_(0, places, 1)
        self._mark_cells(places)
        output = self._upload(np.concatenate(put_out))
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _start_barred(self, asked: Asked) -> None:
        if self.barred is None:
            self.barred = self._new_table(torch.bool)
        self._clear(self.barred, asked)
        held = [self._places(slot, list(one.stop_ids)) for slot, one in asked]
        places = self._upload(np.concatenate(held))
        self.barred.view(-1).index_fill_(0, places, True)
        self._mark_cells(places)

    def _new_table(self, dtype: torch.dtype) -> Tensor:
        shape = self.num_slots, self.vocab_size
        if self.cells is None:
            size = -(-self.vocab_size // CELL)
            self.cells = torch.zeros(
                self.num_slots, size, dtype=torch.bool, device=self.table.device
            )
        return torch.zeros(shape, dtype=dtype, device=self.table.device)

    def _mark_cells(self, places: Tensor) -> None:
        assert self.cells is not None
        slots, tokens = places // self.vocab_size, places % self.vocab_size
        # Not by index: a number would be copied to the device, and the host would wait for that.
        self.cells.view(-1).index_fill_(0, slots * self.cells.shape[1] + tokens // CELL, True)

    def _clear(self, table: Tensor, asked: Asked) -> None:
        slots = np.array([slot for slot, _ in asked], dtype=np.int64)
        table.index_fill_(0, self._upload(slots), 0)

    def _places(self, slot: int, token_ids: list[int]) -> np.ndarray:
        """Where a slot's tokens are in a table that is laid flat."""
        tokens = np.array(token_ids, dtype=np.int64)
        return tokens[tokens < self.vocab_size] + slot * self.vocab_size


def limit(params: SamplingParams, vocab_size: int) -> int:
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def _rows(params: list[SamplingParams], prompt_lens: list[int], vocab_size: int) -> np.ndarray:
    """What slots' rows of the table hold, in bits of int32."""
    rows = [_row(*row, vocab_size) for row in zip(params, prompt_lens)]
    floats, ints = map(list, zip(*rows))
    return np.hstack((np.array(floats, dtype=np.float32).view(np.int32), np.array(ints, np.int32)))


def _row(
    params: SamplingParams, num_prompt_tokens: int, vocab_size: int
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """What a slot's rows of `params` and `limits` hold."""
    top_p, margin, top_k = params.top_p, -math.inf, limit(params, vocab_size)
    if params.temperature == 0:  # the likeliest token passes every filter
        top_p, top_k = 1.0, vocab_size
    elif params.min_p > 0:
        margin = max(params.temperature * math.log(params.min_p), -FLOAT32_MAX)
    # Beyond these bounds float32 would lose logits to infinity, and with them which one is larger.
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
