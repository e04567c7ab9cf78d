"""Sample for the requests that ask for more than a temperature and a seed.

A step samples for all its rows in one pass (layers/sampler.py). Rows whose SamplingParams ask for
more are then sampled once more, with the same noise, from logits that went through (min_tokens'
place among these makes no difference)

    repetition, then frequency and presence penalty -> min_tokens (no token that would end the
    output) -> temperature -> min_p -> top_k -> top_p,

and that token replaces the first. So rows that ask for nothing pay nothing. A greedy row takes the
arg max of what the penalties leave. Reported log-probabilities are the model's own, before any of
this.

Shapes: R rows that ask for more, among the B rows of a step; V vocabulary entries.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.sampling.slots import SlotParams, Starting, Upload, limit
from nanovllm.sampling_params import INVALID_TOKEN, SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.batch_state import BatchState
    from nanovllm.engine.model_runner import ModelRunner, StepOutput


def apply_penalties(
    logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """logits [R, V] float32 -> the same, penalised.

    counts [R, V] int32: 0 for a token that is neither in prompt nor output, else 1 more than what
    the output has of it. The penalties are [R, 1] float32; 1, 0 and 0 change nothing, to the bit.
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    return logits - frequency * (counts - 1).clamp(min=0) - presence * (counts > 1)


