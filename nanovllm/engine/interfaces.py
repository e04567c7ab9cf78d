"""The interfaces of the parts that `build.py` gives to the engine, as the engine calls them.

Without a detokenizer, sequences have no text; without constraints, nothing but the logits decides
which tokens may come.
"""

from collections.abc import Callable
from typing import Any, Protocol

from nanovllm.engine.batch import Batch, LogitsEdits, RunnerInfo, StepResult
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class TokensInFlight(Protocol):
    """The tokens of a step that has been launched and may still run."""

    def wait(self) -> StepResult:
        """Wait until the step has run, and return its result."""


class Runner(Protocol):
    """The runner of a model. ModelRunner is one; TensorParallelRunner stands for those of several
    ranks.
    """

    @property
    def info(self) -> RunnerInfo:
        """The figures of this runner that the engine and users see."""

    def launch(self, batch: Batch) -> TokensInFlight:
        """Launch a step, and return its tokens in batch order."""

    def sample_constrained(self, edits: LogitsEdits) -> TokensInFlight:
        """Sample the constrained rows of the last step: see SamplingMetadata.is_constrained.

        The returned object replaces that of `launch`.
        """

    def on_all_ranks(self, task: Callable[..., None], *args: Any) -> None:
        """Call `task(runner, *args)` with the ModelRunner of each rank."""

    def synchronize(self) -> None:
        """Wait until all launched steps have run."""

    def close(self) -> None:
        """Give back the memory of the device."""


class Detokenizer(Protocol):
    """The reader of the texts of running sequences, which also finds stop strings in them.

    The engine never looks at a text.
    """

    def add(self, seq: Sequence) -> None:
        """Begin to read the text of a sequence."""

    def update(self, sampled: list[Sequence]) -> list[Sequence]:
        """Read the last token of each sequence.

        Returns the sequences whose text has reached a stop string. Sequences that were not added
        are ignored.
        """

    def end(self, seq: Sequence) -> None:
        """End the text of a sequence with the tokens that it has, if it was added."""

    def remove(self, seq: Sequence) -> None:
        """Stop reading the text of a sequence, if it was added."""

    def clear(self) -> None:
        """Remove all sequences."""


class Constraints(Protocol):
    """The source of the allowed tokens, for sequences in which these depend on the tokens before.

    The engine asks for the allowed tokens of a step while the device computes that step's logits.
    """

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError for a constraint that no output can be held to."""

    def make(self, params: SamplingParams) -> Any:
        """Make the `constraint` of a new sequence from checked parameters. None: it needs none."""

    def edits(self, rows: list[tuple[int, Sequence]]) -> LogitsEdits:
        """Return the edits that leave each sequence the tokens that may follow its `token_ids`.

        rows: Pairs of an index among the step's tokens and its sequence, which has a constraint.
        """

    def completed(self, sampled: list[Sequence]) -> list[Sequence]:
        """Return the sequences whose constraint says that their last token completes the output."""
