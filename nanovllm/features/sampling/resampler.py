"""Resampling for requests that ask for more than a temperature and a seed.

A step samples all its rows in one pass (layers/sampler.py). Rows whose SamplingParams ask for more
are then sampled again, with the same noise, from logits that went through

    structured outputs, allowed tokens and bad words (all as bitmasks) -> logit_bias -> the user's
    logits_processors -> repetition, then frequency and presence penalty -> min_tokens (no token
    that would end the output) -> temperature -> min_p -> top_k -> top_p,

and the new token replaces the first one. So rows that ask for nothing more pay nothing. A
temperature below 0 tells the first pass that a row is sampled again, so that any token will do. A
greedy row takes the arg max of the logits after the penalties. Reported log-probabilities are the
model's own, before any of these edits. The order is the one that vLLM documents for its sampler
(min_tokens may stand anywhere in it with the same result).

Some rows have constraints that depend on the tokens so far. These rows wait: the host computes
their constraints while the device computes the step (constraints.py), and then `constrain` samples
them. Rows whose logits are edited (logits_edits.py) are sampled apart from the others, from a
float32 copy of their logits.

Shapes: R rows that ask for more, among the B rows of a step; V vocabulary entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.features.sampling.logits_edits import RowEdits, SlotEdits
from nanovllm.features.sampling.slot_params import SlotParams, Starting, limit
from nanovllm.sampling_params import INVALID_TOKEN, SamplingMetadata, SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.batch import LogitsEdits
    from nanovllm.engine.model_runner import ModelRunner, StepOutput


BYTES = 8  # of a pair in a record: a token id and its log-probability


def apply_penalties(
    logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Apply the penalties of repetition, frequency and presence to logits [R, V] float32.

    counts [R, V] int32: 0 for a token that is neither in prompt nor output, else 1 + how often it
    is in the output. The penalties are [R, 1] float32. Penalties of 1, 0 and 0 leave every bit of
    the logits as it is.
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    return logits - frequency * (counts - 1).clamp(min=0) - presence * (counts > 1)


def keep_likeliest(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, margin: Tensor, width: int
) -> Tensor:
    """Find the tokens that pass min_p, top_k and top_p: logits [R, V] float32 -> [R, V] bool.

    Args:
        temperatures: [R, 1] float32, above 0.
        top_k: [R, 1] integers; V: no bound.
        top_p: [R, 1] float32; 1: no bound.
        margin: [R, 1] float32, a bound of logit - greatest logit: temperature * log(min_p).
        width: number of likeliest tokens to sort. V if a row has top_p without top_k, else the
            largest top_k of the rows; 0 if no row has either.

    A token as likely as the last one kept is kept too, so that the set is a function of the logits
    alone. top_p is a share of the probability that min_p and top_k keep, such ties included.
    """
    threshold = logits.amax(dim=-1, keepdim=True) + margin
    if width:
        best = logits.topk(width).values  # likeliest first
        kth = best.gather(1, top_k.clamp(max=width) - 1)
        bound = torch.where(top_k > width, threshold, torch.maximum(threshold, kth))
        kept = best >= bound
        # In float64: the sum of many small probabilities decides which token crosses the bound.
        probs = (best / temperatures).masked_fill(~kept, -torch.inf).double().softmax(dim=-1)
        # Beyond `width`, only tokens as likely as the last sorted one may be kept. Count them too.
        count, num_beyond = kept.sum(dim=-1, keepdim=True), (logits >= bound).sum(-1, keepdim=True)
        probs = probs / (1 + (num_beyond - count) * probs[:, -1:])
        # Keep the token that crosses the bound: the tokens before it do not reach top_p.
        kept &= (probs.cumsum(dim=-1) - probs < top_p) | (top_p >= 1)
        # If logits are NaN, no token is kept: clamp keeps the index valid.
        last = best.gather(1, kept.sum(dim=-1, keepdim=True).sub(1).clamp(min=0))
        # A row with neither bound may keep more tokens than the other rows need sorted.
        threshold = torch.where(top_k > width, threshold, last)
    return logits >= threshold


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The records of a step's rows, [rows, 1 + most, 2] int32.

    A record holds pairs of token id and log-probability, the latter as the bits of a float32: first
    the pair of the sampled token, then those of the likeliest tokens in order. `asking` has an
    entry for each row that asks for log-probabilities: the row's place in the step, and where its
    part of the records' bytes begins and ends.
    """

    asking: list[tuple[int, int, int]]
    records: Tensor

    def read(self) -> dict[int, bytes]:
        """Return the bytes of each asking row's record, by the row's place in the step."""
        records = self.records.numpy().tobytes()
        return {place: records[begin:end] for place, begin, end in self.asking}


