"""The KV blocks there are: prefix cache, reference counts, eviction.

Knows token ids and block numbers. Knows nothing about sequences, tensors, devices or models.

Every block is in one of three states: free, cached and free (its content is still known, so a later
request may share it), or referenced by exactly `ref_counts[block]` sequences.

The K and V of a block depend on its own tokens and on all tokens before them. So a known block has
a prefix id, a number that is given once and never again, and it is found by a key: the prefix id of
the block before it, and its own tokens. The dict of these keys compares them in full. A block that
is found therefore holds exactly the prefix that was asked for, even if hashes collide. Once a block
is evicted, its prefix id leads nowhere: blocks that came after it are not found any more.

Where a prompt goes on after its last cached block, another block may still begin like it: a full
one, or one that its sequence filled only in part. Such a run of tokens is copied into a block of
the prompt's own. Of sorted keys, the one with the longest run in common stands next to the place of
the prompt's own key. So two comparisons find it, however many blocks follow the same prefix.
"""

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import count

from nanovllm.engine.listener import NOBODY, EngineListener

Key = bytes  # eight for each: the prefix id of the block before (0: there is none), own token ids

MIN_RUN = 16  # tokens: a shorter run is not worth a copy


class BlockManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        listener: EngineListener = NOBODY,
    ) -> None:
        self.listener = listener
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.min_run = min(MIN_RUN, block_size)
        self.ref_counts = [0] * num_blocks
        # Blocks nobody references. Those without known content come first, then the least recently
        # released: taking from the front evicts as little as possible, and the oldest of that.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._known: dict[Key, int] = {}  # key -> block
        self._keys: list[Key | None] = [None] * num_blocks  # by block; None: not known
        self._new_keys: set[Key] = set()  # registered since `begin_step`
        self._ordered_keys: list[Key] = []  # all others, sorted
        self._prefix_ids = [0] * num_blocks  # by block; only a known one's means anything
        self._new_prefix_ids = count(1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def begin_step(self) -> None:
        """What was registered up to now may be copied from now on: earlier steps compute it."""
        for key in self._new_keys:
            insort(self._ordered_keys, key)
        self._new_keys.clear()

    def num_free_without(self, shared: list[int]) -> int:
        """Free blocks left once `shared` are referenced."""
        return len(self._free) - sum(self.ref_counts[block] == 0 for block in shared)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each referenced once. The caller has checked `num_free`."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Reference blocks that `match` found."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._free[block]
            self.ref_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference to each block of a sequence's block table."""
        # Free the tail first: the shared prefix is evicted last.
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, "a block is released once per reference"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def match(self, token_ids: list[int]) -> list[int]:
        """The cached blocks that hold the longest prefix of `token_ids`. Changes nothing."""
        matched: list[int] = []
        if not self.enable_prefix_caching:
            return matched
        parent_id = 0
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            block = self._known.get(self._key(parent_id, token_ids[end - self.block_size : end]))
            if block is None:
                break
            matched.append(block)
            parent_id = self._prefix_ids[block]
        return matched

    def match_run(self, parent_id: int, token_ids: list[int]) -> tuple[int, int] | None:
        """Of the known blocks after the prefix `parent_id`, the one that begins with the most of
        `token_ids`, and how many. None: no copy is worth it. Changes nothing.
        """
        key = self._key(parent_id, token_ids)
        place = bisect_left(self._ordered_keys, key)
        beside = self._ordered_keys[max(0, place - 1) : place + 1]
        runs = [(count_common(key, other) - 1, self._known[other]) for other in beside]
        run, block = max(runs, default=(0, -1))
        return (block, run) if run >= self.min_run else None

    def register(self, block: int, parent_id: int, token_ids: list[int]) -> int:
        """Make a block known by its token ids and the prefix id of the block before it.

        That is 0 if there is none before it. A block that is filled only in part may be registered
        again when it holds more. Returns the block's own prefix id.
        """
        if not self.enable_prefix_caching or len(token_ids) < self.min_run:
            return 0
        self._forget(block)
        key = self._key(parent_id, token_ids)
        # If another sequence has computed the same, its block stays the known one.
        if key not in self._known:
            self._known[key] = block
            self._new_keys.add(key)
            self._keys[block] = key
            self._prefix_ids[block] = next(self._new_prefix_ids)
            self.listener.block_registered(block)
        return self._prefix_ids[self._known[key]]

    def prefix_id(self, block: int) -> int:
        """The prefix id of a block that `match` found."""
        assert self._keys[block] is not None
        return self._prefix_ids[block]

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self.listener.block_evicted(block)
            del self._known[key]
            self._keys[block] = None
            if key in self._new_keys:
                self._new_keys.remove(key)
            else:
                del self._ordered_keys[bisect_left(self._ordered_keys, key)]

    @staticmethod
    def _key(parent_id: int, token_ids: list[int]) -> Key:
        return array("q", (parent_id, *token_ids)).tobytes()


def count_common(key: Key, other: Key) -> int:
    """How many numbers two keys begin with in common."""
    count = 0
    for own, others in zip(array("q", key), array("q", other)):
        if own != others:
            break
        count += 1
    return count
