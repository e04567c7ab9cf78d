"""Map sequences onto fixed-size KV blocks: prefix cache, reference counts, eviction.

Knows token ids and block numbers. Knows nothing about tensors, devices or models.

Every block is in one of three states: free, cached and free (its content is still known, so a later
request may share it), or referenced by exactly `ref_counts[block]` sequences.

The K and V of a block depend on its own tokens and on all tokens before them. So a known block has
a prefix id, a number that is given once and never again, and it is found by a key: the prefix id of
the block before it, and its own tokens. The dict of these keys compares them in full. A block that
is found therefore holds exactly the prefix that was asked for, even if hashes collide. Once a block
is evicted, its prefix id leads nowhere: blocks that came after it are not found any more.
"""

from array import array
from collections import OrderedDict
from itertools import count

Key = tuple[int, bytes]  # prefix id of the block before (0: there is none), own token ids


class BlockManager:
    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        # Blocks nobody references. Those without known content come first, then the least recently
        # released: taking from the front evicts as little as possible, and the oldest of that.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._known: dict[Key, int] = {}  # key -> block
        self._keys: list[Key | None] = [None] * num_blocks  # of each known block
        self._prefix_ids = [0] * num_blocks  # of each known block
        self._new_prefix_ids = count(1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

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

    def register(self, block: int, parent_id: int, token_ids: list[int]) -> int:
        """Make a full block known by its token ids and the prefix id of the block before it.

        That is 0 if there is none before it. Returns the block's own prefix id.
        """
        if not self.enable_prefix_caching:
            return 0
        key = self._key(parent_id, token_ids)
        # A twin that another sequence computed stays the known one, and this block stays private.
        if key not in self._known:
            self._known[key] = block
            self._keys[block] = key
            self._prefix_ids[block] = next(self._new_prefix_ids)
        return self._prefix_ids[self._known[key]]

    def prefix_id(self, block: int) -> int:
        """The prefix id of a block that `match` found."""
        assert self._keys[block] is not None
        return self._prefix_ids[block]

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._known[key]
            self._keys[block] = None

    @staticmethod
    def _key(parent_id: int, token_ids: list[int]) -> Key:
        return parent_id, array("i", token_ids).tobytes()