def keep_likeliest(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, margin: Tensor, width: int
) -> Tensor:
    """[R, V] bool: which tokens may be sampled, by logits [R, V] float32.

    temperatures [R, 1] float32 (above 0), top_k [R, 1] integers (V: no bound), top_p [R, 1] float32
    (1: no bound), margin [R, 1] float32: how far below the greatest logit one may be, which for
    min_p is temperature * log(min_p). width: how many tokens to put in order; V if a row bounds
    top_p alone, else the largest bound of top_k, 0 if there is none.

    A token as likely as the last one kept is kept too, so that the set is a function of the logits
    alone.
    """
    threshold = logits.amax(dim=-1, keepdim=True) + margin
    if width:
        best = logits.topk(width).values  # likeliest first
        dropped = (torch.arange(width, device=logits.device) >= top_k) | (best < threshold)
        scores = (best / temperatures).masked_fill(dropped, -torch.inf)
        probs = scores.double().softmax(dim=-1)
        # The token that crosses the bound is kept: those before it do not reach top_p.
        kept = ~dropped & ((probs.cumsum(dim=-1) - probs < top_p) | (top_p >= 1))
        # Of logits that are no numbers, none is kept.
        last = best.gather(1, kept.sum(dim=-1, keepdim=True).sub(1).clamp(min=0))
        # A row with neither bound may stand beside rows that need fewer tokens in order than it
        # keeps.
        threshold = torch.where(top_k > width, threshold, last)
    return logits >= threshold


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of some rows of a step, token ids and log-probabilities [rows, 1 + most].

    The first column is the sampled token, the others are the likeliest in order. `asking` has, for
    each row that asks, its place here, its place in the step, and how many of the likeliest.
    """

    asking: list[tuple[int, int, int]]
    token_ids: Tensor
    values: Tensor

    def read(self) -> dict[int, dict[int, float]]:
        """For each place in the step, token id -> log-probability."""
        token_ids, values = self.token_ids.tolist(), self.values.tolist()
        return {
            place: dict(zip(token_ids[row][: 1 + count], values[row]))
            for row, place, count in self.asking
        }


class Rows:
    """Some of a step's rows that ask for more; the same as long as the step's slots are.

    at [3, R] int64, on the device: for each its place in the logits, in the step, and its slot.
    """

    def __init__(
        self,
        index: list[int],
        slots: Sequence[int],
        asked: dict[int, SamplingParams],
        gathered: bool,
        upload: Upload,
    ):
        params = [asked[slots[i]] for i in index]
        in_logits = range(len(index)) if gathered else index
        # Kernels are made for rows of the table that begin at a multiple of 16 bytes.
        at = np.zeros((3, len(index) + len(index) % 2), dtype=np.int64)
        at[:, : len(index)] = in_logits, index, [slots[i] for i in index]
        self.at = upload(at)[:, : len(index)]
        self.params = params
        self.sample_again = any(p.logprobs is None or not logprobs_alone(p) for p in params)
        self.asking = [
            (row, place, p.logprobs)
            for row, (place, p) in enumerate(zip(index, params))
            if p.logprobs is not None
        ]
        self.most_logprobs = max((count for _, _, count in self.asking), default=0)


def logprobs_alone(params: SamplingParams) -> bool:
    """Whether nothing is asked for that changes which token is sampled."""
    return dataclasses.replace(params, logprobs=None).is_plain


class Resampler:
    """Knows which batch slots ask for more, and samples for them.

    This one is plain, and right on any device: what a device can do better is a subclass's to say.
    """

    rows_at_once = 64  # bounds the memory that sorting the vocabulary takes

    def __init__(self, runner: "ModelRunner") -> None:
        self.vocab_size = runner.vocab_size
        self.group = runner.group
        self._upload = runner._upload
        self._sample_tokens = runner._sample_tokens
        self.slots = SlotParams(runner.max_num_seqs + 1, self.vocab_size, self._upload)
        self._asked: dict[int, SamplingParams] = {}  # by batch slot
        self._seen: Sequence[int] = ()  # the slots of the last step, and what they came to
        self._parts: list[Rows] = []

    def rehearse(self, output: "StepOutput", state: "BatchState") -> None:
        """Launch every kernel that a step may launch, for the first row of one."""

    def start(self, starting: Starting) -> None:
        """Sequences start to sample in batch slots; None: temperature and seed are all that one
        asks for.
        """
        asked = []
        for slot, metadata in starting:
            self._asked.pop(slot, None)
            if metadata is not None:
                self._asked[slot] = metadata.params
                asked.append((slot, metadata))
        if asked:
            self.slots.start(asked)
        self._seen, self._parts = (), []

    def resample(
        self, slots: Sequence[int], output: "StepOutput", state: "BatchState"
    ) -> list[Logprobs]:
        """Replace the tokens of those among a step's `slots` that ask for more; returns the
        log-probabilities asked for.
        """
        logprobs = []
        for rows in self._among(slots):
            logits = output.logits
            if self.group.size > 1:
                logits = self.group.gather_vocab(logits[rows.at[1]], self.vocab_size)
            if rows.sample_again:
                self._sample(rows, logits, output, state)
            if rows.asking:
                found = self._logprobs(rows, logits, output)
                logprobs.append(Logprobs(rows.asking, *found))
        return logprobs

    def _among(self, slots: Sequence[int]) -> list[Rows]:
        """Stays the same, and costs nothing, as long as the slots do."""
        if self._asked and slots != self._seen:
            asked, size = self._asked, self.rows_at_once
            index = [i for i, slot in enumerate(slots) if slot in asked]
            index.sort(key=lambda i: limit(asked[slots[i]], self.vocab_size))
            self._parts = [
                Rows(index[begin : begin + size], slots, asked, self.group.size > 1, self._upload)
                for begin in range(0, len(index), size)
            ]
            self._seen = slots
        return self._parts

    def _sample(
        self, rows: Rows, logits: Tensor, output: "StepOutput", state: "BatchState"
    ) -> None:
        """Sample for `rows` of the step that gave `output`, and replace their tokens there."""
        in_logits, at, slots = rows.at
        logits = logits[in_logits].float()
        positions = output.positions[at].long()
        top_p, margin, *penalties = self.slots.params[slots].split(1, dim=1)
        top_k, least_length, _ = self.slots.limits[slots].split(1, dim=1)
        counts = None
        if self.slots.counts is not None and any(p.penalizes for p in rows.params):
            counts = self.slots.counts
            logits = apply_penalties(logits, counts[slots], *penalties)
        if self.slots.barred is not None and any(p.min_tokens for p in rows.params):
            bars = positions.unsqueeze(1) < least_length
            # After the penalties: minus infinity times 0 is no number.
            logits = logits.masked_fill(bars & self.slots.barred[slots], -torch.inf)
        temperatures = state.temperatures[slots]
        width = max((k for p in rows.params if (k := self._width(p))), default=0)
        if width or any(p.min_p > 0 for p in rows.params):
            divisors = torch.where(temperatures > 0, temperatures, 1.0).unsqueeze(1)
            kept = keep_likeliest(logits, divisors, top_k, top_p, margin, width)
            logits = logits.masked_fill(~kept, -torch.inf)
        tokens, _ = self._sample_tokens(logits, temperatures, state.seeds[slots], positions)
        # A filter may have hidden that logits were no numbers.
        tokens = torch.where(output.tokens[at] == INVALID_TOKEN, INVALID_TOKEN, tokens)
        if counts is not None:
            token = tokens.clamp(min=0)
            counts[slots, token] = counts[slots, token].clamp(min=1) + 1
        output.tokens[at] = tokens
        state.last_tokens[slots] = tokens

    def _width(self, params: SamplingParams) -> int:
        """How many tokens must be put in order for top_k and top_p."""
        k = limit(params, self.vocab_size)
        return k if k < self.vocab_size or params.top_p < 1 else 0

    def _logprobs(self, rows: Rows, logits: Tensor, output: "StepOutput") -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities [R, 1 + most] of `rows`."""
        in_logits, at, _ = rows.at
        logprobs = logits[in_logits].float().log_softmax(dim=-1)
        best, token_ids = logprobs.topk(min(rows.most_logprobs, self.vocab_size))
        tokens = output.tokens[at].unsqueeze(1)
        sampled = logprobs.gather(1, tokens.clamp(min=0))
        return torch.cat((tokens, token_ids), dim=1), torch.cat((sampled, best), dim=1)
