"""Resampling for requests that ask for more than a temperature and a seed.

A step samples all its rows in one pass (layers/sampler.py). Rows whose SamplingParams ask for more
are then sampled again, with the same noise, from logits that went through

    structured outputs, allowed tokens and bad words (all as bitmasks), then logit_bias, then the
    user's logits_processors (logits_edits.py),
    repetition, then frequency and presence penalty, then min_tokens, which bars the tokens that
    would end the output (penalties.py),
    temperature, then min_p, then top_k, then top_p (filters.py),

and the new token replaces the first one. So rows that ask for nothing more pay nothing. A
temperature below 0 tells the first pass that a row is sampled again, so that any token will do. A
greedy row takes the arg max of the logits after the penalties. Reported log-probabilities are the
model's own, before any of these edits. The order is the one that vLLM documents for its sampler
(min_tokens may stand anywhere in it with the same result).

Some rows have constraints that depend on the tokens so far. The host computes these while the
device computes the step (constraints.py), and then `sample_constrained` samples the rows. Rows
whose logits are edited are sampled apart from the others, from a float32 copy of their logits.

Shapes: R rows that ask for more, among the B rows of a step; V vocabulary entries.
"""

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.features.sampling.filters import keep_likeliest, num_to_sort, num_top_k
from nanovllm.features.sampling.logits_edits import RowEdits, SlotEdits
from nanovllm.features.sampling.logprobs import BYTES, SampledLogprobs, make_records
from nanovllm.features.sampling.penalties import TokenTables, apply_penalties
from nanovllm.features.sampling.slot_params import SlotParams, Starting
from nanovllm.sampling_params import INVALID_TOKEN, SamplingMetadata, SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.batch import LogitsEdits
    from nanovllm.engine.model_runner import ModelRunner, StepOutput


