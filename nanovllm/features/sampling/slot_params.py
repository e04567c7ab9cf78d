"""Tables on the device with the sampling parameters of the sequences in the batch slots.

With these tables a step needs only one thing from the host: which of its rows ask for more. A new
parameter is one more column.

Shapes: S batch slots, V vocabulary entries.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from nanovllm.features.sampling.filters import num_top_k
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
    """

    def __init__(self, num_slots: int, vocab_size: int, upload: Upload) -> None:
        self.vocab_size = vocab_size
        self._upload = upload
        self.table = upload(np.tile(_rows([SamplingParams()], [0], vocab_size), (num_slots, 1)))
        self.params = self.table[:, :-LIMITS].view(torch.float32)
        self.limits = self.table[:, -LIMITS:]

    def start(self, asked: Asked, slots: Tensor, temperatures: Tensor) -> None:
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
        temperatures[slots] = rows[:, 0].view(torch.float32)
        self.table[slots] = rows[:, 1:]


def _rows(params: list[SamplingParams], prompt_lens: list[int], vocab_size: int) -> np.ndarray:
    """Return the rows of `SlotParams.table` for these requests, as int32 bits."""
    rows = [_row(*row, vocab_size) for row in zip(params, prompt_lens)]
    floats, ints = map(list, zip(*rows))
    return np.hstack((np.array(floats, dtype=np.float32).view(np.int32), np.array(ints, np.int32)))


def _row(
    params: SamplingParams, num_prompt_tokens: int, vocab_size: int
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the rows of `SlotParams.params` and `SlotParams.limits` for one request."""
    top_p, margin, top_k = params.top_p, -math.inf, num_top_k(params, vocab_size)
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
