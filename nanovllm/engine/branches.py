"""The prefixes that waiting prompts share: where a snapshot of the state will be used again.

The prompts form a tree, whose nodes are prefixes of whole blocks. A prompt that starts looks there
for the tokens up to which waiting prompts are like it, and then leave it: its branches.
"""

from collections import Counter
from itertools import islice, pairwise

from nanovllm.engine.block_manager import Prefix, chained_hash, make_key
from nanovllm.engine.sequence import Sequence

MOST_BRANCHES = 3  # of one prompt: each ends a chunk of the prompt, and takes a row
MOST_COMPARED = 32  # waiting prompts that are compared within a block


class Branches:
    """The waiting prompts by their prefixes."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        # The content hash of a prefix of whole blocks -> the waiting sequences that begin with it.
        self._members: dict[int, dict[int, Sequence]] = {}
        self._paths: dict[int, list[int]] = {}  # sequence id -> the hashes of its prefixes

    def add(self, seq: Sequence, root: Prefix | None) -> None:
        """Add a waiting sequence whose first block follows `root`. None: it shares no blocks."""
        if root is None:
            return
        size, path = self.block_size, [root.hash]
        for end in range(size, seq.num_reusable, size):  # the last token is computed in any case
            before = Prefix(0, path[-1])
            path.append(chained_hash(before, make_key(before, seq.token_ids[end - size : end])))
        self._paths[seq.id] = path
        for node in path:
            self._members.setdefault(node, {})[seq.id] = seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence."""
        for node in self._paths.pop(seq.id, ()):
            members = self._members[node]
            del members[seq.id]
            if not members:
                del self._members[node]

    def following(self, prefix: Prefix, tail: list[int], length: int) -> list[Sequence]:
        """List waiting sequences that begin with `prefix` and then `tail`, and go on.

        length: the number of tokens of `prefix` and `tail` together.
        The search ends where too many sequences begin with `prefix` and go on with other tokens.
        """
        found: list[Sequence] = []
        num_others, start = 0, length - len(tail)
        for seq in self._members.get(prefix.hash, {}).values():
            if length < seq.num_reusable and seq.token_ids[start:length] == tail:
                found.append(seq)
            else:
                num_others += 1
                if num_others == 2 * MOST_COMPARED:
                    break
        return found

    def find(self, seq: Sequence, position: int) -> set[int]:
        """Find the branches of a waiting sequence beyond `position` tokens.

        Returns the number of tokens before each branch.
        """
        # The sequences that begin with each of its prefixes; at the end, this sequence alone.
        groups = [self._members[node] for node in self._paths.get(seq.id, [])] + [{seq.id: seq}]
        # (tokens, waiting prompts that are like this one up to there and no further)
        leaving: list[tuple[int, int]] = []
        for depth, (group, further) in enumerate(pairwise(groups)):
            start = depth * self.block_size
            if len(group) > len(further) and start + self.block_size > position:
                leaving += self._within_block(seq, start, group, further)
        worth = sorted((count * (tokens - position), tokens) for tokens, count in leaving)
        best = worth[-MOST_BRANCHES:]
        return {tokens for gain, tokens in best if gain > 0}

    def _within_block(
        self, seq: Sequence, start: int, group: dict[int, Sequence], further: dict[int, Sequence]
    ) -> list[tuple[int, int]]:
        """Find where sequences part from `seq` within its block that begins at `start`.

        group: the sequences that share all tokens before the block.
        further: those of them that share the block, too.
        Returns pairs: the number of tokens up to such a place, and of sequences that part there.
        """
        count = len(group) - len(further)
        some = islice(group.values(), 2 * MOST_COMPARED)
        leavers = [one for one in some if one.id not in further][:MOST_COMPARED]
        if not leavers:
            return [(start, count)]
        own = self._tokens_of_block(seq, start)
        runs = Counter(count_equal(own, self._tokens_of_block(one, start)) for one in leavers)
        each = count / len(leavers)  # waiting prompts for one that was compared
        return [(start + run, round(times * each)) for run, times in runs.items()]

    def _tokens_of_block(self, seq: Sequence, start: int) -> list[int]:
        return seq.token_ids[start : min(start + self.block_size, seq.num_reusable - 1)]


def count_equal(one: list[int], other: list[int]) -> int:
    """Count the leading elements that two lists have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # the first `low` are equal; of the first `high`, nobody knows
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
