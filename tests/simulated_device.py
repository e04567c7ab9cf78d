"""A device without tensors: its KV cache remembers which tokens each slot was computed from.

It runs batches as the model runner does, with a running state for each batch slot, and samples each
token as a function of all tokens before it. Before it answers it proves the batch right: whatever a
step reads through a block table holds what that sequence's own tokens demand, and nothing is
written into a block that the sequence got from another.
"""

import os
from array import array
from dataclasses import dataclass

from nanovllm.engine.batch import Batch, PrefillChunk
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.block_tables import BlockTables
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.snapshots import Snapshots, StateRows
from nanovllm.engine.stateful_blocks import StatefulBlockManager, StatefulBlockTables

VOCABULARY = 7  # few tokens, so that sequences come upon the same blocks by chance


def fingerprint(tokens: list[int]) -> int:
    """Of all tokens in order: what the K and V of the last one depend on."""
    value = 0
    for token in tokens:
        value = hash((value, token))
    return value


def sample(tokens: list[int], seed: int) -> int:
    """The model: the token that follows."""
    return (fingerprint([seed, *tokens]) >> 7) % VOCABULARY


def output_alone(
    prompt: list[int], max_len: int, stop_ids: frozenset[int] = frozenset(), seed: int = 0
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(sample(tokens, seed))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def check_blocks(scheduler: Scheduler) -> None:
    """Every block is free or referenced by as many running sequences as it counts."""
    blocks = scheduler.blocks
    tables = [seq.block_table[seq.num_given_back :] for seq in scheduler.sequences.values()]
    references = [sum(block in table for table in tables) for block in range(blocks.num_blocks)]
    assert blocks.ref_counts == references
    assert blocks.num_free == references.count(0)
    waiting = [*scheduler.waiting, *scheduler.waiting.followers]
    assert scheduler.waiting.num_tokens_left == sum(seq.num_tokens_left for seq in waiting)
    check_places(scheduler)
    for seq, table in zip(scheduler.sequences.values(), tables):
        assert len(set(table)) == len(table)
        assert seq.capacity == len(seq.block_table) * blocks.block_size
        assert len(table) <= scheduler.tables.most_blocks
        assert (seq.status is Status.RUNNING) == bool(seq.block_table)


def check_places(scheduler: Scheduler) -> None:
    """Every sequence stands in one place, unless its last token is in flight: then in none, or
    among the paused ones. Only a completion whose prompt is not planned to its end is a follower.
    """
    followers = scheduler.waiting.followers
    assert all(seq.waits_for_prompt for seq in followers)
    assert not any(seq.waits_for_prompt for seq in scheduler.waiting)
    places = [*scheduler.waiting, *scheduler.prefilling, *scheduler.decoding, *scheduler.paused]
    places += followers
    assert len(set(places)) == len(places) and {*places} <= {*scheduler.sequences.values()}
    for seq in scheduler.sequences.values():
        assert seq in places or seq.num_tokens == seq.max_len > len(seq.token_ids)


def check_empty(scheduler: Scheduler) -> None:
    """Nothing is left, and nothing has leaked."""
    assert not scheduler.has_unfinished()
    assert not scheduler.decoding and not scheduler.waiting and not scheduler.prefilling
    assert not scheduler.paused
    assert scheduler.waiting.num_tokens_left == 0
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert not any(scheduler.blocks.ref_counts)
    assert scheduler.num_running == 0


class WatchedBlocks(BlockManager):
    def __init__(self, *sizes, **options) -> None:
        super().__init__(*sizes, **options)
        self.shared: list[list[int]] = []  # what each call of `share` was given

    def share(self, blocks: list[int]) -> None:
        self.shared.append(blocks)
        super().share(blocks)


class WatchedStatefulBlocks(WatchedBlocks, StatefulBlockManager):
    pass


class WatchedScheduler(Scheduler):
    """Records each start of a sequence: what it shares, and the order in which requests start."""

    blocks: WatchedBlocks

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        min_run: int | None = None,
        num_snapshots: int | None = None,  # of recurrent state; None: no layer is recurrent
        policy: SchedulingPolicy | None = None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        enough_seqs: int | None = None,
    ) -> None:
        policy = policy or SchedulingPolicy()
        max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        if num_snapshots is None:
            blocks, make_tables = WatchedBlocks(num_blocks, block_size, caching), BlockTables
        else:
            snapshots = Snapshots(StateRows(max_num_seqs, num_snapshots))
            blocks = WatchedStatefulBlocks(num_blocks, block_size, caching, snapshots=snapshots)
            make_tables = StatefulBlockTables
        super().__init__(
            blocks,
            policy,
            make_tables=make_tables,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            window=window,
            enough_seqs=enough_seqs,
        )
        if min_run is not None:
            self.blocks.min_run = min(min_run, block_size)
        if num_snapshots is not None:
            self.tables.min_gain = 1  # so that short prompts leave snapshots
        self.first_starts: list[int] = []
        self.num_starts: dict[int, int] = {}
        self.num_shared: dict[int, int] = {}  # leading blocks of a table that were not its own
        self._policy_started, policy.started = policy.started, self._watch

    def _watch(self, seq: Sequence) -> None:
        if seq.is_first and seq.id not in self.num_starts:
            self.first_starts.append(seq.id)
        (shared,) = self.blocks.shared
        self.num_starts[seq.id] = self.num_starts.get(seq.id, 0) + 1
        self.num_shared[seq.id] = seq.num_given_back + len(shared)
        self.blocks.shared.clear()
        self._policy_started(seq)