class Rows:
    """Rows of a step that are sampled together.

    They are kept from step to step as long as the steps have the same batch slots.

    Attributes:
        index: places of the rows in the step.
        at: the same places, [R] int64 on the device; None: all rows of the step.
        params: the SamplingParams of the rows.
        edits: the edits of their logits before they are sampled; None: none.
        asking: see Logprobs.
    """

    def __init__(
        self, index: list[int], params: list[SamplingParams], at: Tensor | None, vocab_size: int
    ) -> None:
        """Make the group of the rows at `index` of a step, with these params."""
        self.index, self.at, self.params = index, at, params
        self.edits: RowEdits | None = None
        self.waits = False  # whether they wait for the host's LogitsEdits
        self.sample_again = not all([p.samples_plainly for p in params])
        asking = [
            (row, place, min(p.logprobs, vocab_size))
            for row, place, p in zip(index if at is None else count(), index, params)
            if p.logprobs is not None
        ]
        self.most_logprobs = max([number for _, _, number in asking], default=0)
        size = (1 + self.most_logprobs) * BYTES
        self.asking = [
            (place, row * size, row * size + (1 + number) * BYTES) for row, place, number in asking
        ]


class Resampler:
    """The sampler of batch slots that ask for more than a temperature and a seed.

    This class is plain and right on any device. Subclasses do the same faster on one device.
    """

    rows_at_once = 64  # bounds the memory for sorting the vocabulary

    def __init__(self, runner: "ModelRunner") -> None:
        self.vocab_size = runner.vocab_size
        self.group = runner.group
        self.state = runner.state
        self._upload = runner._upload
        self._sample_tokens = runner._sample_tokens
        self.slots = SlotParams(runner.max_num_seqs + 1, self.vocab_size, self._upload)
        self.edits = SlotEdits(runner.max_num_seqs + 1, self.vocab_size, self._upload)
        self._asked: dict[int, SamplingMetadata] = {}  # of batch slots that ask for more
        self._seen: Sequence[int] = ()  # the slots of the last step
        self._parts: list[Rows] = []  # the rows of the last step that ask for more
        # The step that has waiting rows, and the log-probabilities of its other rows.
        self._unfinished: tuple[StepOutput, list[Logprobs]] | None = None

    def warmup(self, output: "StepOutput") -> None:
        """Launch every kernel that a step may launch, on the first row of a step's output."""

    def start(self, starting: Starting) -> None:
        """Note what sequences ask for that start to sample in batch slots.

        `starting` has (slot, metadata); metadata is None for a sequence that asks for a temperature
        and a seed alone.
        """
        asked = []
        for slot, metadata in starting:
            self._asked.pop(slot, None)
            if metadata is not None:
                self._asked[slot] = metadata
                asked.append((slot, metadata))
        if asked:
            self.slots.start(asked, self.state.temperatures)
            self.edits.start(asked)
        self._seen, self._parts = (), []

    def resample(self, slots: Sequence[int], output: "StepOutput") -> list[Logprobs]:
        """Replace the tokens of rows that ask for more, and return the log-probabilities asked for.

        `slots` are the batch slots of the step's rows. Rows that wait are left for `constrain`.
        """
        parts = self._among(slots)
        logprobs = [
            part for rows in parts if not rows.waits for part in self._resample(rows, output)
        ]
        self._unfinished = (output, logprobs) if any([rows.waits for rows in parts]) else None
        return logprobs

    def constrain(self, edits: "LogitsEdits") -> tuple["StepOutput", list[Logprobs]]:
        """Sample the last step's waiting rows by the host's `edits`.

        Returns the step's output with their tokens, and the log-probabilities of the whole step.
        """
        assert self._unfinished is not None, "the step has waiting rows"
        (output, logprobs), self._unfinished = self._unfinished, None
        for rows in self._parts:
            if rows.waits:
                logprobs = logprobs + self._resample(rows, output, edits)
        return output, logprobs

    def edited_logits(self, edits: "LogitsEdits", places: list[int]) -> Tensor:
        """Return the logits [len(places), V] float32 that logits processors of waiting rows get."""
        assert self._unfinished is not None, "the step has waiting rows"
        output, _ = self._unfinished
        edited: dict[int, Tensor] = {}
        for rows in self._parts:
            if rows.waits:
                logits = self._edited(rows, self._logits(rows, output), output, edits)
                edited |= dict(zip(rows.index, logits))
        return torch.stack([edited[place] for place in places])

    def _resample(
        self, rows: Rows, output: "StepOutput", edits: "LogitsEdits | None" = None
    ) -> list[Logprobs]:
        """Sample `rows` again if they need it.

        Returns the log-probabilities that the rows ask for: a list of one object, or of none.
        """
        logits = self._logits(rows, output)
        if rows.sample_again:
            self._sample(rows, self._edited(rows, logits, output, edits), output)
        return [Logprobs(rows.asking, self._logprobs(rows, logits, output))] if rows.asking else []

    def _logits(self, rows: Rows, output: "StepOutput") -> Tensor:
        """Return the model's own logits [R, V] of `rows`, gathered from all ranks."""
        logits = output.logits if rows.at is None else output.logits[rows.at]
        if self.group.size > 1:
            logits = self.group.gather_vocab(logits, self.vocab_size)
        return logits

    def _edited(
        self, rows: Rows, logits: Tensor, output: "StepOutput", edits: "LogitsEdits | None"
    ) -> Tensor:
        """Return an edited copy of logits [R, V], or the logits themselves if `rows` ask for no
        edits.
        """
        if rows.edits is None:
            return logits
        return self.edits.apply(rows.edits, logits, output.slots[rows.at], edits)

    def _among(self, slots: Sequence[int]) -> list[Rows]:
        """Group a step's rows that ask for more into parts that are sampled together.

        `slots` are the batch slots of the step's rows. The parts are rebuilt only when they change.
        """
        if self._asked and slots != self._seen:
            asked = self._asked
            index = [i for i, slot in enumerate(slots) if slot in asked]
            of_kind: dict[tuple[bool, bool], list[int]] = {}
            for i in index:
                metadata = asked[slots[i]]
                kind = (
                    metadata.is_constrained,
                    metadata.is_constrained or metadata.params.edits_logits,
                )
                of_kind.setdefault(kind, []).append(i)
            self._parts = []
            for (waits, edited), index in of_kind.items():
                alone = len(of_kind) == 1 and not edited
                parts = self._rows(index, [asked[slots[i]].params for i in index], alone)
                for rows in parts:
                    rows.waits = waits
                    if edited:
                        rows.sample_again = True
                        rows.edits = self.edits.of(rows.index, [slots[i] for i in rows.index])
                self._parts += parts
            self._seen = slots
        return self._parts

    def _rows(self, index: list[int], params: list[SamplingParams], alone: bool) -> list[Rows]:
        """Split the rows at `index` of a step into parts of at most `rows_at_once` rows.

        `alone` says that no other row of the step asks for more, and that none of these has edits.
        Then a subclass may sample the whole step instead.
        """
        order = sorted(range(len(index)), key=lambda i: limit(params[i], self.vocab_size))
        parts = [
            order[begin : begin + self.rows_at_once]
            for begin in range(0, len(order), self.rows_at_once)
        ]
        return [
            Rows(
                [index[i] for i in part],
                [params[i] for i in part],
                self._upload(np.array([index[i] for i in part], dtype=np.int64)),
                self.vocab_size,
            )
            for part in parts
        ]

    def _sample(self, rows: Rows, logits: Tensor, output: "StepOutput") -> None:
        """Sample `rows` from logits [R, V], and replace their tokens in the step's `output`."""
        slots = output.slots[rows.at]
        logits = logits.float()
        positions = output.positions[rows.at].long()
        temperatures, top_p, margin, *penalties = self.slots.params[slots].split(1, dim=1)
        top_k, least_length, _ = self.slots.limits[slots].split(1, dim=1)
        counts = None
        if self.slots.counts is not None and any([p.penalizes for p in rows.params]):
            counts = self.slots.counts
            logits = apply_penalties(logits, counts[slots], *penalties)
        if self.slots.barred is not None and any([p.min_tokens for p in rows.params]):
            bars = positions.unsqueeze(1) < least_length
            # Bar after the penalties, because minus infinity times 0 is NaN.
            logits = logits.masked_fill(bars & self.slots.barred[slots], -torch.inf)
        width = max((k for p in rows.params if (k := self._width(p))), default=0)
        if width or any([p.min_p > 0 for p in rows.params]):
            divisors = torch.where(temperatures > 0, temperatures, 1.0)
            kept = keep_likeliest(logits, divisors, top_k, top_p, margin, width)
            logits = logits.masked_fill(~kept, -torch.inf)
        tokens, _ = self._sample_tokens(
            logits,
            temperatures=temperatures.squeeze(1).contiguous(),
            seeds=self.state.seeds[slots],
            positions=positions,
        )
        # A filter may have hidden NaN logits, which the first pass has found.
        tokens = torch.where(output.tokens[rows.at] == INVALID_TOKEN, INVALID_TOKEN, tokens)
        if counts is not None:
            token = tokens.clamp(min=0)
            counts[slots, token] = counts[slots, token].clamp(min=1) + 1
        output.tokens[rows.at] = tokens
        self.state.last_tokens[slots] = tokens

    def _width(self, params: SamplingParams) -> int:
        """Return how many tokens must be sorted for top_k and top_p."""
        k = limit(params, self.vocab_size)
        return k if k < self.vocab_size or params.top_p < 1 else 0

    def _logprobs(self, rows: Rows, logits: Tensor, output: "StepOutput") -> Tensor:
        """Make the records [R, 1 + most, 2] int32 of `rows` from logits [R, V]."""
        logprobs = logits.float().log_softmax(dim=-1)
        best, token_ids = logprobs.topk(rows.most_logprobs)
        tokens = output.tokens[rows.at].unsqueeze(1)
        sampled = logprobs.gather(1, tokens.clamp(min=0))
        token_ids, values = torch.cat((tokens, token_ids), dim=1), torch.cat((sampled, best), dim=1)
        return torch.stack((token_ids.int(), values.view(torch.int32)), dim=-1)
