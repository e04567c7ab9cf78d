"""The prefixes that waiting prompts share: where a snapshot of the state will be used again.

The prompts form a tree, whose nodes are prefixes of whole blocks. A prompt that starts looks there
for the tokens up to which waiting prompts are like it, and then leave it: its branches.
"""

from collections import Counter
from itertools import islice

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
        path = self._paths.get(seq.id, [])
        counts = [len(self._members[node]) - 1 for node in path] + [0]
        # (tokens, waiting prompts that are like this one up to there and no further)
        leaving: list[tuple[int, int]] = []
        for depth, node in enumerate(path):
            count = counts[depth] - counts[depth + 1]
            start = depth * self.block_size
            if count and start + self.block_size > position:
                leaving += self._within_block(seq, node, path[depth + 1 : depth + 2], start, count)
        worth = sorted((count * (tokens - position), tokens) for tokens, count in leaving)
        best = worth[-MOST_BRANCHES:]
        return {tokens for gain, tokens in best if gain > 0}

    def _within_block(
        self, seq: Sequence, node: int, deeper: list[int], start: int, count: int
    ) -> list[tuple[int, int]]:
        """Find where `count` members of a node leave the sequence, within the block from `start`.

        deeper: the next node of the sequence, whose members share the whole block.
        """
        further = self._members.get(deeper[0], {}) if deeper else {}
        leavers = [
            one
            for one in islice(self._members[node].values(), 2 * MOST_COMPARED)
            if one.id not in further and one is not seq
        ][:MOST_COMPARED]
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
