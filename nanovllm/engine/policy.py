"""Who is next, and how many may run: what the scheduler leaves to a policy.

The scheduler alone sees to batch slots, the token budget and KV blocks. A policy can therefore make
answers late but not wrong, as long as what it says of shared prefixes is true. What has started
comes to its end whatever the policy; what has not may starve, if others come all the time that the
policy puts first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler


class SchedulingPolicy:
    """First come, first served, as many as fit. A subclass overrides what it wants otherwise.

    Shortest prompt first, for example, is one method:

        class ShortestPromptFirst(SchedulingPolicy):
            def key(self, seq):
                return seq.num_prompt_tokens

    `LLM(scheduling_policy=ShortestPromptFirst())` runs by it, for all of its life. All but `key` is
    asked in every step: be quick. Of a sequence (engine/sequence.py) a policy may read what it
    likes, such as `num_prompt_tokens`, `num_tokens_left`, `params`, `interactive` and `added_at`;
    of the scheduler `waiting`, `running`, `num_running`, `max_num_seqs`, `enough_seqs` and
    `blocks`. It changes nothing but the order of the list that it is given to sort.
    """

    def key(self, seq: Sequence) -> Any:
        """Sequences start in the order of their keys, the smallest first.

        Equal keys start in order of arrival. When KV blocks run out, the running sequence with the
        largest key is preempted. Asked once, when the sequence arrives.
        """
        return seq.id

    def running_limit(self, scheduler: Scheduler) -> int:
        """How many sequences may hold a batch slot: waiting ones start until there are so many.

        Asked once in each step in which sequences wait, before any of them starts. Fewer start if
        slots, tokens or blocks run out. None start if it is `scheduler.num_running`, but one may
        always run.
        """
        return scheduler.max_num_seqs

    def started(self, seq: Sequence) -> None:
        """Told that a sequence got its slot and blocks; `seq.num_computed` tokens were cached."""

    def order_decodes(self, running: list[Sequence]) -> None:
        """Sort the decoding sequences, in place, as the steps should run them.

        Called when some have joined. Each step adds one token to every one of them.
        """

    def shared_prefix_blocks(self, decoding: list[Sequence]) -> int:
        """How many leading KV blocks all decoding sequences have in common. 0 is always right.

        Asked in every step. Attention may read such blocks once for all sequences.
        """
        return 0