@dataclass
class RunningState:
    """What the device keeps for a batch slot."""

    start: tuple[int, int]  # of which sequence, and for which time
    length: int  # tokens whose K and V are there
    table: list[int]
    seed: int


class SimulatedDevice:
    def __init__(self, scheduler: WatchedScheduler) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.blocks.block_size
        # KV slot -> fingerprint of the tokens up to the one whose K and V lie there
        self.kv_cache: dict[int, int | None] = {}
        self.states: dict[int, RunningState] = {}  # by batch slot
        # Row -> fingerprint of the tokens whose recurrent state lies there, and their number
        self.rows: dict[int, tuple[int, int]] = {}
        if isinstance(scheduler.blocks, StatefulBlockManager):
            self.rows[scheduler.blocks.snapshots.rows.zeros] = 0, 0
        self.tokens: dict[int, list[int]] = {}  # of each sequence, with those not yet committed

    def launch(self, batch: Batch) -> list[int]:
        """Run a step at once. The tokens that it samples are for a commit now or later."""
        running = [seq for seq in self.scheduler.sequences.values() if seq.status is Status.RUNNING]
        owners = {seq.batch_slot: seq for seq in running}
        for slot, index, block in batch.new_blocks:
            assert slot in batch.decode_slots
            state = self.states[slot]
            assert index == len(state.table) < -(-owners[slot].max_len // self.block_size)
            state.table.append(block)
        tables = [self.states[slot].table for slot in batch.decode_slots]
        assert batch.shared_blocks <= len(os.path.commonprefix(tables))
        self._copy_blocks(batch, [owners[slot] for slot in batch.decode_slots])
        for source, copy in batch.state_copies:
            self.rows[copy] = self.rows[source]
        # A layer writes all K and V of a step before any token attends.
        for slot in batch.decode_slots:
            self._write_decode(slot, owners[slot])
        for chunk in batch.prefills:
            self._write_chunk(chunk, owners[chunk.batch_slot])
        slots = [*batch.decode_slots, *(chunk.batch_slot for chunk in batch.prefills)]
        assert len(set(slots)) == len(slots), "a sequence runs once a step"
        # The first of the new tokens sees furthest back.
        firsts = [self.states[slot].length - 1 for slot in batch.decode_slots]
        firsts += [chunk.start for chunk in batch.prefills]
        for slot, first in zip(slots, firsts):
            self._check_reads(self.states[slot], self.tokens[owners[slot].id], first)
        sampled = [
            sample(self.tokens[owners[slot].id], self.states[slot].seed)
            for slot in batch.sampling_slots
        ]
        for slot, token in zip(batch.sampling_slots, sampled):
            self.tokens[owners[slot].id].append(token)
        return sampled

    def score(self, batch: Batch) -> tuple[bytes, ...]:
        """Of each scored token of a prompt, its position and itself, as 8 bytes each."""
        records = []
        for chunk in batch.prefills:
            if chunk.scored is not None:
                begin, token_ids, _ = chunk.scored
                assert 0 <= begin < begin + len(token_ids) <= len(chunk.token_ids), (
                    "the step has the hidden state of the token before each"
                )
                first = chunk.start + begin + 1
                pairs = enumerate(token_ids, first)
                records.append(array("q", [number for pair in pairs for number in pair]).tobytes())
        return tuple(records)

    def _copy_blocks(self, batch: Batch, decoding: list[Sequence]) -> None:
        """Before anything is written; all sources are read before a copy is written."""
        size = self.block_size
        tables = [chunk.block_table for chunk in batch.prefills]
        found = [
            [self.kv_cache.get(s * size + i) for i in range(size)] for s, _ in batch.block_copies
        ]
        for (_, copy), contents in zip(batch.block_copies, found):
            assert sum(copy in table for table in tables) >= 1, (
                "a copy is for a sequence that starts"
            )
            assert not any(copy in seq.block_table[seq.num_given_back :] for seq in decoding)
            for i, content in enumerate(contents):
                self.kv_cache[copy * size + i] = content
        copies = [copy for _, copy in batch.block_copies]
        assert len(set(copies)) == len(copies)

    def _write_decode(self, slot: int, seq: Sequence) -> None:
        state, tokens = self.states[slot], self.tokens[seq.id]
        assert state.start == self._start_of(seq), "a slot decodes the sequence whose prompt it ran"
        assert state.length == len(tokens) - 1, "all but the last sampled token are in the cache"
        self._recur(slot, tokens, state.length, state.length + 1)
        self._write(state, state.length, state.length + 1, tokens)

    def _write_chunk(self, chunk: PrefillChunk, seq: Sequence) -> None:
        tokens = self.tokens.setdefault(seq.id, list(seq.token_ids))
        assert chunk.token_ids and chunk.token_ids == tokens[chunk.start : chunk.end]
        assert chunk.is_last == (chunk.end == len(tokens))
        state = self.states.get(chunk.batch_slot)
        if state is None or state.start != self._start_of(seq):
            state = RunningState(
                self._start_of(seq), chunk.start, list(chunk.block_table), chunk.seed
            )
            self.states[chunk.batch_slot] = state
        assert state.length == chunk.start, "a chunk goes on where the last one ended"
        assert state.table == chunk.block_table[: len(state.table)]
        state.table = list(chunk.block_table)
        self._recur(chunk.batch_slot, tokens, chunk.start, chunk.end)
        self._write(state, max(chunk.start, chunk.write_from), chunk.end, tokens)
        state.length = chunk.end

    def _recur(self, slot: int, tokens: list[int], start: int, end: int) -> None:
        """Update the recurrent state of a slot, which must be that of all tokens before."""
        if self.rows:
            assert self.rows[slot] == (fingerprint(tokens[:start]), start)
            self.rows[slot] = fingerprint(tokens[:end]), end

    def _write(self, state: RunningState, start: int, end: int, tokens: list[int]) -> None:
        for position in range(start, end):
            num_shared = self.scheduler.num_shared[state.start[0]]
            assert position // self.block_size >= num_shared, "a shared block is never written"
            self.kv_cache[self._kv_slot(state, position)] = fingerprint(tokens[: position + 1])
        state.length = end

    def _check_reads(self, state: RunningState, tokens: list[int], first: int) -> None:
        """What the tokens from `first` on see: all before them, or what lies in their window."""
        window, expected = self.scheduler.tables.window, 0
        for position in range(state.length):
            expected = hash((expected, tokens[position]))
            if window is not None and position <= first - window:
                continue
            found = self.kv_cache.get(self._kv_slot(state, position))
            assert found == expected, f"sequence {state.start[0]} reads wrongly at {position}"

    def _kv_slot(self, state: RunningState, position: int) -> int:
        block = state.table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _start_of(self, seq: Sequence) -> tuple[int, int]:
        return seq.id, self.scheduler.num_starts[seq.id]
