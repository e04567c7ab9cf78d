"""Map sequences onto fixed-size KV blocks: prefix hashes, reference counts, eviction.

Knows token ids and block numbers. Knows nothing about tensors, devices or models.

Every block is in one of three states: free, cached and free (its content is still known by a hash, so a later request
may share it), or referenced by exactly `ref_counts[block]` sequences.
"""

from array import array
from collections import OrderedDict

import xxhash


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        # Blocks nobody references. Those without known content come first, then the least recently released:
        # taking from the front evicts as little as possible, and the oldest of that.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of_hash: dict[int, int] = {}
        self._content: list[tuple[int, int, bytes] | None] = [None] * num_blocks  # (own hash, parent's hash, token ids)

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
        """Drop one reference to each block of a sequence's table."""
        # Free the tail first: the shared prefix is evicted last.
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, "a block is released once per reference"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if self._content[block] is None:
                    self._free.move_to_end(block, last=False)

    def match(self, token_ids: list[int]) -> list[int]:
        """The cached blocks that hold the longest prefix of `token_ids`, in order. Changes nothing."""
        matched: list[int] = []
        if not self.enable_prefix_caching:
            return matched
        parent = 0
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            tokens = self._encode(token_ids[end - self.block_size : end])
            own = self._hash(parent, tokens)
            block = self._block_of_hash.get(own)
            if block is None or self._content[block] != (own, parent, tokens):
                break
            matched.append(block)
            parent = own
        return matched

    def register(self, block: int, parent: int, token_ids: list[int]) -> int:
        """Make a full block known by its tokens and its prefix's hash `parent` (0: none). Returns its own hash."""
        tokens = self._encode(token_ids)
        own = self._hash(parent, tokens)
        # A twin computed by another sequence stays the known one, and this block stays private.
        if self.enable_prefix_caching and own not in self._block_of_hash:
            self._block_of_hash[own] = block
            self._content[block] = (own, parent, tokens)
        return own

    def hash_of(self, block: int) -> int:
        """The hash of a block that `match` found."""
        content = self._content[block]
        assert content is not None
        return content[0]

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is not None:
            del self._block_of_hash[content[0]]
            self._content[block] = None

    @staticmethod
    def _encode(token_ids: list[int]) -> bytes:
        return array("i", token_ids).tobytes()

    @staticmethod
    def _hash(parent: int, tokens: bytes) -> int:
        return xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + tokens)
