"""Sample for the requests that ask for more than a temperature and a seed.

A step samples for all its rows in one pass (layers/sampler.py). Rows whose SamplingParams ask for
more are then sampled again, with the same noise, from logits that went through (the place of
min_tokens makes no difference)

    structured outputs, allowed tokens and bad words (all as bitmasks) -> logit_bias -> the user's
    logits_processors -> repetition, then frequency and presence penalty -> min_tokens (no token
    that would end the output) -> temperature -> min_p -> top_k -> top_p,

and that token replaces the first. So rows that ask for nothing pay nothing. The first pass is told
of those rows by a temperature below 0: any token will do. A greedy row takes the arg max of what
the penalties leave. Reported log-probabilities are the model's own, before any of this. The order
is the one that vLLM documents for its sampler.

Rows in which the tokens so far decide what may come next wait: the host says it while the device
computes the step (sampling/constraints.py), and `constrain` samples them then. Rows whose logits
are edited (sampling/logits_edits.py) are sampled apart from the others, from a copy in float32.

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
from nanovllm.features.sampling.slots import SlotParams, Starting, limit
from nanovllm.sampling_params import INVALID_TOKEN, SamplingMetadata, SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.batch import LogitsEdits
    from nanovllm.engine.model_runner import ModelRunner, StepOutput


BYTES = 8  # a token id and its log-probability in a record


def apply_penalties(
    logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """logits [R, V] float32 -> the same, penalised.

    counts [R, V] int32: 0 for a token that is neither in prompt nor output, else 1 + how often it
    is in the output. The penalties are [R, 1] float32; 1, 0 and 0 change nothing, to the bit.
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
    alone. top_p is a part of what min_p and top_k keep, such tokens included.
    """
    threshold = logits.amax(dim=-1, keepdim=True) + margin
    if width:
        best = logits.topk(width).values  # likeliest first
        kth = best.gather(1, top_k.clamp(max=width) - 1)
        bound = torch.where(top_k > width, threshold, torch.maximum(threshold, kth))
        kept = best >= bound
        probs = (best / temperatures).masked_fill(~kept, -torch.inf).double().softmax(dim=-1)
        # Beyond `width` only tokens as likely as the last of these may be kept: they count too.
        count, num_beyond = kept.sum(dim=-1, keepdim=True), (logits >= bound).sum(-1, keepdim=True)
        probs = probs / (1 + (num_beyond - count) * probs[:, -1:])
        # The token that crosses the bound is kept: those before it do not reach top_p.
        kept &= (probs.cumsum(dim=-1) - probs < top_p) | (top_p >= 1)
        # Of logits that are no numbers, none is kept.
        last = best.gather(1, kept.sum(dim=-1, keepdim=True).sub(1).clamp(min=0))
        # A row with neither bound may stand beside rows that need fewer tokens in order than it
        # keeps.
        threshold = torch.where(top_k > width, threshold, last)
    return logits >= threshold


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of rows of a step, records [rows, 1 + most, 2] int32: token ids and, as a float32's bits,
    their log-probabilities.

    First comes the sampled token, then the likeliest in order. `asking` has, for each row that
    asks, its place in the step, and where its part of the records' bytes begins and ends.
    """

    asking: list[tuple[int, int, int]]
    records: Tensor

    def read(self) -> dict[int, bytes]:
        """For each place in the step, its record."""
        records = self.records.numpy().tobytes()
        return {place: records[begin:end] for place, begin, end in self.asking}


