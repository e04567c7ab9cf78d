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

from nanovllm.sampling_params import SamplingMetadata, SamplingParams

Upload = Callable[[np.ndarray], Tensor]
Starting = Sequence[tuple[int, SamplingMetadata | None]]  # a batch slot, and what is asked
Asked = list[tuple[int, SamplingMetadata]]
REPETITION_BOUNDS = 1e-10, 1e10
FLOAT32_MAX = 3.4e38


class SlotParams:
    """Tables of S rows, one a slot. A row holds what was last asked for in its slot; at
    first, nothing.

    params [S, 5] float32: top_p; temperature * log(min_p), how far below the greatest logit one may
        be; the penalties of repetition, frequency and presence.
    limits [S, 3] int32: top_k (V: no bound); the length from which on the sequence may end; how
        many log-probabilities it asks for (-1: not even the sampled token's).
    counts [S, V] int32: 0 for a token that the sequence does not hold, else 1 more than what its
        output has of it. None until a slot has penalties.
    barred [S, V] bool: tokens that would end the sequence. None until a slot has a least length.
    """

    def __init__(self, num_slots: int, vocab_size: int, upload: Upload) -> None:
        self.num_slots, self.vocab_size = num_slots, vocab_size
        self._upload = upload
        params, limits = _row(SamplingParams(), 0, vocab_size)
        self.params = upload(np.tile(np.array(params, dtype=np.float32), (num_slots, 1)))
        self.limits = upload(np.tile(np.array(limits, dtype=np.int32), (num_slots, 1)))
        self.counts: Tensor | None = None
        self.barred: Tensor | None = None

    def start(self, asked: Asked) -> None:
        """Sequences that ask for more start to sample in these slots."""
        rows = [_row(one.params, one.num_prompt_tokens, self.vocab_size) for _, one in asked]
        params, limits = zip(*rows)
        slots = self._upload(np.array([slot for slot, _ in asked], dtype=np.int64))
        self.params[slots] = self._upload(np.array(params, dtype=np.float32))
        self.limits[slots] = self._upload(np.array(limits, dtype=np.int32))
        if penalized := [(slot, one) for slot, one in asked if one.params.penalizes]:
            self._start_counts(penalized)
        if barring := [(slot, one) for slot, one in asked if one.params.min_tokens]:
            self._start_barred(barring)

    def _start_counts(self, asked: Asked) -> None:
        if self.counts is None:
            self.counts = self._table(torch.int32)
        held = [self._places(slot, one.token_ids) for slot, one in asked]
        put_out = [places[one.num_prompt_tokens :] for places, (_, one) in zip(held, asked)]
        self._clear(self.counts, asked)
        counts = self.counts.view(-1)
        counts.index_fill_(0, self._upload(np.concatenate(held)), 1)
        output = self._upload(np.concatenate(put_out))
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _start_barred(self, asked: Asked) -> None:
        if self.barred is None:
            self.barred = self._table(torch.bool)
        self._clear(self.barred, asked)
        places = [self._places(slot, list(one.stop_ids)) for slot, one in asked]
        self.barred.view(-1).index_fill_(0, self._upload(np.concatenate(places)), True)

    def _table(self, dtype: torch.dtype) -> Tensor:
        shape = self.num_slots, self.vocab_size
        return torch.zeros(shape, dtype=dtype, device=self.params.device)

    def _clear(self, table: Tensor, asked: Asked) -> None:
        slots = np.array([slot for slot, _ in asked], dtype=np.int64)
        table.index_fill_(0, self._upload(slots), 0)

    def _places(self, slot: int, token_ids: list[int]) -> np.ndarray:
        """Where a slot's tokens are in a table that is laid flat."""
        tokens = np.array(token_ids, dtype=np.int64)
        return tokens[tokens < self.vocab_size] + slot * self.vocab_size


def limit(params: SamplingParams, vocab_size: int) -> int:
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


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
    return (top_p, margin, *penalties), (top_k, min(least_length, 2**31 - 1), asked)
