"""Blocks are never leaked, freed twice or shared wrongly; a hit is the longest prefix there is."""

import random

import pytest
from engine_helpers import VOCAB, assert_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated_device import output_alone
from test_scheduler import Server, make_scheduler, streams

from nanovllm.engine.block_manager import BlockManager

TOKENS = st.lists(st.integers(0, 1), max_size=14)


def weaken_hashes(monkeypatch, bits: int) -> None:
    """Let the keys of blocks have hashes of so many bits, so that most collide."""

    class WeakKey(tuple):
        def __hash__(self):
            return super().__hash__() % 2**bits

    key = BlockManager._key
    monkeypatch.setattr(BlockManager, "_key", staticmethod(lambda *args: WeakKey(key(*args))))


class BlockManagerMachine(RuleBasedStateMachine):
    """Holds sequences as a scheduler does, and knows by itself what every block contains."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3), caching=st.booleans())
    def start(self, num_blocks, block_size, caching):
        self.blocks = BlockManager(num_blocks, block_size, caching)
        self.caching = caching
        self.held: list[list[int]] = []  # the table of each sequence
        # Block -> all tokens up to its end, if it is full.
        self.contents: dict[int, tuple[int, ...]] = {}
        # The same from the other side, for blocks that the manager should find.
        self.known: dict[tuple[int, ...], int] = {}

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
        parent = blocks.prefix_id(shared[-1]) if shared else 0
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
            # What follows it is not found any more, even when its prefix is computed again.
            self.known = {
                longer: other
                for longer, other in self.known.items()
                if longer[: len(prefix)] != prefix
            }

    @invariant()
    def every_block_is_free_or_counted(self):
        if not hasattr(self, "blocks"):
            return
        counts = [
            sum(block in table for table in self.held) for block in range(self.blocks.num_blocks)
        ]
        assert self.blocks.ref_counts == counts
        assert self.blocks.num_free == counts.count(0)


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=150, stateful_step_count=25)


@pytest.mark.parametrize("bits", [0, 2])
def test_colliding_hashes_change_nothing(monkeypatch, bits):
    weaken_hashes(monkeypatch, bits)
    run_state_machine_as_test(BlockManagerMachine, settings=TestBlockManager.settings)


def hold(blocks: BlockManager, tokens: list[int]) -> list[int]:
    """Take and register blocks for `tokens`, sharing nothing."""
    size = blocks.block_size
    table = blocks.allocate(-(-len(tokens) // size))
    parent = 0
    for index in range(len(tokens) // size):
        parent = blocks.register(table[index], parent, tokens[index * size : (index + 1) * size])
    return table


@pytest.mark.parametrize("bits", [0, 1, 2])
def test_a_hit_is_the_whole_prefix_though_all_hashes_collide(monkeypatch, bits):
    weaken_hashes(monkeypatch, bits)
    blocks = BlockManager(8, 2)
    first = hold(blocks, [1, 2])
    second = hold(blocks, [3, 4, 5, 6])
    assert blocks.match([1, 2, 5, 6]) == first, "the block of 5 and 6 follows 3 and 4"
    assert blocks.match([3, 4, 5, 6]) == second
    assert blocks.match([5, 6]) == blocks.match([1, 3]) == []


def test_what_followed_an_evicted_block_is_not_found_behind_the_next_one_in_its_place():
    """A twin keeps what follows it alive, while the known block that it follows is evicted."""
    blocks = BlockManager(4, 2)
    known = hold(blocks, [1, 2])
    twin = hold(blocks, [1, 2, 3, 4])  # its first block stays private
    assert blocks.match([1, 2, 3, 4]) == [*known, twin[1]]
    blocks.release(known)
    (spare, evicted) = blocks.allocate(2)
    assert evicted == known[0] and blocks.match([1, 2, 3, 4]) == []
    blocks.register(evicted, 0, [5, 6])
    assert blocks.match([5, 6, 3, 4]) == known
    blocks.register(spare, 0, [1, 2])
    assert blocks.match([1, 2, 3, 4]) == [spare], "its prefix id is another than before"
    blocks.release(twin)
    blocks.allocate(2)
    assert not blocks.num_free and blocks.match([1, 2, 3, 4]) == [spare], "nothing is left of it"
    assert len(blocks._known) == 2


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
    assert len(blocks.match([1, 2, 3, 4])) == 2, (
        "a block released without content goes before cached ones"
    )


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


@pytest.mark.parametrize("bits", [0, 1])
def test_colliding_hashes_change_no_greedy_output(monkeypatch, make_llm, checkpoint, bits):
    """One prompt cannot put its K and V under another, even if their first blocks collide."""
    weaken_hashes(monkeypatch, bits)
    rng = random.Random(5)
    first, second, third, end = ([rng.randrange(VOCAB) for _ in range(16)] for _ in range(4))
    llm = make_llm()
    for prompt in (first + end[:2], second + third + end[:3], first + third + end[:4]):
        assert_greedy(llm, checkpoint, [prompt], max_tokens=12)
    assert_greedy(llm, checkpoint)


def test_colliding_hashes_do_not_change_what_a_step_reads():
    """Over random requests, on a device that checks each read."""

    @settings(max_examples=150)
    @given(streams(), st.integers(0, 2))
    def run(stream, bits):
        sizes, requests, delays = stream
        with pytest.MonkeyPatch.context() as monkeypatch:
            weaken_hashes(monkeypatch, bits)
            server = Server(make_scheduler(**sizes | {"caching": True}))
            sequences = [
                server.add(id, one.prompt, one.max_tokens, one.stop_ids)
                for id, one in enumerate(requests)
            ]
            server.run(delays[0])
        for seq, one in zip(sequences, requests):
            assert seq.output_ids == output_alone(one.prompt, seq.max_len, one.stop_ids)

    run()
