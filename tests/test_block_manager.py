"""Blocks are never leaked, freed twice or shared wrongly, and a hit is the longest prefix there is."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.engine.block_manager import BlockManager

TOKENS = st.lists(st.integers(0, 1), max_size=14)


class BlockManagerMachine(RuleBasedStateMachine):
    """Holds sequences as a scheduler does, and knows beside the manager what every block contains."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3), caching=st.booleans())
    def start(self, num_blocks, block_size, caching):
        self.blocks = BlockManager(num_blocks, block_size, caching)
        self.caching = caching
        self.held: list[list[int]] = []  # the table of each sequence
        self.contents: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, if it is full
        self.known: dict[tuple[int, ...], int] = {}  # the same from the other side, as the manager should know it

    @rule(tokens=TOKENS)
    def admit(self, tokens):
        blocks, size = self.blocks, self.blocks.block_size
        prefixes = [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]
        shared = blocks.match(tokens)
        expected = []
        for prefix in prefixes:
            if prefix not in self.known:
                break
            expected.append(self.known[prefix])
        assert shared == expected
        count = -(-len(tokens) // size) - len(shared)
        idle = set(range(blocks.num_blocks)) - {block for table in self.held for block in table}
        assert blocks.num_free_without(shared) == len(idle - set(shared))
        if count > blocks.num_free_without(shared):
            return
        blocks.share(shared)
        fresh = blocks.allocate(count)
        assert len(set(fresh)) == count and set(fresh) <= idle - set(shared)
        for block in fresh:
            self._forget(block)
        table = shared + fresh
        self.held.append(table)
        parent = blocks.hash_of(shared[-1]) if shared else 0
        for index in range(len(shared), len(prefixes)):
            block, prefix = table[index], prefixes[index]
            parent = blocks.register(block, parent, list(prefix[-size:]))
            self.contents[block] = prefix
            if self.caching:
                self.known.setdefault(prefix, block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data):
        table = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.blocks.release(table)

    def _forget(self, block):
        prefix = self.contents.pop(block, None)
        if prefix is not None and self.known.get(prefix) == block:
            del self.known[prefix]

    @invariant()
    def every_block_is_free_or_counted(self):
        if not hasattr(self, "blocks"):
            return
        counts = [sum(block in table for table in self.held) for block in range(self.blocks.num_blocks)]
        assert self.blocks.ref_counts == counts
        assert sorted(self.blocks._free) == [block for block, count in enumerate(counts) if count == 0]
        assert self.blocks.num_free == counts.count(0)


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=150, stateful_step_count=25)


def hold(blocks: BlockManager, tokens: list[int]) -> list[int]:
    """Take and register blocks for `tokens`, sharing nothing."""
    size = blocks.block_size
    table = blocks.allocate(-(-len(tokens) // size))
    parent = 0
    for index in range(len(tokens) // size):
        parent = blocks.register(table[index], parent, tokens[index * size : (index + 1) * size])
    return table


def test_a_hit_compares_token_ids_where_hashes_collide(monkeypatch):
    monkeypatch.setattr(BlockManager, "_hash", staticmethod(lambda parent, tokens: 7))
    blocks = BlockManager(8, 2)
    table = hold(blocks, [1, 2])
    assert blocks.match([1, 2]) == table
    assert blocks.match([3, 4]) == []
    hold(blocks, [3, 4, 5, 6])
    assert blocks.match([3, 4, 5, 6]) == [] and blocks.match([1, 2, 1, 2]) == table


def test_the_same_tokens_after_another_prefix_are_another_block():
    blocks = BlockManager(8, 2)
    hold(blocks, [1, 2, 3, 4])
    assert blocks.match([5, 6, 3, 4]) == [] and blocks.match([3, 4]) == []


def test_only_full_blocks_are_found():
    blocks = BlockManager(8, 4)
    table = hold(blocks, list(range(10)))
    assert blocks.match(list(range(3))) == []
    assert blocks.match(list(range(7))) == table[:1]
    assert blocks.match(list(range(12))) == table[:2]


def test_unknown_blocks_are_taken_before_cached_ones():
    blocks = BlockManager(4, 2)
    blocks.release(hold(blocks, [1, 2, 3, 4]))
    taken = blocks.allocate(2)
    assert len(blocks.match([1, 2, 3, 4])) == 2
    blocks.release(taken)
    blocks.allocate(2)
    assert len(blocks.match([1, 2, 3, 4])) == 2, "a block released without content goes before cached ones"


def test_eviction_takes_the_least_recently_used_and_a_prefix_after_what_follows_it():
    blocks = BlockManager(4, 2)
    old, new = hold(blocks, [1, 2, 3, 4]), hold(blocks, [5, 6, 7, 8])
    blocks.release(old)
    blocks.release(new)
    kept = []
    for _ in range(4):
        blocks.allocate(1)
        kept.append((len(blocks.match([1, 2, 3, 4])), len(blocks.match([5, 6, 7, 8]))))
    assert kept == [(1, 2), (0, 2), (0, 1), (0, 0)]


def test_a_block_in_use_is_never_evicted():
    blocks = BlockManager(3, 2)
    held = hold(blocks, [1, 2])
    taken = blocks.allocate(2)
    assert held[0] not in taken and blocks.num_free == 0 and blocks.match([1, 2]) == held


def test_a_block_released_twice_is_caught():
    blocks = BlockManager(2, 2)
    table = blocks.allocate(1)
    blocks.release(table)
    with pytest.raises(AssertionError):
        blocks.release(table)


def test_without_prefix_caching_nothing_is_known():
    blocks = BlockManager(4, 2, enable_prefix_caching=False)
    hold(blocks, [1, 2])
    assert blocks.match([1, 2]) == []
