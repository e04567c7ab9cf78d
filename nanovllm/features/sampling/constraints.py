"""Constraints: which tokens may come next, where that depends on the tokens before.

A step's forward pass is launched before the tokens of the previous step are known. While the device
computes, the engine commits the previous step and asks `Constraints.edits` what the new step's rows
may sample. This file is the host's part; logits_edits.py applies the answer to logits. To add a
kind of constraint, write a class with the method of LogitsConstraint, and make an object of it in
`Constraints.make`.

Shapes: R rows of a step, V vocabulary entries, W = ceil(V / 32) words of a bitmask.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from nanovllm.checks import short_repr
from nanovllm.engine.batch import LogitsEdits
from nanovllm.engine.sequence import Sequence
from nanovllm.features.sampling.logits_edits import ALL, num_words
from nanovllm.sampling_params import LogitsProcessor, SamplingParams, StructuredOutputsParams


class LogitsConstraint(Protocol):
    """A rule that says which tokens may come next in one sequence."""

    def fill(self, token_ids: list[int], mask: np.ndarray) -> None:
        """Clear in `mask` the bits of all tokens that must not come after `token_ids`.

        Args:
            token_ids: the sequence's output so far, [] before its first token. From one call to the
                next it grows, usually by one token. Earlier tokens never change, not even when the
                sequence is preempted.
            mask: [W] int32, C-contiguous. Bit j of word i stands for token 32 * i + j. Bits beyond
                V have no meaning. If no bit is left, the sequence ends with an error.
        """


class Form(Protocol):
    """The form that one sequence's output must have, and how far the output has come in it."""

    def is_complete(self, token_ids: list[int]) -> bool:
        """Return whether the output `token_ids` is complete, so that nothing may follow."""

    def may_end(self, token_ids: list[int]) -> bool:
        """Tell whether the output may end with `token_ids`."""


class Forms(Protocol):
    """A maker of forms. It fills the masks of all rows in one call, since each may take long."""

    def compile(self, params: StructuredOutputsParams) -> Any:
        """Compile a request's form. Raises ValueError for a form that cannot be enforced."""

    def matcher(self, params: StructuredOutputsParams) -> Form:
        """Make a new Form for one sequence from the compiled form of `params`."""

    def fill(self, rows: list[tuple[int, Any, list[int]]], masks: np.ndarray) -> None:
        """Fill the mask of each (row, form, output so far) with the tokens that its form allows.

        masks [R, W] int32, C-contiguous: these rows are overwritten. Outputs grow as those of a
        LogitsConstraint do.
        """


