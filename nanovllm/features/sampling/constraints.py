"""Which tokens may come next, where that depends on the tokens before: the host's part.

A step's forward pass is launched before the tokens of the last one are known. The engine asks here
while it runs, once they are; what the answer does to logits is in logits_edits.py. To add a kind of
constraint: a class with the method of LogitsConstraint, and a line in `Constraints.make`.

Shapes: R rows of a step, V vocabulary entries, W = ceil(V / 32) words of a bitmask.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from nanovllm.checks import shown
from nanovllm.engine.batch import LogitsEdits
from nanovllm.engine.sequence import Sequence
from nanovllm.features.sampling.logits_edits import ALL, num_words
from nanovllm.sampling_params import LogitsProcessor, SamplingParams, StructuredOutputsParams


class LogitsConstraint(Protocol):
    """Of one sequence: which tokens may come next."""

    def fill(self, token_ids: list[int], mask: np.ndarray) -> None:
        """Clear in `mask` the bits of all tokens that must not come after `token_ids`.

        token_ids: the sequence's output so far, [] before its first token. From one call to the
        next of a sequence it grows, usually by one token, and nothing in it changes: not when it is
        preempted either.
        mask [W] int32, C-contiguous: bit j of word i stands for token 32 * i + j. What bits beyond
        V hold has no meaning. If no bit is left, the sequence ends with an error.
        """


class Form(Protocol):
    """Of one sequence: what its output must be, and how far it is."""

    def is_complete(self, token_ids: list[int]) -> bool:
        """Whether the output ends with `token_ids`, for nothing may follow."""


class Forms(Protocol):
    """Makes forms, and says what they allow: of all rows at once, for each may take long."""

    def compile(self, params: StructuredOutputsParams) -> Any:
        """Raises ValueError for what no output can be held to."""

    def matcher(self, params: StructuredOutputsParams) -> Form:
        """A new one, of what was compiled."""

    def fill(self, rows: list[tuple[int, Any, list[int]]], masks: np.ndarray) -> None:
        """For each (row, form, output so far) set bits in the row's mask as that form allows.

        masks [R, W] int32, C-contiguous: of these rows nothing is kept. Outputs grow as those of a
        LogitsConstraint do.
        """


class SequenceConstraint(NamedTuple):
    """What a sequence keeps as its `constraint`. A token must be allowed by all of it."""

    form: Form | None
    masks: tuple[LogitsConstraint, ...]
    processors: tuple[LogitsProcessor, ...]


class BadWords:
    """Bars the last token of each word after the others, where they are the output's last.

    words: two or more token ids each.
    """

    def __init__(self, words: list[tuple[int, ...]]) -> None:
        # By the last but one: few of many words are looked at.
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            self._after.setdefault(word[-2], []).append(word)

    def fill(self, token_ids: list[int], mask: np.ndarray) -> None:
        bits = mask.view(np.uint32)  # an int32 has no room for the highest
        for *begin, last in self._after.get(token_ids[-1], ()) if token_ids else ():
            if token_ids[-len(begin) :] == begin:
                bits[last // 32] &= ~np.uint32(1 << last % 32)


class Constraints:
    """Makes the constraints that requests ask for, and asks them step by step."""

    def __init__(self, vocab_size: int, forms: Forms | None = None) -> None:
        """`forms`: what holds outputs to their forms; None: nothing can."""
        self.vocab_size = vocab_size
        self.forms = forms
        self._masks = np.empty((0, num_words(vocab_size)), dtype=np.int32)

    def check(self, params: SamplingParams) -> None:
        if isinstance(asked := params.structured_outputs, StructuredOutputsParams):
            assert self.forms is not None, "only tests make constraints without forms"
            self.forms.compile(asked)

    def make(self, params: SamplingParams) -> SequenceConstraint | None:
        form, masks = None, list[LogitsConstraint]()
        if isinstance(asked := params.structured_outputs, StructuredOutputsParams):
            assert self.forms is not None, "it was checked"
            form = self.forms.matcher(asked)
        if words := [word for word in params.barred_sequences if len(word) > 1]:
            masks.append(BadWords(words))
        if form is None and not masks and not params.logits_processors:
            return None
        return SequenceConstraint(form, tuple(masks), tuple(params.logits_processors or ()))

    def completed(self, sampled: list[Sequence]) -> list[Sequence]:
        """Those of the sequences, each with a new token, whose outputs end with it."""
        return [
            seq
            for seq in sampled
            if seq.constraint is not None
            and seq.constraint.form is not None
            and seq.constraint.form.is_complete(seq.output_ids)
        ]

    def edits(self, rows: list[tuple[int, Sequence]]) -> LogitsEdits:
        masks = self._all_allowed(len(rows))
        forms = [
            (row, seq.constraint.form, seq.output_ids)
            for row, (_, seq) in enumerate(rows)
            if seq.constraint.form is not None
        ]
        if forms:
            assert self.forms is not None, "it made them"
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
        """Masks [count, W], in the memory of the last call's, whose pages are there already."""
        if len(self._masks) < count:
            self._masks = np.empty((count, num_words(self.vocab_size)), dtype=np.int32)
        masks = self._masks[:count]
        masks.fill(ALL)
        return masks


def process(functions: tuple[LogitsProcessor, ...], token_ids: list[int], logits: Tensor) -> Tensor:
    """logits [V] -> what the functions make of them, one after the other."""
    shape = logits.shape
    for i, function in enumerate(functions):
        given: Any = function(token_ids, logits)
        what = None
        if not isinstance(given, Tensor):
            what = shown(given)
        elif given.shape != shape:
            what = str(tuple(given.shape))
        elif not given.is_floating_point():  # such as a mask, in place of what it masks
            what = str(given.dtype)
        if what is not None:
            raise TypeError(
                f"logits_processors[{i}] returned {what}: return a tensor of logits {tuple(shape)}"
            )
        logits = given
    return logits
