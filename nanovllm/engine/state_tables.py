"""The recurrent states of sequences: the snapshot that a sequence starts with, and those it leaves.

The pool of snapshots knows prefixes and rows; this module knows sequences. A model without
recurrent layers has no such tables.

A snapshot is kept where a sequence ends or is preempted. Besides, a prompt leaves snapshots on its
way, where other prompts will begin alike: where waiting prompts part from it, and where known K and
V end if they reach further than the snapshot that the prompt starts with. There, a chunk of the
prompt ends, since the state is known only at the end of a chunk.
"""

from nanovllm.engine.block_manager import TOKEN_BYTES, BlockManager, Prefix
from nanovllm.engine.branches import Branches
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.snapshots import Key, Snapshots

MIN_GAIN = 16  # tokens: a state that saves a prompt fewer of them is not worth a row


class StateTables:
    """The states of all sequences, which begin and end here."""

    def __init__(self, blocks: BlockManager, snapshots: Snapshots) -> None:
        self.blocks = blocks
        self.listener = blocks.listener
        self.snapshots = snapshots
        self.block_size = blocks.block_size
        self.branches = Branches(blocks.block_size)
        self.min_gain = MIN_GAIN
        # Waiting sequence -> the snapshot that it would have begun with when it came.
        self._needs: dict[int, Key] = {}

    def add(self, seq: Sequence) -> None:
        """Hear that a sequence waits."""
        root = seq.request.root
        self.branches.add(seq, root)
        reusable = seq.token_ids[: seq.num_reusable]
        key, _ = self.find(self.blocks.match(reusable, root), reusable, root)
        if key is not None:
            self._needs[seq.id] = key
            self.snapshots.need(key)

    def remove(self, seq: Sequence) -> None:
        """Hear that a sequence waits no more."""
        self.branches.remove(seq)
        key = self._needs.pop(seq.id, None)
        if key is not None:
            self.snapshots.need(key, -1)

    def find(
        self, cached: list[int], reusable: list[int], root: Prefix | None
    ) -> tuple[Key | None, int]:
        """Find the snapshot after the most leading tokens of `reusable`, without the last token,
        for a request that begins at `root`.

        cached: the known blocks that hold leading tokens. Returns the snapshot, and the number of
        its tokens. The K and V of these tokens are known, too, or will be when the snapshot is.
        """
        if root is None:
            return None, 0
        size, last = self.block_size, len(reusable) - 1
        for depth in range(min(len(cached), last // size), -1, -1):
            prefix = self.blocks.prefix(cached[depth - 1]) if depth else root
            start = depth * size
            following = reusable[start : min(start + size - 1, last)]
            key = self.snapshots.find(prefix, following)
            if key is not None and depth == len(cached) and not self.snapshots.is_new(key):
                # Beyond the cached blocks, another block must hold the tokens of the snapshot.
                run = self.blocks.match_run(prefix, following)
                key = self.snapshots.find(prefix, following[: run[1] if run else 0])
            if key is not None:
                return key, start + len(key[1]) // TOKEN_BYTES
        return None, 0

    def start(self, seq: Sequence, key: Key | None, num_tokens: int, reach: list[int]) -> None:
        """Start a waiting sequence in its batch slot with a snapshot that `find` found.

        reach: numbers of leading tokens up to which K and V are known.
        """
        self.snapshots.restore(key, seq.batch_slot)
        if key is not None and key != self._needs.get(seq.id):
            self.snapshots.need(key, -1)
        seq.num_in_snapshot = num_tokens
        seq.snapshots_at = []
        branches = self.branches.find(seq, num_tokens)
        last, limit = num_tokens, seq.num_reusable - 1
        for length in sorted({*branches, *reach}):
            if last + self.min_gain <= length <= limit:
                seq.snapshots_at.append((length, branches.get(length, 0)))
                last = length

    def end_of_chunk(self, seq: Sequence, end: int) -> int:
        """Return where a chunk ends: at `end`, or at the next snapshot if that is before."""
        return min(end, seq.snapshots_at[0][0]) if seq.snapshots_at else end

    def chunk_planned(self, seq: Sequence) -> bool:
        """Keep the state after the chunk that was just planned, if a snapshot is wanted there.

        Returns whether it is.
        """
        if not seq.snapshots_at or seq.snapshots_at[0][0] != seq.num_computed:
            return False
        _, num_waiting = seq.snapshots_at.pop(0)
        self._save(seq, after_step=True, num_waiting=num_waiting)
        return True

    def release(self, seq: Sequence) -> None:
        """Keep the state of a sequence that gives its batch slot back.

        The K and V of its computed tokens have been registered.
        """
        if seq.num_computed - seq.num_in_snapshot >= self.min_gain:
            self._save(seq, after_step=False)

    def _save(self, seq: Sequence, *, after_step: bool, num_waiting: int = 0) -> None:
        depth = seq.num_computed // self.block_size
        prefix = seq.prefix
        if depth < seq.num_registered_blocks:  # the blocks from here on were known before
            prefix = self.blocks.prefix(seq.block_table[depth - 1]) if depth else seq.request.root
        if prefix is None:
            return
        tail = seq.token_ids[depth * self.block_size : seq.num_computed]
        self.snapshots.save(
            seq.batch_slot, prefix, tail, after_step=after_step, num_waiting=num_waiting
        )
        seq.num_in_snapshot = seq.num_computed
        self.listener.snapshot_saved(seq, seq.num_computed)
