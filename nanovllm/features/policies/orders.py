"""Policies that are one rule each: who starts first. As many sequences start as fit.

A running sequence is preempted only when KV blocks run out: then the one that the rule puts last.
It starts again before all that have not started yet, so whatever has started comes to its end. A
sequence that has not started may wait as long as others come that the rule puts before it.
"""

from nanovllm.engine.sequence import Sequence
from nanovllm.features.policies.shared_prefix import SharedPrefixPolicy


class ShortestFirst(SharedPrefixPolicy):
    """The sequence that may generate the fewest tokens first; in a tie, the shortest prompt.

    The mean wait is short, because short requests hold up others least (Smith's rule, 1956).
    """

    def key(self, seq: Sequence) -> tuple[int, int]:
        return seq.num_tokens_left, seq.num_prompt_tokens

    def reason(self, seq: Sequence) -> str:
        return f"shortest first: at most {seq.num_tokens_left:,} new tokens"


class LongestFirst(SharedPrefixPolicy):
    """The sequence that may generate the most tokens first; in a tie, the longest prompt.

    The last one ends soon, because few are left to run alone at the end (Graham's rule, 1969).
    """

    def key(self, seq: Sequence) -> tuple[int, int]:
        return -seq.num_tokens_left, -seq.num_prompt_tokens

    def reason(self, seq: Sequence) -> str:
        return f"longest first: at most {seq.num_tokens_left:,} new tokens"


class Priority(SharedPrefixPolicy):
    """The lowest `priority` of SamplingParams first; in a tie, the first that came."""

    def key(self, seq: Sequence) -> int:
        return seq.params.priority

    def reason(self, seq: Sequence) -> str:
        return f"lowest number first: priority {seq.params.priority}"
