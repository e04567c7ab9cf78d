"""Which KV blocks hold a sequence's tokens: what it shares as it starts, what it takes as it grows,
and what it gives back.

The block manager knows single blocks; here they become the block tables of sequences. Knows no
batch slot and no policy: those are the scheduler's.
"""

from typing import NamedTuple

from nanovllm.engine.block_manager import NO_PREFIX, BlockManager
from nanovllm.engine.listener import NOBODY, EngineListener
from nanovllm.engine.sequence import Sequence


class Start(NamedTuple):
    """The blocks that a sequence and its forks would start with."""

    cached: list[int]  # of the longest prefix that the cache holds
    num_behind: int  # leading ones of these that no token to be computed sees
    num_new: int  # that the sequence takes beside them
    num_tails: int  # that its forks take: one each if the prompt fills its last block only in part

    @property
    def shared(self) -> list[int]:
        return self.cached[self.num_behind :]


class BlockTables:
    """Gives sequences blocks, and takes them again.

    window: how many tokens a token sees, itself included, in the layer that lets it see most; None:
        all up to itself. Blocks that lie behind it are given back while a sequence runs.
    most_blocks: a sequence without forks starts with no more, for they hold a step's tokens and all
        that these see.
    copies: pairs of blocks (source, copy), for the planned step to copy before it writes any.
    """

    def __init__(
        self,
        blocks: BlockManager,
        window: int | None,
        max_step_tokens: int,
        listener: EngineListener = NOBODY,
    ) -> None:
        self.blocks = blocks
        self.listener = listener
        self.block_size = blocks.block_size
        self.window = window
        self.most_blocks = blocks.num_blocks
        if window is not None:
            span = window + max_step_tokens
            self.most_blocks = min(blocks.num_blocks, span // self.block_size + 2)
        self.copies: list[tuple[int, int]] = []

    def begin_step(self) -> None:
        self.blocks.begin_step()
        self.copies = []

    def plan(self, seq: Sequence) -> Start:
        """What a waiting sequence would start with. Changes nothing."""
        reusable = seq.token_ids[: seq.num_reusable]
        cached = self.blocks.match(reusable)
        num_behind = self._num_behind(min(len(cached) * self.block_size, len(reusable) - 1))
        num_new = -(-seq.num_tokens // self.block_size) - len(cached)
        if not seq.forks:  # they need the whole prompt's blocks
            num_new = min(num_new, self.most_blocks - (len(cached) - num_behind))
        num_tails = len(seq.forks) if seq.num_tokens % self.block_size else 0
        return Start(cached, num_behind, num_new, num_tails)

    def have_room(self, start: Start, reserve: int) -> bool:
        """Whether there are blocks for it, and `reserve` more."""
        needed = start.num_new + start.num_tails + reserve
        return self.blocks.num_free_without(start.shared) >= needed

    def start(self, seq: Sequence, start: Start) -> int:
        """Give a sequence and its forks what `plan` said. Returns how many of its leading tokens
        have their K and V already, or copied before the step writes any.
        """
        blocks, cached = self.blocks, start.cached
        seq.num_given_back = start.num_behind
        seq.num_registered_blocks = len(cached)
        seq.prefix = blocks.prefix(cached[-1]) if cached else NO_PREFIX
        # After the cached blocks, the first tokens of one more may be cached: they are copied.
        num_cached = len(cached) * self.block_size
        end = min(num_cached + self.block_size, seq.num_reusable)
        run = blocks.match_run(seq.prefix, seq.token_ids[num_cached:end])
        blocks.share(start.shared)
        seq.block_table = cached + blocks.allocate(start.num_new)
        # The source may have just been allocated itself: a step copies before it writes.
        if run is not None:
            source, length = run
            self.copies.append((source, seq.block_table[len(cached)]))
            num_cached += length
        seq.capacity = len(seq.block_table) * self.block_size
        if seq.forks:
            self._share_with_forks(seq)
        return num_cached

    def _share_with_forks(self, seq: Sequence) -> None:
        """Let the forks share the blocks that the prompt fills. If it fills the last one in part,
        each fork has one of its own in that place.
        """
        num_full, tail = divmod(seq.num_tokens, self.block_size)
        for fork in seq.forks:
            self.blocks.share(seq.block_table[seq.num_given_back : num_full])
            fork.block_table = seq.block_table[:num_full] + self.blocks.allocate(1 if tail else 0)
            fork.num_given_back, fork.capacity = seq.num_given_back, seq.capacity

    def extend(self, seq: Sequence, length: int) -> None:
        """Give a sequence blocks for `length` tokens, or as many as there are."""
        count = min(-(-(length - seq.capacity) // self.block_size), self.blocks.num_free)
        seq.block_table += self.blocks.allocate(count)
        seq.capacity += count * self.block_size

    def make_room(self, seq: Sequence, length: int) -> int:
        """`extend` for a prompt, which first gives back what it no longer sees. Returns how many of
        `length` tokens there is room for.
        """
        if length > seq.capacity:
            self.give_back(seq)
            num_before = len(seq.block_table)
            self.extend(seq, length)
            if len(seq.block_table) > num_before:
                self.listener.blocks_grown(seq, seq.block_table[num_before:])
        return min(length, seq.capacity)

    def give_back(self, seq: Sequence) -> None:
        """Release the registered blocks that none of a sequence's next tokens sees.

        They stay in its block table, though others may get them: attention masks what they hold.
        """
        num_behind = min(self._num_behind(seq.num_computed), seq.num_registered_blocks)
        if num_behind > seq.num_given_back:
            self.blocks.release(seq.block_table[seq.num_given_back : num_behind])
            seq.num_given_back = num_behind
            self.listener.blocks_given_back(seq)

    def _num_behind(self, position: int) -> int:
        """Leading blocks that no token from `position` on sees."""
        if self.window is None:
            return 0
        return max(0, position + 1 - self.window) // self.block_size

    def register(self, seq: Sequence, length: int) -> None:
        """Tell the prefix cache of the blocks that hold the first `length` tokens, all known."""
        size = self.block_size
        for start in range(seq.num_registered_blocks * size, length, size):
            token_ids = seq.token_ids[start : min(start + size, length)]
            block = seq.block_table[start // size]
            prefix = self.blocks.register(block, seq.prefix, token_ids)
            if len(token_ids) == size:
                seq.prefix = prefix
                seq.num_registered_blocks += 1
        for fork in seq.forks:
            fork.num_registered_blocks, fork.prefix = seq.num_registered_blocks, seq.prefix

    def release(self, seq: Sequence) -> None:
        """Give all blocks back. A step in flight may still use them: later steps follow it."""
        # The last token has no K and V yet, unless it ran one step too far.
        self.register(seq, min(seq.num_computed, len(seq.token_ids) - 1))
        self.blocks.release(seq.block_table[seq.num_given_back :])

    def discard(self, seq: Sequence) -> None:
        """Give all blocks back, and let the prefix cache forget whatever begins as the sequence
        does: the K and V may be no numbers.
        """
        held = seq.block_table[seq.num_given_back :]
        for block in [*self.blocks.match(seq.token_ids), *held]:
            self.blocks.forget(block)
        self.blocks.release(held)
