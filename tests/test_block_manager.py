"""Blocks are never leaked, freed twice or shared wrongly; a hit is the longest prefix there is."""

import os
import random
import struct
import subprocess
import sys

import pytest
import xxhash
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

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import NO_PREFIX, BlockManager, Prefix

TOKENS = st.lists(st.integers(0, 1), max_size=14)


def weaken_hashes(monkeypatch, bits: int) -> None:
    """Let blocks have content hashes of so many bits, so that most collide."""
    whole = block_manager.chained_hash
    monkeypatch.setattr(block_manager, "chained_hash", lambda *args: whole(*args) % 2**bits)


class BlockManagerMachine(RuleBasedStateMachine):
    """Holds sequences as a scheduler does, and knows by itself what every block contains.

    Contents are all tokens up to a block's last one, those of the blocks before it included.
    """

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        caching=st.booleans(),
        num_completions=st.integers(1, 2),
        min_run=st.integers(1, 2),
    )
    def start(self, num_blocks, block_size, caching, num_completions, min_run):
        self.blocks = BlockManager(num_blocks, block_size, caching)
        self.blocks.min_run = min(min_run, block_size)
        self.root = self.blocks.new_root(num_completions)
        assert (self.root is None) == (not caching and num_completions == 1)
        # The table of each sequence, its tokens, and the prefix that ends with its last full block.
        self.held: list[tuple[list[int], list[int], Prefix | None]] = []
        self.known: dict[tuple[int, ...], int] = {}  # contents -> block that should be found
        self.prefixes: dict[tuple[int, ...], Prefix] = {}  # of full ones
        self.computed: set[tuple[int, ...]] = set()  # those that an earlier step computes

    @rule(tokens=TOKENS)
    def admit(self, tokens):
        blocks, size = self.blocks, self.blocks.block_size
        shared = blocks.match(tokens, self.root)
        expected = []
        for end in range(size, len(tokens) + 1, size):
            if tuple(tokens[:end]) not in self.known:
                break
            expected.append(self.known[tuple(tokens[:end])])
        assert shared == expected
        parent = blocks.prefix(shared[-1]) if shared else self.root
        self.check_run(tokens, len(shared) * size, parent)
        count = -(-len(tokens) // size) - len(shared)
        idle = set(range(blocks.num_blocks)) - {
            block for table, _, _ in self.held for block in table
        }
        assert blocks.num_free_without(shared) == len(idle - set(shared))
        if count > blocks.num_free_without(shared):
            return
        blocks.share(shared)
        fresh = blocks.allocate(count)
        assert len(set(fresh)) == count and set(fresh) <= idle - set(shared)
        for block in fresh:
            self._forget(block)
        self.held.append((shared + fresh, tokens, parent))
        self._register(len(self.held) - 1, len(shared) * size)

    def check_run(self, tokens, start, parent):
        """What is found begins with as many of the next tokens as any other does."""
        size = self.blocks.block_size
        found = self.blocks.match_run(parent, tokens[start : start + size])
        behind = [
            (len(os.path.commonprefix([contents, tuple(tokens)])) - start, block)
            for contents, block in self.known.items()
            if contents in self.computed
            and (len(contents) - 1) // size * size == start
            and contents[:start] == tuple(tokens[:start])
        ]
        longest = max(behind, default=(0, -1))[0]
        if longest < self.blocks.min_run:
            assert found is None
        else:
            block, run = found
            assert run == longest and (run, block) in behind

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=TOKENS)
    def grow(self, data, more):
        """A sequence fills more of the last of its blocks."""
        i = data.draw(st.integers(0, len(self.held) - 1))
        table, tokens, parent = self.held[i]
        start = len(tokens) // self.blocks.block_size * self.blocks.block_size
        room = len(table) * self.blocks.block_size - len(tokens)
        self.held[i] = table, tokens + more[:room], parent
        if room:
            self._register(i, start)

    def _register(self, i, start):
        """The blocks of the tokens from `start` on."""
        table, tokens, parent = self.held[i]
        size = self.blocks.block_size
        for index in range(start // size, len(table)):
            block, contents = table[index], tuple(tokens[: (index + 1) * size])
            before, own = contents[: index * size], contents[index * size :]
            prefix = self.blocks.register(block, parent, list(own))
            if self.root is not None and len(own) >= self.blocks.min_run:
                self._forget(block)
                # Behind a block that was evicted since, nothing is found.
                if not before or self.prefixes.get(before) == parent:
                    self.known.setdefault(contents, block)
                    if len(own) == size:
                        self.prefixes.setdefault(contents, prefix)
            parent = prefix if len(own) == size else parent
        self.held[i] = table, tokens, parent

    @rule()
    def begin_step(self):
        self.blocks.begin_step()
        self.computed = set(self.known)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data):
        table, _, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.blocks.release(table)

    def _forget(self, block):
        forgotten = [contents for contents, other in self.known.items() if other == block]
        for contents in forgotten:
            # What follows it is not found any more, even when its prefix is computed again.
            for other in list(self.known):
                is_full = len(contents) % self.blocks.block_size == 0
                if other == contents or is_full and other[: len(contents)] == contents:
                    del self.known[other]
                    self.prefixes.pop(other, None)
                    self.computed.discard(other)

    @invariant()
    def every_block_is_free_or_counted(self):
        if not hasattr(self, "blocks"):
            return
        counts = [
            sum(block in table for table, _, _ in self.held)
            for block in range(self.blocks.num_blocks)
        ]
        assert self.blocks.ref_counts == counts
        assert self.blocks.num_free == counts.count(0)

    @invariant()
    def what_is_known_is_in_order(self):
        if hasattr(self, "blocks"):
            blocks = self.blocks
            known = {block: key for block, key in enumerate(blocks._keys) if key is not None}
            assert blocks._ordered == sorted(
                (key, block) for block, key in known.items() if block not in blocks._new
            )
            found = [block for same_hash in blocks._known.values() for block in same_hash]
            assert sorted(found) == sorted(known) and all(blocks._known.values())


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=150, stateful_step_count=25)