class Rows:
    """Rows of a step that are sampled together. They are kept as long as the step's slots stay.

    at [R] int64, on the device: their places in the step. None: all of its rows.
    edits: what is done to their logits before they are sampled. None: nothing.
    """

    def __init__(
        self, index: list[int], params: list[SamplingParams], at: Tensor | None, vocab_size: int
    ) -> None:
        """Of the rows at `index`, with these params."""
        self.index, self.at, self.params = index, at, params
        self.edits: RowEdits | None = None
        self.waits = False  # for what the host says of this step
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
    """Knows which batch slots ask for more, and samples for them.

    This one is plain, and right on any device: what a device can do better is a subclass's to say.
    """

    rows_at_once = 64  # bounds the memory that sorting the vocabulary takes

    def __init__(self, runner: "ModelRunner") -> None:
        self.vocab_size = runner.vocab_size
        self.group = runner.group
        self.state = runner.state
        self._upload = runner._upload
        self._sample_tokens = runner._sample_tokens
        self.slots = SlotParams(runner.max_num_seqs + 1, self.vocab_size, self._upload)
        self.edits = SlotEdits(runner.max_num_seqs + 1, self.vocab_size, self._upload)
        self._asked: dict[int, SamplingMetadata] = {}  # by batch slot
        self._seen: Sequence[int] = ()  # the slots of the last step
        self._parts: list[Rows] = []  # their rows that ask for more
        # A step of which rows wait, and the log-probabilities of others.
        self._unfinished: tuple[StepOutput, list[Logprobs]] | None = None

    def warmup(self, output: "StepOutput") -> None:
        """Launch every kernel that a step may launch, for the first row of one."""

    def start(self, starting: Starting) -> None:
        """Sequences start to sample in batch slots; None: temperature and seed are all that one
        asks for.
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
        """Replace the tokens of those among a step's `slots` that ask for more; returns the
        log-probabilities asked for. Rows that wait are left for `constrain`.
        """
        parts = self._among(slots)
        logprobs = [
            part for rows in parts if not rows.waits for part in self._resample(rows, output)
        ]
        self._unfinished = (output, logprobs) if any([rows.waits for rows in parts]) else None
        return logprobs

    def constrain(self, edits: "LogitsEdits") -> tuple["StepOutput", list[Logprobs]]:
        """Sample for the last step's rows that wait; returns its output, with their tokens, and the
        log-probabilities of the whole step.
        """
        assert self._unfinished is not None, "rows wait"
        (output, logprobs), self._unfinished = self._unfinished, None
        for rows in self._parts:
            if rows.waits:
                logprobs = logprobs + self._resample(rows, output, edits)
        return output, logprobs

    def edited_logits(self, edits: "LogitsEdits", places: list[int]) -> Tensor:
        """[len(places), V] float32: what processors of these rows, which wait, are to change."""
        assert self._unfinished is not None, "rows wait"
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
        """Sample for `rows` again if they need it. Returns the log-probabilities that they ask for:
        one object, or none.
        """
        logits = self._logits(rows, output)
        if rows.sample_again:
            self._sample(rows, self._edited(rows, logits, output, edits), output)
        return [Logprobs(rows.asking, self._logprobs(rows, logits, output))] if rows.asking else []

    def _logits(self, rows: Rows, output: "StepOutput") -> Tensor:
        """[R, V], the model's own."""
        logits = output.logits if rows.at is None else output.logits[rows.at]
        if self.group.size > 1:
            logits = self.group.gather_vocab(logits, self.vocab_size)
        return logits

    def _edited(
        self, rows: Rows, logits: Tensor, output: "StepOutput", edits: "LogitsEdits | None"
    ) -> Tensor:
        """logits [R, V], changed where the rows ask for it; the given ones stay as they are."""
        if rows.edits is None:
            return logits
        return self.edits.apply(rows.edits, logits, output.slots[rows.at], edits)

    def _among(self, slots: Sequence[int]) -> list[Rows]:
        """Those of a step's `slots` that ask for more, in parts that are sampled together. They are
        made anew only when the slots change.
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
        """The rows at `index` of a step, in parts of which each is sampled at once. `alone`: all
        other rows ask for nothing, so a subclass may sample for the whole step.
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
        """Sample for `rows` [R] of the step that gave `output`, from logits [R, V], and replace
        their tokens there.
        """
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
            # After the penalties: minus infinity times 0 is no number.
            logits = logits.masked_fill(bars & self.slots.barred[slots], -torch.inf)
        width = max((k for p in rows.params if (k := self._width(p))), default=0)
        if width or any([p.min_p > 0 for p in rows.params]):
            divisors = torch.where(temperatures > 0, temperatures, 1.0)
            kept = keep_likeliest(logits, divisors, top_k, top_p, margin, width)
            logits = logits.masked_fill(~kept, -torch.inf)
        seeds = self.state.seeds[slots]
        temperatures = temperatures.squeeze(1).contiguous()
        tokens, _ = self._sample_tokens(logits, temperatures, seeds, positions)
        # A filter may have hidden that logits were no numbers.
        tokens = torch.where(output.tokens[rows.at] == INVALID_TOKEN, INVALID_TOKEN, tokens)
        if counts is not None:
            token = tokens.clamp(min=0)
            counts[slots, token] = counts[slots, token].clamp(min=1) + 1
        output.tokens[rows.at] = tokens
        self.state.last_tokens[slots] = tokens

    def _width(self, params: SamplingParams) -> int:
        """How many tokens must be put in order for top_k and top_p."""
        k = limit(params, self.vocab_size)
        return k if k < self.vocab_size or params.top_p < 1 else 0

    def _logprobs(self, rows: Rows, logits: Tensor, output: "StepOutput") -> Tensor:
        """The records [R, 1 + most, 2] int32 of `rows`, by logits [R, V]."""
        logprobs = logits.float().log_softmax(dim=-1)
        best, token_ids = logprobs.topk(rows.most_logprobs)
        tokens = output.tokens[rows.at].unsqueeze(1)
        sampled = logprobs.gather(1, tokens.clamp(min=0))
        token_ids, values = torch.cat((tokens, token_ids), dim=1), torch.cat((sampled, best), dim=1)
        return torch.stack((token_ids.int(), values.view(torch.int32)), dim=-1)
