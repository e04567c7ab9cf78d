"""The scheduling policy, which decides which sequence starts next and how many may run.

The scheduler alone manages batch slots, the token budget and KV blocks. A policy can therefore make
outputs late but not wrong, as long as it reports shared prefixes truthfully. A sequence that has
started comes to its end under any policy. A waiting sequence may starve if sequences that the
policy puts first keep arriving.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checks import short_repr
from nanovllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler


class SchedulingPolicy:
    """The default policy: first come, first served, as many as fit. Subclasses override methods.

    Shortest prompt first, for example, takes one method:

        class ShortestPromptFirst(SchedulingPolicy):
            def key(self, seq):
                return seq.num_prompt_tokens

    `LLM(scheduling_policy=ShortestPromptFirst())` uses this policy as long as the LLM lives. Every
    step calls the methods other than `key` and `reason`, so they should be quick. A policy must
    change nothing but the order of the list that `order_decodes` sorts. It may read any attribute

    - of a sequence (engine/sequence.py), such as `num_prompt_tokens`, `num_tokens_left`, `params`;
    - of its request (engine/request.py), such as `seq.request.interactive`, `seq.request.added_at`;
    - and these of the scheduler: `waiting`, the sequences that may start, in order; `decoding`,
      those that get a token in each step; `num_running`, how many sequences hold a batch slot,
      those whose prompts are partly computed included; `max_num_seqs`, `enough_seqs`, `blocks`.
    """

    def key(self, seq: Sequence) -> Any:
        """Return the key of a new sequence. Sequences start in order of their keys, smallest first.

        Sequences with equal keys start in order of arrival. Preempted sequences and the further
        completions of a prompt that has been computed start before all others. When the KV blocks
        run out, the scheduler preempts paused sequences, then the running sequence with the largest
        key. Called once, when the sequence arrives.
        """
        return seq.id

    def running_limit(self, scheduler: Scheduler) -> int:
        """Return how many sequences may hold a batch slot. Waiting ones start up to this number.

        Called once in each step in which sequences wait, before any of them starts. Fewer sequences
        start if slots, tokens or blocks run out. None starts if the limit is
        `scheduler.num_running`, but one sequence may always run.
        """
        return scheduler.max_num_seqs

    def started(self, seq: Sequence) -> None:
        """Hear that a sequence got its slot and blocks. `seq.num_computed` tokens were cached."""

    def reason(self, seq: Sequence) -> str:
        """Return a short phrase that says why a sequence starts before the others that wait.

        Called only for a trace, when the sequence starts. A policy without a base class may lack
        this method.
        """
        if type(self).key is SchedulingPolicy.key:
            return "first come, first served"
        return f"smallest key of {type(self).__name__}: {short_repr(seq.order[0])}"

    def order_decodes(self, decoding: list[Sequence]) -> None:
        """Sort the decoding sequences in place, in the order in which steps should run them.

        Called when sequences have joined the list. Each step adds one token to every sequence.
        """

    def shared_prefix_blocks(self, decoding: list[Sequence]) -> int:
        """Return how many leading KV blocks all decoding sequences share. 0 is always right.

        Called in every step. Attention may read shared blocks once for all sequences.
        """
        return 0
