"""First come, first served, with the leading KV blocks that all decoding sequences share.

Sequences share blocks when all prompts begin alike, as with one long system prompt. Attention may
then read these blocks once for all sequences instead of once for each.
"""

from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.engine.sequence import Sequence


class SharedPrefixPolicy(SchedulingPolicy):
    """First come, first served. Reports the blocks that all decoding sequences share."""

    def __init__(self) -> None:
        # The decoding sequences of the last call, and the answer.
        self._last: tuple[list[Sequence], int] = [], 0

    def shared_prefix_blocks(self, decoding: list[Sequence]) -> int:
        # Block tables only grow at their end, so the answer holds as long as the same sequences
        # decode. A preempted sequence misses at least one step, so the lists differ.
        last, count = self._last
        if decoding != last:
            count = count_common_blocks([seq.block_table for seq in decoding])
            self._last = decoding.copy(), count
        return count


def count_common_blocks(tables: list[list[int]]) -> int:
    """Count the leading blocks that all block tables have in common."""
    if not tables:
        return 0
    first, *others = tables
    count = len(first)
    for table in others:
        while first[:count] != table[:count]:
            count -= 1
        if count == 0:
            break
    return count
