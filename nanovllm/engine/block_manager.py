"""The manager of the KV blocks: prefix cache, reference counts, eviction.

This module knows token ids and block numbers. It knows nothing about sequences, tensors, devices or
models.

Every block is in one of three states: free, cached and free (its content is still known, so a later
request may share it), or referenced by exactly `ref_counts[block]` sequences. A block whose content
the prefix cache knows is called a known block.

The K and V of a block depend on its own tokens and on all tokens before them. The prefix cache
therefore finds a known block by a content hash that is chained over the prefix: xxh3_64 of the
block's own tokens, seeded with the hash of the block before it. The hash is the same in every
process.

Equal hashes do not prove equal tokens. Each known block also has a prefix id, a number that is
never used twice, and a key: the prefix id of the block before it, and its own tokens. A block is
shared only if its key equals the key that was asked for. The block therefore holds exactly that
prefix, even if hashes collide. Once a block is evicted, no key matches its prefix id any more, so
the blocks after it are not found either.

After its last cached block, a prompt may go on with the first tokens of another known block, full
or partly filled. The K and V of these tokens are copied into a new block of the prompt. The keys
are kept sorted, so the key with the longest common run is a neighbour of the place where the
prompt's key would stand. Two comparisons find it, however many blocks follow the same prefix.
"""

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import count
from typing import NamedTuple

import xxhash

from nanovllm.engine.listener import NOBODY, EngineListener

TOKEN = "I"  # the type of a token id in a key: 32 bits, unsigned
TOKEN_BYTES = array(TOKEN).itemsize
Key = tuple[int, bytes]  # the prefix id of the block before (0: no block), the block's token ids


class Prefix(NamedTuple):
    """All tokens up to the end of a known block."""

    id: int
    hash: int  # of 64 bits


NO_PREFIX = Prefix(id=0, hash=0)

MIN_RUN = 16  # tokens: a shorter run is not worth a copy


