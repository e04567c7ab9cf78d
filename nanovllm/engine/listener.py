"""The events of an engine, for those that watch it: the metrics and the trace."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.request import Request
    from nanovllm.engine.sequence import Sequence
    from nanovllm.outputs import StepRecord


class EngineListener:
    """The events that an engine, its scheduler and its block manager report.

    Each method does nothing; a listener overrides the methods of the events that it wants. A
    listener must not change its arguments, and must not call the engine.
    """

    def request_added(self, request: "Request") -> None:
        """Hear of a new request, before it is queued."""

    def sequence_started(
        self, seq: "Sequence", num_shared_blocks: int, num_cached: int, why: Callable[[], str]
    ) -> None:
        """Hear that a sequence got a batch slot and its first blocks.

        The first `num_shared_blocks` blocks are shared; the first `num_cached` tokens are cached.
        `why()` says in a phrase why this sequence started before the others that wait. The phrase
        is made only for a listener that calls it.
        """

    def blocks_grown(self, seq: "Sequence", blocks: list[int]) -> None:
        """Hear that a sequence whose prompt is partly computed got more blocks."""

    def blocks_given_back(self, seq: "Sequence") -> None:
        """Hear that a sequence released the leading blocks that its window has passed."""

    def sequence_preempted(self, seq: "Sequence") -> None:
        """Hear that a sequence is about to be preempted. It still has its batch slot and blocks."""

    def sequence_released(self, seq: "Sequence") -> None:
        """Hear that a sequence has released its batch slot and its blocks."""

    def sequence_paused(self, seq: "Sequence") -> None:
        """Hear that a sequence does not run until it is resumed."""

    def sequence_resumed(self, seq: "Sequence") -> None:
        """Hear that a paused sequence may run again."""

    def sequence_finished(self, seq: "Sequence") -> None:
        """Hear that a sequence has ended. Its finish_reason says how."""

    def snapshot_saved(self, seq: "Sequence", num_tokens: int) -> None:
        """Hear that the recurrent state after the first `num_tokens` tokens of a sequence is kept
        for later prompts.
        """

    def block_registered(self, block: int, prefix_hash: int) -> None:
        """Hear that the prefix cache knows a block from now on, under this content hash."""

    def block_evicted(self, block: int) -> None:
        """Hear that the prefix cache has forgotten a block."""

    def step_begins(self) -> None:
        """Hear that the engine begins to plan a step, or to abort requests."""

    def step_scheduled(self, batch: "Batch") -> None:
        """Hear the plan of the next step."""

    def step_recorded(self, step: "StepRecord") -> None:
        """Hear the figures of the step that is launched next, or of a step with nothing to do."""

    def step_launched(self, step: "StepRecord") -> None:
        """Hear that the step has been launched on the device."""

    def tokens_arrived(self) -> None:
        """Hear that the tokens of the oldest step in flight have been read."""

    def tokens_committed(self, num_tokens: int) -> None:
        """Hear that `num_tokens` tokens have been appended to their sequences."""

    def engine_reset(self) -> None:
        """Hear that every request and the prefix cache are about to be dropped."""

    def engine_closed(self) -> None:
        """Hear that the engine has given back its memory."""


NOBODY = EngineListener()


class Listeners(EngineListener):
    """Several listeners as one. Each event goes to the listeners that override it, in order."""

    def __init__(self, *listeners: EngineListener) -> None:
        for event, default in vars(EngineListener).items():
            if event.startswith("__"):
                continue
            wanting = [one for one in listeners if getattr(type(one), event) is not default]
            if len(wanting) == 1:
                setattr(self, event, getattr(wanting[0], event))
            elif wanting:
                setattr(self, event, partial(_tell, [getattr(one, event) for one in wanting]))


def _tell(methods: list[Any], *arguments: Any) -> None:
    """Call all methods with the same arguments."""
    for method in methods:
        method(*arguments)
