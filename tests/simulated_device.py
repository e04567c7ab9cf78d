"""A device without tensors: its KV cache remembers which tokens each slot was computed from.

It runs batches as the model runner does, on rows of a running state, and draws each token as a function of all tokens
before it. Before it answers it proves the batch right: whatever a step reads through a block table holds what that
sequence's own tokens demand, and nothing is written into a block that the sequence got from another.
"""

import os
from dataclasses import dataclass

from nanovllm.engine.batch import Batch, Fork, PrefillChunk
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status

VOCABULARY = 7  # few tokens, so that sequences come upon the same blocks by chance


def fingerprint(tokens: list[int]) -> int:
    """Of all tokens in order: what the K and V of the last one depend on."""
    value = 0
    for token in tokens:
        value = hash((value, token))
    return value


def draw(tokens: list[int], seed: int) -> int:
    """The model: the token that follows."""
    return (fingerprint([seed, *tokens]) >> 7) % VOCABULARY


def output_alone(prompt: list[int], max_len: int, stop_ids: frozenset[int] = frozenset(), seed: int = 0) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(draw(tokens, seed))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def check_blocks(scheduler: Scheduler) -> None:
    """Every block is free or referenced by as many running sequences as it counts."""
    blocks = scheduler.blocks
    tables = [seq.block_table for seq in scheduler.sequences.values()]
    references = [sum(block in table for table in tables) for block in range(blocks.num_blocks)]
    assert blocks.ref_counts == references
    assert sorted(blocks._free) == [block for block, count in enumerate(references) if count == 0]
    assert scheduler.num_waiting_tokens == sum(
        one.num_left for seq in scheduler.waiting for one in (seq, *seq.forks)
    )
    for seq in scheduler.sequences.values():
        assert len(set(seq.block_table)) == len(seq.block_table)
        assert (seq.status is Status.RUNNING) == bool(seq.block_table)


class WatchedBlocks(BlockManager):
    def __init__(self, *sizes) -> None:
        super().__init__(*sizes)
        self.shared: list[list[int]] = []  # what each call of `share` was given

    def share(self, blocks: list[int]) -> None:
        self.shared.append(blocks)
        super().share(blocks)


class WatchedScheduler(Scheduler):
    """Records each admission: what it shares, and the order of the first ones."""

    blocks: WatchedBlocks

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True, **budgets: int) -> None:
        super().__init__(WatchedBlocks(num_blocks, block_size, caching), **budgets)
        self.first_admissions: list[int] = []
        self.num_admissions: dict[int, int] = {}
        self.shared: dict[int, frozenset[int]] = {}

    def _admit(self) -> Sequence | None:
        self.blocks.shared.clear()
        seq = super()._admit()
        if seq is not None:
            if seq.id not in self.num_admissions:
                self.first_admissions.append(seq.id)
            for one, shared in zip((seq, *seq.forks), self.blocks.shared, strict=True):
                self.num_admissions[one.id] = self.num_admissions.get(one.id, 0) + 1
                self.shared[one.id] = frozenset(shared)
        return seq


@dataclass
class Row:
    """What the device keeps of a running sequence."""

    admission: tuple[int, int]  # which sequence, and which time it was admitted
    length: int  # tokens whose K and V are there
    table: list[int]
    seed: int