class BlockManager:
    """The owner of all KV blocks: it lends them to sequences, and finds cached blocks again."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        listener: EngineListener = NOBODY,
    ) -> None:
        """Build a manager of free blocks."""
        self.listener = listener
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.min_run = min(MIN_RUN, block_size)
        self.ref_counts = [0] * num_blocks
        # Blocks that no sequence references: first the blocks without known content, then the
        # known blocks in the order of their release. Allocation takes from the front, so it evicts
        # as few known blocks as possible, and the least recently released first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._known: dict[int, list[int]] = {}  # hash -> blocks; more than one if hashes collide
        self._keys: list[Key | None] = [None] * num_blocks  # by block; None: not a known block
        self._prefixes = [NO_PREFIX] * num_blocks  # by block; valid for known blocks only
        self._new: set[int] = set()  # blocks that were registered since `begin_step`
        # (key, block) of the known blocks that are not in `_new`, sorted.
        self._ordered: list[tuple[Key, int]] = []
        self._new_prefix_ids = count(1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def begin_step(self) -> None:
        """Allow copies of the blocks registered so far, which earlier steps compute."""
        for block in self._new:
            insort(self._ordered, (self._known_key(block), block))
        self._new.clear()

    def num_free_without(self, shared: list[int]) -> int:
        """Count the free blocks that are left once the blocks `shared` are referenced."""
        return len(self._free) - sum(self.ref_counts[block] == 0 for block in shared)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks and reference each once. The caller has checked `num_free`."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self.forget(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add a reference to each of the blocks, which `match` found."""
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

    def new_root(self, num_completions: int) -> Prefix | None:
        """Return the prefix before a new request's first block in the prefix cache. None: its
        blocks are not cached.

        With prefix caching all requests begin at NO_PREFIX, so any two of them may share blocks.
        Without it, a request of several completions begins at a prefix of its own: only these
        completions share its blocks.
        """
        if self.enable_prefix_caching:
            return NO_PREFIX
        number = next(self._new_prefix_ids)
        return Prefix(number, number) if num_completions > 1 else None

    def match(self, token_ids: list[int], root: Prefix | None = NO_PREFIX) -> list[int]:
        """Find the cached blocks that hold the longest prefix of `token_ids`, of a request that
        begins at `root`. Changes nothing.
        """
        matched: list[int] = []
        if root is None:
            return matched
        prefix = root
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            key = make_key(prefix, token_ids[end - self.block_size : end])
            block = self._find(chained_hash(prefix, key), key)
            if block is None:
                break
            matched.append(block)
            prefix = self._prefixes[block]
        return matched

    def match_run(self, prefix: Prefix | None, token_ids: list[int]) -> tuple[int, int] | None:
        """Find the known block after `prefix` that shares the longest run of leading tokens with
        `token_ids`. Changes nothing.

        Returns (block, length of the run), or None if no run is worth a copy.
        """
        if prefix is None:
            return None
        run, block = self._longest_run(make_key(prefix, token_ids))
        return (block, run) if run >= self.min_run else None

    def _longest_run(self, key: Key) -> tuple[int, int]:
        """Return the length of the longest run that a known block shares with a key, and the block.

        (0, -1): no block follows this prefix.
        """
        place = bisect_left(self._ordered, (key, -1))
        beside = self._ordered[max(0, place - 1) : place + 1]
        return max([(count_common(key, other), block) for other, block in beside], default=(0, -1))

    def register(self, block: int, before: Prefix | None, token_ids: list[int]) -> Prefix | None:
        """Make a block known by its token ids and the prefix before it.

        A block that is filled only in part may be registered again when it holds more. Returns the
        prefix that ends with the block; None if the block does not become known, because its
        request has no root or the block holds too few tokens.
        """
        if before is None or len(token_ids) < self.min_run:
            return None
        if self._keys[block] is not None:
            self._unregister(block)
        key = make_key(before, token_ids)
        prefix_hash = chained_hash(before, key)
        # If another sequence has computed the same tokens, its block stays the known block.
        known = self._find(prefix_hash, key)
        if known is not None:
            return self._prefixes[known]
        self._known.setdefault(prefix_hash, []).append(block)
        self._keys[block] = key
        self._prefixes[block] = Prefix(next(self._new_prefix_ids), prefix_hash)
        self._new.add(block)
        self.listener.block_registered(block, prefix_hash)
        return self._prefixes[block]

    def prefix(self, block: int) -> Prefix | None:
        """Return the prefix that ends with a block. None: the prefix cache does not know it."""
        return None if self._keys[block] is None else self._prefixes[block]

    def forget(self, block: int) -> None:
        """Remove a block from the prefix cache. The blocks that follow it are not found either."""
        if self._keys[block] is not None:
            self._unregister(block)

    def _unregister(self, block: int) -> None:
        """Make a known block unknown."""
        self.listener.block_evicted(block)
        key = self._known_key(block)
        self._keys[block] = None
        prefix_hash = self._prefixes[block].hash
        self._known[prefix_hash].remove(block)
        if not self._known[prefix_hash]:
            del self._known[prefix_hash]
        if block in self._new:
            self._new.remove(block)
        else:
            self._remove_key(key, block)
        if block in self._free:
            self._free.move_to_end(block, last=False)

    def _remove_key(self, key: Key, block: int) -> None:
        del self._ordered[bisect_left(self._ordered, (key, block))]

    def _find(self, prefix_hash: int, key: Key) -> int | None:
        """Find the known block that has this hash and exactly this key."""
        for block in self._known.get(prefix_hash, ()):
            if self._keys[block] == key:
                return block
        return None

    def _known_key(self, block: int) -> Key:
        key = self._keys[block]
        assert key is not None
        return key


def make_key(before: Prefix, token_ids: list[int]) -> Key:
    """Make the key of a block that follows the prefix `before` and holds `token_ids`."""
    return before.id, array(TOKEN, token_ids).tobytes()


def chained_hash(before: Prefix, key: Key) -> int:
    """Hash a block's own tokens after the prefix before it."""
    return xxhash.xxh3_64_intdigest(key[1], seed=before.hash)


def count_common(key: Key, other: Key) -> int:
    """Count the leading tokens that two keys have in common. Returns 0 for different prefixes."""
    if key[0] != other[0]:
        return 0
    count = 0
    for own, others in zip(array(TOKEN, key[1]), array(TOKEN, other[1])):
        if own != others:
            break
        count += 1
    return count
