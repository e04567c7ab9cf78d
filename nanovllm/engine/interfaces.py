"""What the engine calls to have texts read and tokens constrained.

Rooms bring both. Without them sequences have no text, and nothing but their logits decides which
tokens may come.
"""

from typing import Any, Protocol

from nanovllm.engine.batch import LogitsEdits
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class Detokenizer(Protocol):
    """Reads the texts of sequences while they run, and finds stop strings in them.

    The engine never looks at a text.
    """

    def add(self, seq: Sequence) -> None:
        """Read this sequence from now on."""

    def update(self, sampled: list[Sequence]) -> list[Sequence]:
        """Read the last token of each sequence; returns those whose text has come to a stop string.

        Sequences that it does not read are left alone.
        """

    def end(self, seq: Sequence) -> None:
        """End the text of this sequence with the tokens before, if it is read."""

    def remove(self, seq: Sequence) -> None:
        """Read this sequence no more, if it is read."""

    def clear(self) -> None:
        """Read no sequence any more."""


class Constraints(Protocol):
    """Says which tokens may come next, for sequences in which that depends on the tokens before.

    The engine asks while the device computes the step whose logits are meant.
    """

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError for what no output can be held to."""

    def make(self, params: SamplingParams) -> Any:
        """What a new sequence keeps as its `constraint`, if params were checked; None if it needs
        none.
        """

    def edits(self, rows: list[tuple[int, Sequence]]) -> LogitsEdits:
        """Which tokens may follow the `token_ids` of each sequence.

        rows: sequences that have a constraint, each after its place among the step's tokens.
        """

    def completed(self, sampled: list[Sequence]) -> list[Sequence]:
        """Those whose constraint says that the output ends with the token they just got."""