class SimulatedDevice:
    def __init__(self, scheduler: WatchedScheduler) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.blocks.block_size
        self.slots: dict[int, int] = {}  # slot -> fingerprint of the tokens up to the one whose K and V lie there
        self.rows: dict[int, Row] = {}
        self.tokens: dict[int, list[int]] = {}  # of each sequence, with those drawn and not yet committed

    def launch(self, batch: Batch) -> list[int]:
        """Run a step at once. The tokens it draws are for a commit now or later."""
        owners = {seq.batch_slot: seq for seq in self.scheduler.sequences.values() if seq.status is Status.RUNNING}
        for number, index, block in batch.new_blocks:
            assert number in batch.decode_slots
            row = self.rows[number]
            assert index == len(row.table) < -(-owners[number].max_len // self.block_size)
            row.table.append(block)
        tables = [self.rows[number].table for number in batch.decode_slots]
        if len(tables) > 1:  # one row shares with nobody
            assert batch.shared_blocks == len(os.path.commonprefix(tables))
        lengths = [self.rows[number].length for number in batch.decode_slots]
        assert lengths == sorted(lengths, reverse=True), "what takes longest comes first"
        # A layer writes all K and V of a step before any token attends.
        for number in batch.decode_slots:
            self._write_decode(number, owners[number])
        for chunk in batch.prefills:
            self._write_chunk(chunk, owners[chunk.batch_slot])
        numbers = [*batch.decode_slots, *(chunk.batch_slot for chunk in batch.prefills)]
        assert len(set(numbers)) == len(numbers), "a row runs once a step"
        for number in numbers:
            self._check_reads(self.rows[number], self.tokens[owners[number].id])
        for chunk in batch.prefills:
            for fork in chunk.forks:
                self._fork(chunk, fork, owners[fork.batch_slot])
        drawing = [*batch.decode_slots, *(one.batch_slot for one in batch.first_samples)]
        drawn = [draw(self.tokens[owners[number].id], self.rows[number].seed) for number in drawing]
        for number, token in zip(drawing, drawn):
            self.tokens[owners[number].id].append(token)
        return drawn

    def _write_decode(self, number: int, seq: Sequence) -> None:
        row, tokens = self.rows[number], self.tokens[seq.id]
        assert row.admission == self._admission(seq), "a row decodes the sequence whose prompt it ran"
        assert row.length == len(tokens) - 1, "all but the last drawn token are in the cache"
        self._write(row, row.length, row.length + 1, tokens)

    def _write_chunk(self, chunk: PrefillChunk, seq: Sequence) -> None:
        tokens = self.tokens.setdefault(seq.id, list(seq.token_ids))
        assert chunk.token_ids and chunk.token_ids == tokens[chunk.start : chunk.end]
        assert chunk.is_last == (chunk.end == len(tokens))
        row = self.rows.get(chunk.batch_slot)
        if row is None or row.admission != self._admission(seq):
            row = self.rows[chunk.batch_slot] = Row(self._admission(seq), chunk.start, list(chunk.block_table), chunk.seed)
        assert (row.length, row.table) == (chunk.start, chunk.block_table), "a chunk goes on where the last one ended"
        self._write(row, max(chunk.start, chunk.write_from), chunk.end, tokens)
        row.length = chunk.end

    def _fork(self, chunk: PrefillChunk, fork: Fork, seq: Sequence) -> None:
        """What a prompt fills, its completions share; each has a copy of a last block that it fills only in part."""
        tokens = self.tokens.setdefault(seq.id, list(seq.token_ids))
        assert chunk.is_last and fork.end == chunk.end == len(tokens)
        self.rows[fork.batch_slot] = row = Row(self._admission(seq), fork.end, list(fork.block_table), fork.seed)
        for position in range(fork.end - fork.end % self.block_size, fork.end):
            slot = self._slot(row, position)
            assert slot != self._slot(self.rows[chunk.batch_slot], position)
            self.slots[slot] = self.slots[self._slot(self.rows[chunk.batch_slot], position)]
        self._check_reads(row, tokens)

    def _write(self, row: Row, start: int, end: int, tokens: list[int]) -> None:
        for position in range(start, end):
            block = row.table[position // self.block_size]
            assert block not in self.scheduler.shared[row.admission[0]], "a shared block is never written"
            self.slots[self._slot(row, position)] = fingerprint(tokens[: position + 1])
        row.length = end

    def _check_reads(self, row: Row, tokens: list[int]) -> None:
        expected = 0
        for position in range(row.length):
            expected = hash((expected, tokens[position]))
            found = self.slots.get(self._slot(row, position))
            assert found == expected, f"sequence {row.admission[0]} reads wrongly at position {position}"

    def _slot(self, row: Row, position: int) -> int:
        return row.table[position // self.block_size] * self.block_size + position % self.block_size

    def _admission(self, seq: Sequence) -> tuple[int, int]:
        return seq.id, self.scheduler.num_admissions[seq.id]