class Rows:
    """Rows of a step that are sampled together.

    They are kept from step to step as long as the steps have the same batch slots.

    Attributes:
        index: places of the rows in the step.
        at: the same places, [R] int64 on the device; None: all rows of the step.
        params: the SamplingParams of the rows.
        edits: the edits of their logits before they are sampled; None: none.
        is_constrained: whether they are sampled only when the host's LogitsEdits have come.
        sample_again: whether more than temperature and seed decides which tokens are sampled.
        asking: see SampledLogprobs.
    """

    def __init__(
        self, index: list[int], params: list[SamplingParams], at: Tensor | None, vocab_size: int
    ) -> None:
        """Make the group of the rows at `index` of a step, with these params."""
        self.index, self.at, self.params = index, at, params
        self.edits: RowEdits | None = None
        self.is_constrained = False
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
        self.batch_state = runner.batch_state
        self._upload = runner._upload
        self._sample_tokens = runner._sample_tokens
        num_slots = runner.max_num_seqs + 1
        self.slot_params = SlotParams(num_slots, self.vocab_size, self._upload)
        device = self.slot_params.table.device
        self.token_tables = TokenTables(num_slots, self.vocab_size, device, self._upload)
        self.edits = SlotEdits(num_slots, self.vocab_size, self._upload)
        self._metadata: dict[int, SamplingMetadata] = {}  # of batch slots that ask for more
        self._last_slots: Sequence[int] = ()  # of the last step's rows
        self._groups: list[Rows] = []  # the rows of the last step that ask for more
        # The step that has constrained rows, and the log-probabilities of its other rows.
        self._unfinished: tuple[StepOutput, list[SampledLogprobs]] | None = None

    def warmup(self, output: "StepOutput") -> None:
        """Launch every kernel that a step may launch, on the first row of a step's output."""

    def start(self, starting: Starting) -> None:
        """Note what sequences ask for that start to sample in batch slots.

        `starting` has (slot, metadata); metadata is None for a sequence that asks for a temperature
        and a seed alone.
        """
        asked = []
        for slot, metadata in starting:
            self._metadata.pop(slot, None)
            if metadata is not None:
                self._metadata[slot] = metadata
                asked.append((slot, metadata))
        if asked:
            slots = self._upload(np.array([slot for slot, _ in asked], dtype=np.int64))
            self.slot_params.start(asked, slots, self.batch_state.temperatures)
            self.token_tables.start(asked, slots)
            self.edits.start(asked)
        self._last_slots, self._groups = (), []

    def resample(self, slots: Sequence[int], output: "StepOutput") -> list[SampledLogprobs]:
        """Replace the tokens of rows that ask for more, and return the log-probabilities asked for.

        `slots` are the batch slots of the step's rows. Constrained rows are left for
        `sample_constrained`.
        """
        groups = self._group(slots)
        logprobs: list[SampledLogprobs] = []
        for rows in groups:
            if not rows.is_constrained:
                logprobs += self._resample(rows, output)
        has_constrained = any([rows.is_constrained for rows in groups])
        self._unfinished = (output, logprobs) if has_constrained else None
        return logprobs

    def sample_constrained(
        self, edits: "LogitsEdits"
    ) -> tuple["StepOutput", list[SampledLogprobs]]:
        """Sample the last step's constrained rows by the host's `edits`.

        Returns the step's output with their tokens, and the log-probabilities of the whole step.
        """
        assert self._unfinished is not None, "the step has constrained rows"
        (output, logprobs), self._unfinished = self._unfinished, None
        for rows in self._groups:
            if rows.is_constrained:
                logprobs = logprobs + self._resample(rows, output, edits)
        return output, logprobs

    def edited_logits(self, edits: "LogitsEdits", places: list[int]) -> Tensor:
        """Return the logits [len(places), V] float32 that processors of constrained rows get."""
        assert self._unfinished is not None, "the step has constrained rows"
        output, _ = self._unfinished
        edited: dict[int, Tensor] = {}
        for rows in self._groups:
            if rows.is_constrained:
                logits = self._edited(rows, self._logits(rows, output), output, edits)
                edited |= dict(zip(rows.index, logits))
        return torch.stack([edited[place] for place in places])

    def _resample(
        self, rows: Rows, output: "StepOutput", edits: "LogitsEdits | None" = None
    ) -> list[SampledLogprobs]:
        """Sample `rows` again if they need it.

        Returns the log-probabilities that the rows ask for: a list of one object, or of none.
        """
        logits = self._logits(rows, output)
        if rows.sample_again:
            self._sample(rows, self._edited(rows, logits, output, edits), output)
        if not rows.asking:
            return []
        return [SampledLogprobs(rows.asking, self._logprobs(rows, logits, output))]

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

    def _group(self, slots: Sequence[int]) -> list[Rows]:
        """Group a step's rows that ask for more by what is sampled together.

        `slots` are the batch slots of the step's rows. New groups are made only if these change.
        """
        if self._metadata and slots != self._last_slots:
            asked = self._metadata
            index = [i for i, slot in enumerate(slots) if slot in asked]
            of_kind: dict[tuple[bool, bool], list[int]] = {}
            for i in index:
                metadata = asked[slots[i]]
                kind = (
                    metadata.is_constrained,
                    metadata.is_constrained or metadata.params.edits_logits,
                )
                of_kind.setdefault(kind, []).append(i)
            self._groups = []
            for (is_constrained, edited), index in of_kind.items():
                alone = len(of_kind) == 1 and not edited
                groups = self._split(index, [asked[slots[i]].params for i in index], alone)
                for rows in groups:
                    rows.is_constrained = is_constrained
                    if edited:
                        rows.sample_again = True
                        rows.edits = self.edits.of(rows.index, [slots[i] for i in rows.index])
                self._groups += groups
            self._last_slots = slots
        return self._groups

    def _split(self, index: list[int], params: list[SamplingParams], alone: bool) -> list[Rows]:
        """Split the rows at `index` of a step into groups of at most `rows_at_once` rows.

        `alone` says that no other row of the step asks for more, and that none of these has edits.
        Then a subclass may sample the whole step instead.
        """
        order = sorted(range(len(index)), key=lambda i: num_top_k(params[i], self.vocab_size))
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
        columns = self.slot_params.params[slots].split(1, dim=1)
        temperatures, top_p, margin, repetition, frequency, presence = columns
        top_k, least_length, _ = self.slot_params.limits[slots].split(1, dim=1)
        counts, barred = self.token_tables.counts, self.token_tables.barred
        penalized = counts is not None and any([p.penalizes for p in rows.params])
        if counts is not None and penalized:
            logits = apply_penalties(
                logits,
                counts[slots],
                repetition=repetition,
                frequency=frequency,
                presence=presence,
            )
        if barred is not None and any([p.min_tokens for p in rows.params]):
            bars = positions.unsqueeze(1) < least_length
            # Bar after the penalties, because minus infinity times 0 is NaN.
            logits = logits.masked_fill(bars & barred[slots], -torch.inf)
        width = max([num_to_sort(p, self.vocab_size) for p in rows.params])
        if width or any([p.min_p > 0 for p in rows.params]):
            kept = keep_likeliest(
                logits,
                temperatures=torch.where(temperatures > 0, temperatures, 1.0),
                top_k=top_k,
                top_p=top_p,
                margin=margin,
                width=width,
            )
            logits = logits.masked_fill(~kept, -torch.inf)
        tokens, _ = self._sample_tokens(
            logits,
            temperatures=temperatures.squeeze(1).contiguous(),
            seeds=self.batch_state.seeds[slots],
            positions=positions,
        )
        # A filter may have hidden NaN logits, which the first pass has found.
        tokens = torch.where(output.tokens[rows.at] == INVALID_TOKEN, INVALID_TOKEN, tokens)
        if penalized:
            self.token_tables.count(slots, tokens)
        output.tokens[rows.at] = tokens
        self.batch_state.last_tokens[slots] = tokens

    def _logprobs(self, rows: Rows, logits: Tensor, output: "StepOutput") -> Tensor:
        """Make the records [R, 1 + most, 2] int32 of `rows` from logits [R, V]."""
        return make_records(logits, output.tokens[rows.at], rows.most_logprobs)
