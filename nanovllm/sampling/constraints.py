"""Which tokens may come next, where that depends on the tokens before: the host's part.

A step's forward pass is launched before the tokens of the last one are known. The engine asks here
while it runs, once they are; what the answer does to logits is in logits_edits.py. To add a kind of
constraint: a class with the method of LogitsConstraint, and a line in `Constraints.make`.

Shapes: V vocabulary entries, W = ceil(V / 32) words of a bitmask.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from nanovllm.checks import shown
from nanovllm.engine.batch import LogitsEdits
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling.logits_edits import ALL, num_words
from nanovllm.sampling_params import LogitsProcessor, SamplingParams
from nanovllm.structured_outputs import StructuredOutputsParams


class LogitsConstraint(Protocol):
    """Of one sequence: which tokens may come next."""

    def fill(self, token_ids: list[int], mask: np.ndarray) -> None:
        """Clear in `mask` the bits of all tokens that must not come after `token_ids`.

        token_ids: the sequence's output so far, [] before its first token. From one call to the
        next of a sequence it grows, usually by one token, and nothing in it changes: not when it is
        preempted either.
        mask [W] int32, C-contiguous: bit j of word i stands for token 32 * i + j, and is set when
        it comes, so a `fill` may also write the whole. What bits beyond V hold has no meaning. If
        no bit is left, the call fails with InvalidLogitsError.
        """

    def is_complete(self, token_ids: list[int]) -> bool:
        """Whether the output ends with `token_ids`, for nothing may follow. Asked before `fill`."""


class SequenceConstraint(NamedTuple):
    """What a sequence keeps as its `constraint`."""

    masks: tuple[LogitsConstraint, ...]  # a token must be allowed by all
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

    def is_complete(self, token_ids: list[int]) -> bool:
        return False


class Constraints:
    """Makes the constraints that requests ask for, and asks them step by step."""

    def __init__(
        self,
        vocab_size: int,
        make_matcher: Callable[[StructuredOutputsParams], LogitsConstraint] | None = None,
    ) -> None:
        """`make_matcher`: what holds an output to its form; None: nothing can."""
        self.vocab_size = vocab_size
        self._make_matcher = make_matcher

    def make(self, params: SamplingParams) -> SequenceConstraint | None:
        masks: list[LogitsConstraint] = []
        if words := [word for word in params.barred_sequences if len(word) > 1]:
            masks.append(BadWords(words))
        if isinstance(form := params.structured_outputs, StructuredOutputsParams):
            masks.append(self._matcher(form))
        if not masks and not params.logits_processors:
            return None
        return SequenceConstraint(tuple(masks), tuple(params.logits_processors or ()))

    def _matcher(self, form: StructuredOutputsParams) -> LogitsConstraint:
        if self._make_matcher is None:
            raise ValueError(
                "structured_outputs is given, but nanovllm/structured is not there: leave it out"
            )
        return self._make_matcher(form)

    def completed(self, sampled: list[Sequence]) -> list[Sequence]:
        """Those of the sequences, each with a new token, whose outputs end with it."""
        return [
            seq
            for seq in sampled
            if seq.constraint is not None
            and any([part.is_complete(seq.output_ids) for part in seq.constraint.masks])
        ]

    def edits(self, rows: list[tuple[int, Sequence]]) -> LogitsEdits:
        shape = len(rows), num_words(self.vocab_size)
        masks = np.full(shape, ALL, dtype=np.int32)
        processors: dict[int, Any] = {}
        for (place, seq), mask in zip(rows, masks):
            token_ids, constraint = seq.output_ids, seq.constraint
            for i, part in enumerate(constraint.masks):
                if i == 0:
                    part.fill(token_ids, mask)
                    continue
                own = np.full_like(mask, ALL)
                part.fill(token_ids, own)
                mask &= own
            if constraint.processors:
                processors[place] = partial(process, constraint.processors, token_ids)
        return LogitsEdits([place for place, _ in rows], masks, processors)


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
