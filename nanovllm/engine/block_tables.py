"""The block tables of sequences: the KV blocks that a sequence shares when it starts, takes as it
grows, and gives back.

The block manager knows single blocks; this module makes block tables of them. It knows neither
batch slots nor policies, which belong to the scheduler.
"""

from typing import NamedTuple

from nanovllm.engine.block_manager import BlockManager, Key
from nanovllm.engine.listener import NOBODY, EngineListener
from nanovllm.engine.sequence import Sequence


class StartPlan(NamedTuple):
    """The blocks that a sequence would start with."""

    cached: list[int]  # blocks of the longest prefix that the prefix cache holds
    source: int  # another block, which begins with the `run` tokens that follow `cached`
    run: int
    num_cached: int  # leading tokens that need not be computed
    num_out_of_window: int  # leading blocks of `cached` that no token to be computed sees
    num_new: int  # blocks that the sequence takes beside `cached`
    snapshot: Key | None = None  # the state of recurrent layers after `num_cached` tokens
    must_wait: bool = False  # the sequence cannot start in the step that is planned now

    @property
    def shared(self) -> list[int]:
        """The cached blocks that the sequence references."""
        return self.cached[self.num_out_of_window :]


class BlockTables:
    """The blocks of all sequences, which are given to them and taken from them here.

    window: The sliding window: how many tokens a token sees, itself included. If layers differ, the
        largest of their windows; None: a token sees all tokens before it. A running sequence gives
        back the blocks that its window has passed.
    most_blocks: The most blocks that a sequence starts with. They hold the tokens of one step and
        all tokens that these see.
    copies: Pairs of blocks (source, copy) that the planned step copies before it writes any block.
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
        """Begin to plan a step, which has no copies yet."""
        self.blocks.begin_step()
        self.copies = []

    def plan(self, seq: Sequence) -> StartPlan:
        """Find the blocks that a waiting sequence would start with. Changes nothing."""
        cached = self.blocks.match(seq.token_ids[: seq.num_reusable], seq.request.root)
        prefix = self.blocks.prefix(cached[-1]) if cached else seq.request.root
        # Another block may begin with the tokens that follow the cached blocks. It is copied.
        start = len(cached) * self.block_size
        end = min(start + self.block_size, seq.num_reusable)
        source, run = self.blocks.match_run(prefix, seq.token_ids[start:end]) or (-1, 0)
        num_cached, snapshot = self.find_beginning(seq, cached, run)
        # The position of the first token that is computed, or copied as part of the run.
        position = min(num_cached, start, seq.num_reusable - 1)
        num_out_of_window = self._num_out_of_window(position)
        num_new = -(-seq.num_tokens // self.block_size) - len(cached)
        num_new = min(num_new, self.most_blocks - (len(cached) - num_out_of_window))
        return StartPlan(cached, source, run, num_cached, num_out_of_window, num_new, snapshot)

    def have_room(self, plan: StartPlan, reserve: int) -> bool:
        """Tell whether there are free blocks for `plan`, and `reserve` more."""
        return self.blocks.num_free_without(plan.shared) >= plan.num_new + reserve

    def start(self, seq: Sequence, plan: StartPlan) -> None:
        """Give a sequence the blocks that `plan` found. Cached blocks are shared; the run is copied
        before the step writes any block.
        """
        blocks, cached = self.blocks, plan.cached
        seq.num_given_back = plan.num_out_of_window
        seq.num_registered_blocks = len(cached)
        seq.prefix = blocks.prefix(cached[-1]) if cached else seq.request.root
        blocks.share(plan.shared)
        seq.block_table = cached + blocks.allocate(plan.num_new)
        # The source may be a block that `allocate` has just evicted and given away. That is right,
        # because a step copies blocks before it writes any.
        if plan.num_cached > len(cached) * self.block_size:
            self.copies.append((plan.source, seq.block_table[len(cached)]))
        seq.capacity = len(seq.block_table) * self.block_size

    def extend(self, seq: Sequence, length: int) -> None:
        """Give a sequence blocks for `length` tokens, or all free blocks if there are too few."""
        count = min(-(-(length - seq.capacity) // self.block_size), self.blocks.num_free)
        seq.block_table += self.blocks.allocate(count)
        seq.capacity += count * self.block_size

    def extend_for_chunk(self, seq: Sequence, length: int) -> int:
        """Give a sequence blocks for `length` tokens of its prompt, as far as blocks are free.

        The sequence first gives back the blocks that its window has passed. Returns how many tokens
        have room: the next chunk ends there.
        """
        if length > seq.capacity:
            self.give_back(seq)
            num_before = len(seq.block_table)
            self.extend(seq, length)
            if len(seq.block_table) > num_before:
                self.listener.blocks_grown(seq, seq.block_table[num_before:])
        return min(length, seq.capacity)

    def give_back(self, seq: Sequence) -> None:
        """Release the registered blocks that the window of a sequence has passed.

        The block table keeps their numbers although other sequences may get these blocks: attention
        masks the positions that they held.
        """
        num_out_of_window = min(
            self._num_out_of_window(seq.num_computed), seq.num_registered_blocks
        )
        if num_out_of_window > seq.num_given_back:
            self.blocks.release(seq.block_table[seq.num_given_back : num_out_of_window])
            seq.num_given_back = num_out_of_window
            self.listener.blocks_given_back(seq)

    def _num_out_of_window(self, position: int) -> int:
        """Count the leading blocks that no token from `position` on sees."""
        if self.window is None:
            return 0
        return max(0, position + 1 - self.window) // self.block_size

    def register(self, seq: Sequence, length: int) -> None:
        """Register the blocks of the first `length` tokens, all of them known, with the prefix
        cache.
        """
        size = self.block_size
        for start in range(seq.num_registered_blocks * size, length, size):
            token_ids = seq.token_ids[start : min(start + size, length)]
            block = seq.block_table[start // size]
            prefix = self.blocks.register(block, seq.prefix, token_ids)
            if len(token_ids) == size:
                seq.prefix = prefix
                seq.num_registered_blocks += 1

    def release(self, seq: Sequence) -> None:
        """Give all blocks of a sequence back.

        A step in flight may still use the blocks. The device runs later steps after that step, so
        none overwrites the blocks too early.
        """
        # The last token has K and V if the sequence ran one step too far.
        self.register(seq, min(seq.num_computed, len(seq.token_ids)))
        self.blocks.release(seq.block_table[seq.num_given_back :])

    def discard(self, seq: Sequence) -> None:
        """Give all blocks of a sequence back, and remove them and its cached prefix from the prefix
        cache, because their K and V may be NaN or infinite.
        """
        held = seq.block_table[seq.num_given_back :]
        for block in [*self.blocks.match(seq.token_ids, seq.request.root), *held]:
            self.blocks.forget(block)
        self.blocks.release(held)

    # StatefulBlockTables overrides these methods for models with recurrent layers.

    def find_beginning(self, seq: Sequence, cached: list[int], run: int) -> tuple[int, Key | None]:
        """Find where a sequence may begin, if `cached` holds whole blocks of its leading tokens,
        and another block the next `run` tokens.

        Returns the number of leading tokens that need not be computed, and the snapshot of the
        state after them. None: the model needs none, or the sequence begins with its first token.
        """
        return len(cached) * self.block_size + run, None

    def sequence_queued(self, seq: Sequence) -> None:
        """Hear that a sequence waits from now on."""

    def sequence_unqueued(self, seq: Sequence) -> None:
        """Hear that a sequence waits no more."""

    def take_state_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the `state_copies` of the planned step."""
        return ()
