"""Who goes first, by one rule each. As many start as fit, and all else is as in the core.

A running sequence gives way to others only when KV blocks run out: the one that the rule puts last
is preempted then, and starts again before all that have not started yet. So whatever has started
comes to its end. What has not may wait for as long as others come that the rule puts before it.
"""

from nanovllm.engine.sequence import Sequence
from nanovllm.features.policies.shared_prefix import SharedPrefixPolicy


class ShortestFirst(SharedPrefixPolicy):
    """What may generate the fewest tokens goes first; of these, the shortest prompt.

    The mean wait is short, as short requests hold up others least (Smith's rule of 1956).
    """

    def key(self, seq: Sequence) -> tuple[int, int]:
        return seq.num_tokens_left, seq.num_prompt_tokens


class LongestFirst(SharedPrefixPolicy):
    """What may generate the most tokens goes first; of these, the longest prompt.

    All have ended soon, as the fewest are left to run alone at the end (Graham's rule of 1969).
    """

    def key(self, seq: Sequence) -> tuple[int, int]:
        return -seq.num_tokens_left, -seq.num_prompt_tokens


class Priority(SharedPrefixPolicy):
    """The lowest `priority` of `SamplingParams` goes first; of equal ones, the first that came."""

    def key(self, seq: Sequence) -> int:
        return seq.params.priority
