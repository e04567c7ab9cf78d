"""The KV blocks of a model with recurrent layers, which go with snapshots of the layers' state.

A prompt begins after a prefix that has both its K and V and a snapshot. So this module changes two
things of engine/block_manager.py and engine/block_tables.py: what a sequence starts with, and what
a block takes with it when it is forgotten. A model of attention alone has nothing of this.

A snapshot is kept where a sequence ends or is preempted. Besides, a prompt leaves snapshots on its
way, where other prompts will begin alike: where waiting prompts part from it, and where known K and
V end if they reach further than the snapshot that the prompt starts with. There, a chunk of the
prompt ends, since the state is known only at the end of a chunk.
"""

from bisect import insort
from typing import Any

from nanovllm.engine.block_manager import TOKEN_BYTES, BlockManager, Key
from nanovllm.engine.block_tables import BlockTables, StartPlan
from nanovllm.engine.branches import Branches
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.snapshots import Snapshots

MIN_GAIN = 16  # tokens: a state that saves a prompt fewer of them is not worth a row


class StatefulBlockManager(BlockManager):
    """A block manager that drops snapshots together with the blocks of their tokens."""

    def __init__(self, *sizes: Any, snapshots: Snapshots, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.snapshots = snapshots
        # A state is kept for an exact number of tokens. So a run of any length may be needed.
        self.min_run = 1
        # Blocks that were registered again since `begin_step`, with the key of what earlier steps
        # have computed. This key is still in `_ordered`, because a snapshot may end there.
        self._outgrown: dict[int, Key] = {}

    def begin_step(self) -> None:
        for block, key in self._outgrown.items():
            self._remove_key(key, block)
        self._outgrown.clear()
        super().begin_step()

    def _unregister(self, block: int) -> None:
        key, is_new = self._known_key(block), block in self._new
        super()._unregister(block)
        # What earlier steps have computed is still there, unless `forget` makes the call.
        if not is_new:
            self._outgrown[block] = key
            insort(self._ordered, (key, block))

    def forget(self, block: int) -> None:
        prefix, key = self._prefixes[block], self._keys[block]
        super().forget(block)
        if block in self._outgrown:
            self._remove_key(self._outgrown.pop(block), block)
        if key is None:
            return
        self.snapshots.drop_prefix(prefix.id)
        # States within the block, unless another block holds their tokens, too.
        for tail in self.snapshots.tails(*key):
            if self._longest_run((key[0], tail))[0] * TOKEN_BYTES < len(tail):
                self.snapshots.drop((key[0], tail))


class StatefulBlockTables(BlockTables):
    """Block tables of sequences that begin with a snapshot, and leave snapshots."""

    blocks: StatefulBlockManager

    def __init__(self, blocks: StatefulBlockManager, *sizes: Any) -> None:
        super().__init__(blocks, *sizes)
        self.snapshots = blocks.snapshots
        self.branches = Branches(blocks.block_size)
        self.min_gain = MIN_GAIN
        # Id of a waiting sequence -> how many tokens the snapshot holds that it is to begin with,
        # and the snapshot's key.
        self._needs: dict[int, tuple[int, Key]] = {}

    def begin_step(self) -> None:
        super().begin_step()
        self.snapshots.begin_step()

    def take_state_copies(self) -> tuple[tuple[int, int], ...]:
        return self.snapshots.take_copies()

    def sequence_queued(self, seq: Sequence) -> None:
        self.branches.add(seq, seq.request.root)
        plan = self.plan(seq)
        if plan.snapshot is not None:
            self._need(seq, plan.num_cached, plan.snapshot)

    def sequence_unqueued(self, seq: Sequence) -> None:
        self.branches.remove(seq)
        _, key = self._needs.pop(seq.id, (0, None))
        if key is not None:
            self.snapshots.need_no_more(key, seq.id)

    def _need(self, seq: Sequence, length: int, key: Key) -> None:
        """Note that a waiting sequence is to begin with a snapshot of `length` tokens, unless it
        has a longer one.
        """
        old_length, old_key = self._needs.get(seq.id, (0, None))
        if old_key is not None:
            if old_length > length and self.snapshots.is_kept(old_key):
                return
            self.snapshots.need_no_more(old_key, seq.id)
        self._needs[seq.id] = length, key
        self.snapshots.need(key, seq.id)

    def plan(self, seq: Sequence) -> StartPlan:
        plan = super().plan(seq)
        must_wait = plan.snapshot is not None and self.snapshots.is_new(plan.snapshot)
        return plan._replace(must_wait=must_wait)

    def find_beginning(self, seq: Sequence, cached: list[int], run: int) -> tuple[int, Key | None]:
        # Find the snapshot after the most leading tokens, without the last token. The K and V of
        # these tokens are known, too, or will be when the snapshot is.
        root = seq.request.root
        if root is None:
            return 0, None
        size, last = self.block_size, seq.num_reusable - 1
        for depth in range(min(len(cached), last // size), -1, -1):
            prefix = self.blocks.prefix(cached[depth - 1]) if depth else root
            assert prefix is not None, "cached blocks are known"
            start = depth * size
            following = seq.token_ids[start : min(start + size - 1, last)]
            key = self.snapshots.find(prefix, following)
            if key is not None and depth == len(cached) and not self.snapshots.is_new(key):
                # Beyond the cached blocks, another block must hold the tokens of the snapshot.
                key = self.snapshots.find(prefix, following[:run])
            if key is not None:
                return start + len(key[1]) // TOKEN_BYTES, key
        return 0, None

    def start(self, seq: Sequence, plan: StartPlan) -> None:
        # Restore the state first: `allocate` may evict a block, and its snapshots with it.
        self.snapshots.restore(plan.snapshot, seq.batch_slot)
        seq.num_in_snapshot = plan.num_cached
        # Choose where the prompt leaves snapshots. K and V are known up to the end of the run.
        branches = self.branches.find(seq, plan.num_cached)
        num_whole = len(plan.cached) * self.block_size
        last, limit = plan.num_cached, seq.num_reusable - 1
        for length in sorted({*branches, num_whole, num_whole + plan.run}):
            if last + self.min_gain <= length <= limit:
                seq.snapshots_at.append(length)
                last = length
        super().start(seq, plan)

    def extend_for_chunk(self, seq: Sequence, length: int) -> int:
        # A chunk also ends where a snapshot is to be kept.
        if seq.snapshots_at:
            length = min(length, seq.snapshots_at[0])
        return super().extend_for_chunk(seq, length)

    def register(self, seq: Sequence, length: int) -> None:
        super().register(seq, length)
        if seq.snapshots_at and seq.snapshots_at[0] == length:
            del seq.snapshots_at[0]
            self._save(seq, after_step=True)

    def release(self, seq: Sequence) -> None:
        super().release(seq)
        if seq.num_computed - seq.num_in_snapshot >= self.min_gain:
            self._save(seq, after_step=False)

    def _save(self, seq: Sequence, *, after_step: bool) -> None:
        """Keep the state after the computed tokens of a sequence, whose K and V are registered."""
        length = seq.num_computed
        depth = length // self.block_size
        prefix = seq.prefix
        if depth < seq.num_registered_blocks:  # the blocks from here on were known before
            prefix = self.blocks.prefix(seq.block_table[depth - 1]) if depth else seq.request.root
        # Without a prefix, no prompt would find the snapshot: the sequence has no root, or a block
        # was discarded because another sequence that shares it has failed.
        if prefix is None:
            return
        tail = seq.token_ids[depth * self.block_size : length]
        # A sequence that ends or is preempted leaves its state for prompts that are yet to come.
        waiting = self.branches.following(prefix, tail, length) if after_step else []
        key = self.snapshots.save(
            seq.batch_slot, prefix, tail, after_step=after_step, is_needed=bool(waiting)
        )
        seq.num_in_snapshot = length
        if key is not None:
            for one in waiting:
                self._need(one, length, key)
            self.listener.snapshot_saved(seq, length)