class LeastLength:
    """Bars the tokens that would end an output of a form before it has `min_tokens`, unless the
    form lets it end and nothing else may follow.
    """

    def __init__(
        self, form: Form, min_tokens: int, stop_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._form, self._min_tokens = form, min_tokens
        ends = np.zeros(num_words(vocab_size) * 32, dtype=bool)
        ends[[*stop_ids]] = True
        ends[vocab_size:] = True  # these bits have no meaning
        self._ends = np.packbits(ends, bitorder="little").view(np.int32)

    def fill(self, token_ids: list[int], mask: np.ndarray) -> None:
        if len(token_ids) >= self._min_tokens:
            return
        going_on = mask & ~self._ends
        if going_on.any() or not self._form.may_end(token_ids):
            mask[:] = going_on


class SequenceConstraint(NamedTuple):
    """The constraints of one sequence, its `constraint`. All parts must allow a token."""

    form: Form | None
    masks: tuple[LogitsConstraint, ...]
    processors: tuple[LogitsProcessor, ...]


class BadWords:
    """A constraint that bars a word's last token where the output ends with its other tokens.

    `words` have two or more token ids each.
    """

    def __init__(self, words: list[tuple[int, ...]]) -> None:
        # Last token but one -> words, so that a step looks at few of many words.
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            self._after.setdefault(word[-2], []).append(word)

    def fill(self, token_ids: list[int], mask: np.ndarray) -> None:
        bits = mask.view(np.uint32)  # int32 has no room for bit 31 as a positive number
        for *begin, last in self._after.get(token_ids[-1], ()) if token_ids else ():
            if token_ids[-len(begin) :] == begin:
                bits[last // 32] &= ~np.uint32(1 << last % 32)


class Constraints:
    """The constraints of all requests: checks and makes them, and fills a step's bitmasks."""

    def __init__(
        self, vocab_size: int, stop_ids: frozenset[int] = frozenset(), forms: Forms | None = None
    ) -> None:
        """Make an object without sequences.

        Args:
            stop_ids: the model's end-of-sequence tokens, which end every output.
            forms: enforces structured outputs; None: none can be asked for.
        """
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids
        self.forms = forms
        self._masks = np.empty((0, num_words(vocab_size)), dtype=np.int32)

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError if the form of structured_outputs cannot be enforced."""
        if isinstance(asked := params.structured_outputs, StructuredOutputsParams):
            assert self.forms is not None, "only tests make Constraints without forms"
            self.forms.compile(asked)

    def make(self, params: SamplingParams) -> SequenceConstraint | None:
        """Make the constraint of a new sequence, or return None if it needs none."""
        form, masks = None, list[LogitsConstraint]()
        if isinstance(asked := params.structured_outputs, StructuredOutputsParams):
            assert self.forms is not None, "check() has passed"
            form = self.forms.matcher(asked)
        if words := [word for word in params.barred_sequences if len(word) > 1]:
            masks.append(BadWords(words))
        if form is not None and params.min_tokens:  # the last: it must know what the others leave
            stop_ids = self.stop_ids.union(params.stop_token_ids or ())
            masks.append(LeastLength(form, params.min_tokens, stop_ids, self.vocab_size))
        if form is None and not masks and not params.logits_processors:
            return None
        return SequenceConstraint(form, tuple(masks), tuple(params.logits_processors or ()))

    def completed(self, sampled: list[Sequence]) -> list[Sequence]:
        """Return the sequences among `sampled` whose form is complete with their new token."""
        return [
            seq
            for seq in sampled
            if seq.constraint is not None
            and seq.constraint.form is not None
            and seq.constraint.form.is_complete(seq.output_ids)
        ]

    def edits(self, rows: list[tuple[int, Sequence]]) -> LogitsEdits:
        """Return what the constrained rows of a step may sample.

        `rows` has (place in the step, sequence) for each of these rows.
        """
        masks = self._all_allowed(len(rows))
        forms = [
            (row, seq.constraint.form, seq.output_ids)
            for row, (_, seq) in enumerate(rows)
            if seq.constraint.form is not None
        ]
        if forms:
            assert self.forms is not None, "forms come from self.forms"
            self.forms.fill(forms, masks)
        processors: dict[int, Any] = {}
        for (place, seq), mask in zip(rows, masks):
            token_ids, constraint = seq.output_ids, seq.constraint
            for part in constraint.masks:
                part.fill(token_ids, mask)
            if constraint.processors:
                processors[place] = partial(process, constraint.processors, token_ids)
        return LogitsEdits([place for place, _ in rows], masks, processors)

    def _all_allowed(self, count: int) -> np.ndarray:
        """Return masks [count, W] that allow everything.

        They lie in the memory of the last call's masks, whose pages the system has already mapped.
        """
        if len(self._masks) < count:
            self._masks = np.empty((count, num_words(self.vocab_size)), dtype=np.int32)
        masks = self._masks[:count]
        masks.fill(ALL)
        return masks


def process(functions: tuple[LogitsProcessor, ...], token_ids: list[int], logits: Tensor) -> Tensor:
    """Apply a user's logits processors one after the other: logits [V] -> logits [V]."""
    shape = logits.shape
    for i, function in enumerate(functions):
        given: Any = function(token_ids, logits)
        what = None
        if not isinstance(given, Tensor):
            what = short_repr(given)
        elif given.shape != shape:
            what = str(tuple(given.shape))
        elif not given.is_floating_point():  # for example a bool mask instead of masked logits
            what = str(given.dtype)
        if what is not None:
            raise TypeError(
                f"logits_processors[{i}] returned {what}: return a tensor of logits {tuple(shape)}"
            )
        logits = given
    return logits