@pytest.mark.parametrize("bits", [0, 2])
def test_colliding_hashes_change_nothing(monkeypatch, bits):
    weaken_hashes(monkeypatch, bits)
    run_state_machine_as_test(
        BlockManagerMachine, settings=settings(TestBlockManager.settings, max_examples=60)
    )


def hold(blocks: BlockManager, tokens: list[int]) -> list[int]:
    """Take and register blocks for `tokens`, sharing nothing."""
    size = blocks.block_size
    table = blocks.allocate(-(-len(tokens) // size))
    parent = NO_PREFIX
    for index in range(len(tokens) // size):
        parent = blocks.register(table[index], parent, tokens[index * size : (index + 1) * size])
    return table


def test_the_content_hash_is_that_of_its_definition_in_every_process():
    """xxh3_64 of a block's token ids, 32 bits each, seeded with the hash of the block before it."""
    expected, tokens = 0, [*range(10), 2**31 - 1, 7]
    for begin in range(0, 12, 4):
        own = struct.pack("<4i", *tokens[begin : begin + 4])
        expected = xxhash.xxh3_64(own, seed=expected).intdigest()
    assert expected == 0xE3BE45CBFC918B38
    code = f"""
from nanovllm.engine.block_manager import NO_PREFIX, BlockManager
blocks, tokens, prefix = BlockManager(8, 4), {tokens}, NO_PREFIX
for begin, block in zip(range(0, 12, 4), blocks.allocate(3)):
    prefix = blocks.register(block, prefix, tokens[begin : begin + 4])
print(prefix.hash)
"""
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(answer.stdout) == expected
    blocks, prefix = BlockManager(8, 4), NO_PREFIX  # here Python's own hashes have another seed
    for begin, block in zip(range(0, 12, 4), blocks.allocate(3)):
        prefix = blocks.register(block, prefix, tokens[begin : begin + 4])
    assert prefix.hash == expected


def test_a_block_is_found_by_its_hash_and_by_nothing_else(monkeypatch):
    blocks = BlockManager(8, 2)
    first = hold(blocks, [1, 2])
    assert blocks.match([1, 2]) == first
    monkeypatch.setattr(block_manager, "chained_hash", lambda *args: 5)
    assert blocks.match([1, 2]) == []


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
    blocks.register(evicted, NO_PREFIX, [5, 6])
    assert blocks.match([5, 6, 3, 4]) == known
    blocks.register(spare, NO_PREFIX, [1, 2])
    assert blocks.match([1, 2, 3, 4]) == [spare], "its prefix id is another than before"
    blocks.release(twin)
    blocks.allocate(2)
    assert not blocks.num_free and blocks.match([1, 2, 3, 4]) == [spare], "nothing is left of it"
    assert len(blocks._known) == 2


def test_the_same_tokens_after_another_prefix_are_another_block():
    blocks = BlockManager(8, 2)
    hold(blocks, [1, 2, 3, 4])
    assert blocks.match([5, 6, 3, 4]) == [] and blocks.match([3, 4]) == []


def test_only_full_blocks_are_shared():
    blocks = BlockManager(8, 4)
    table = hold(blocks, list(range(10)))
    assert blocks.match(list(range(3))) == []
    assert blocks.match(list(range(7))) == table[:1]
    assert blocks.match(list(range(12))) == table[:2]


def runs_of(blocks: BlockManager, *contents: list[int]) -> list[int]:
    """Blocks known to begin a prompt, each with its own tokens, and computed."""
    table = blocks.allocate(len(contents))
    for block, tokens in zip(table, contents):
        blocks.register(block, NO_PREFIX, tokens)
    blocks.begin_step()
    return table


def test_the_longest_run_is_found_among_full_blocks_and_partly_filled_ones():
    blocks = BlockManager(8, 4)
    blocks.min_run = 1
    full, part, other = runs_of(blocks, [1, 2, 3, 4], [1, 2, 5], [6])
    assert blocks.match_run(NO_PREFIX, [1, 2, 3, 9]) == (full, 3)
    assert blocks.match_run(NO_PREFIX, [1, 2, 5, 1]) == (part, 3)
    assert (
        blocks.match_run(NO_PREFIX, [6]) == blocks.match_run(NO_PREFIX, [6, 1, 2, 5]) == (other, 1)
    )
    assert blocks.match_run(NO_PREFIX, [1, 9])[1] == 1
    assert (
        blocks.match_run(NO_PREFIX, [7])
        is blocks.match_run(NO_PREFIX, [])
        is blocks.match_run(Prefix(9, 0), [1])
        is None
    )


def test_a_short_run_is_not_worth_a_copy():
    blocks = BlockManager(8, 64)
    (block,) = runs_of(blocks, [1] * 40)
    assert blocks.match_run(NO_PREFIX, [1] * 15 + [2]) is None
    assert blocks.match_run(NO_PREFIX, [1] * 16 + [2]) == (block, 16)


def test_a_block_that_holds_more_is_known_for_that():
    blocks = BlockManager(2, 4)
    blocks.min_run = 1
    (block,) = runs_of(blocks, [1, 2])
    assert blocks.register(block, NO_PREFIX, [1, 2, 3, 4]) == blocks.prefix(block)
    assert blocks.match([1, 2, 3, 4]) == [block] and blocks.match_run(NO_PREFIX, [1, 2]) is None
    blocks.begin_step()
    assert blocks.match_run(NO_PREFIX, [1, 2, 3]) == (block, 3) and len(blocks._known) == 1


@pytest.mark.parametrize("common", [0, 5, 100])
def test_among_thousands_of_siblings_two_comparisons_of_tokens_find_the_longest_run(
    monkeypatch, common
):
    """As many conversations have that begin with one system prompt."""
    r = random.Random(0)
    system, count = [r.randrange(9) for _ in range(common)], 10_000
    compared, ordered = [], []

    class Counted(tuple):
        def __lt__(self, other):
            ordered.append(1)
            return tuple(self) < tuple(other)

    make_key, count_common = block_manager.make_key, block_manager.count_common
    monkeypatch.setattr(block_manager, "make_key", lambda *args: Counted(make_key(*args)))
    monkeypatch.setattr(
        block_manager, "count_common", lambda *keys: compared.append(1) or count_common(*keys)
    )
    blocks = BlockManager(count, 256)
    contents = [system + [r.randrange(9) for _ in range(120)] for _ in range(count)]
    table = runs_of(blocks, *contents)
    ordered.clear()
    for block, tokens in list(zip(table, contents))[::500]:
        assert blocks.match_run(NO_PREFIX, tokens + [1, 2, 3]) == (block, common + 120)
    assert len(compared) <= 2 * 20 and len(ordered) <= 20 * 14
    ordered.clear()
    blocks.release(table[:1])
    blocks.allocate(1)
    assert len(blocks._known) == count - 1 and len(ordered) <= 14


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


def test_without_prefix_caching_only_completions_of_one_request_find_its_blocks():
    blocks = BlockManager(4, 2, enable_prefix_caching=False)
    assert blocks.new_root(num_completions=1) is None and blocks.match([1, 2], None) == []
    root, other = blocks.new_root(num_completions=2), blocks.new_root(num_completions=2)
    table = blocks.allocate(1)
    blocks.register(table[0], root, [1, 2])
    assert blocks.match([1, 2], root) == table
    assert blocks.match([1, 2], other) == blocks.match([1, 2]) == []


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
