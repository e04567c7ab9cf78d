"""Decide which tokens run next: admission, chunking, preemption.

Works on lengths, never on token values, so a step can be planned while the last one still runs; `commit` hears later
which tokens it sampled. Knows nothing about tensors, devices or models.
"""

from collections import deque

from nanovllm.engine.batch import Batch, Fork, PrefillChunk
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, Status


class Scheduler:
    """First come, first served, under two budgets: tokens a step and sequences at a time.

    A step runs every decoding sequence, then fills what is left of the token budget with prompts. When blocks run
    out, the youngest sequence gives its own back and is computed anew later: the oldest always get on.
    Patient sequences may wait though there is room: see `_rows_wanted`.
    """

    # A decode step of fewer rows takes the time to read the weights; of more, that to multiply by them. Where the two
    # meet is a matter of a device's FLOP/s for each byte/s. Measured on an H200, a step of an 8B model with little to
    # attend to: 5.4 ms for 64 rows, 5.8 for 160, 6.7 for 192, 7.3 for 256.
    FULL_ROWS = 160
    GROUP_TOKENS = 4096  # prompts of so many tokens keep a device busy for longer than the host takes to launch them

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        # A decoding sequence takes a token of every step, so no more can run than a step has tokens.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_group = max(1, self.max_num_seqs // 16)
        self.uncached_part = 1.0  # of the prompt admitted last
        # Blocks to leave free when admitting beside running sequences, so that these need not be preempted at once.
        self.reserve = blocks.num_blocks // 64
        self.sequences: dict[int, Sequence] = {}  # all unfinished, by id
        self.waiting: deque[Sequence] = deque()
        self.num_waiting_tokens = 0  # that those waiting may yet draw
        self.running: list[Sequence] = []  # decoding, longest first
        self.prefilling: Sequence | None = None  # the one admitted sequence whose prompt is not scheduled to its end
        self.num_preemptions = 0
        self._shared: tuple[tuple[int, ...], int] = (), 0  # the rows that decoded last, and their tables' common blocks
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[list[Sequence]] = deque()  # for each step scheduled and not committed: who draws

    def add(self, seq: Sequence) -> None:
        self.sequences.update((one.id, one) for one in (seq, *seq.forks))
        self.waiting.append(seq)
        self.num_waiting_tokens += seq.num_left_with_forks

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return self.max_num_seqs - len(self._free_slots)

    def schedule(self) -> Batch | None:
        """Plan the next step. None: nothing can run until a step in flight is committed."""
        if not self._make_room_to_decode():
            return None
        sampling, new_blocks = self._schedule_decodes()
        decode_slots = tuple([seq.batch_slot for seq in sampling])
        shared_blocks = self._count_shared_blocks(sampling, decode_slots)
        prefills = self._schedule_prefills(self.max_num_batched_tokens - len(decode_slots), sampling)
        if not decode_slots and not prefills:
            assert self._in_flight or not self.sequences, "with nothing in flight, some sequence can always run"
            return None
        self._in_flight.append(sampling)
        return Batch(decode_slots, tuple(new_blocks), shared_blocks, tuple(prefills))

    def _make_room_to_decode(self) -> bool:
        """See that there is a block for every sequence that needs one, preempting if need be. False: commit first."""
        while sum([seq.num_tokens > seq.capacity for seq in self.running]) > self.blocks.num_free:
            if self._in_flight:
                return False  # a preempted sequence is computed anew from its tokens: all of them must be known
            self._preempt(self.prefilling or max(self.running, key=lambda seq: seq.id))
        return True

    def _schedule_decodes(self) -> tuple[list[Sequence], list[tuple[int, int, int]]]:
        decoding, block_size = self.running, self.blocks.block_size
        new_blocks = []
        last_step = False
        for seq in decoding:
            length = seq.num_tokens
            # The step writes the K and V of position length - 1: a block is added when that passes a multiple of the
            # block size.
            if length > seq.capacity:
                seq.block_table += self.blocks.allocate(1)
                seq.capacity += block_size
                new_blocks.append((seq.batch_slot, len(seq.block_table) - 1, seq.block_table[-1]))
            seq.num_computed = length
            seq.num_tokens = length + 1
            if length + 1 == seq.max_len:
                last_step = True
        if last_step:
            self.running = [seq for seq in decoding if seq.num_tokens < seq.max_len]
        return list(decoding), new_blocks

    def _count_shared_blocks(self, decoding: list[Sequence], rows: tuple[int, ...]) -> int:
        """With how many blocks all their tables begin. It lasts as long as the rows do: tables only grow at their end."""
        if rows != self._shared[0]:
            first = decoding[0].block_table if decoding else []
            count = len(first)
            for seq in decoding:
                while first[:count] != seq.block_table[:count]:
                    count -= 1
                if count == 0:
                    break
            self._shared = rows, count
        return self._shared[1]

    def _schedule_prefills(self, budget: int, sampling: list[Sequence]) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        forks: list[Sequence] = []
        rows = self._rows_wanted()
        while budget > 0:
            seq = self.prefilling or (self._admit() if self.num_running < rows else None)
            if seq is None:
                break
            chunk = self._next_chunk(seq, budget)
            budget -= len(chunk.token_ids)
            chunks.append(chunk)
            if not chunk.is_last:
                self.prefilling = seq
                continue
            self.prefilling = None
            sampling.append(seq)
            forks += seq.forks
            for one in (seq, *seq.forks):
                one.num_tokens += 1
                if one.num_tokens < one.max_len:
                    self.running.append(one)
            seq.forks = ()
        sampling += forks
        if chunks:
            # Attention to a long context takes long: on the device it begins first, and short ones fill the end. As each
            # step adds a token to all, they stay in this order.
            self.running.sort(key=lambda seq: -seq.num_tokens)
        return chunks

    def _rows_wanted(self) -> int:
        """Up to how many rows to admit sequences now; a last one's forks may take it over that.

        Sequences are admitted in groups, as a few prompts leave the device half idle. And patient ones are not all admitted
        as soon as there is room. No run is shorter than its longest sequence: if the others all start with that, its first
        steps are slow, of many rows, and its last ones hold few rows for the same bytes of weights. So as many run as
        spread the tokens evenly over the longest one's steps, the others when a row comes free, or when the next one
        would otherwise end after the longest. Say one may draw 1,000 tokens and 499 others 500 each: over 1,000 steps
        that is 250 rows a step, and not 500 rows for 500 steps, then one.
        """
        count = self.num_running
        if not self.waiting:
            return count
        if not self.running:
            group = 1
        elif len(self._free_slots) < (group := self._group()):
            return count
        first = self.waiting[0]
        if not first.patient:
            return self.max_num_seqs
        left = [seq.num_left for seq in self.running]
        longest = max(left, default=first.num_left)
        rows = max(self.FULL_ROWS, -(-(sum(left) + self.num_waiting_tokens) // longest))
        if first.num_left >= longest:
            return max(rows, count + group)
        return rows if count + group <= rows else count

    def _group(self) -> int:
        """How many of those waiting make a step with prompts worth its while: it is no graph's replay.

        As much of their prompts is taken to be cached as of the one admitted last.
        """
        tokens, enough = 0, min(self.GROUP_TOKENS, self.max_num_batched_tokens)
        for count, seq in enumerate(self.waiting, 1):
            tokens += seq.num_tokens * self.uncached_part
            if tokens >= enough or count == self.max_group:
                break
        return count

    def _admit(self) -> Sequence | None:
        """Give the first waiting sequence a row and blocks, shared ones where its prefix is cached, if there are enough."""
        if not self.waiting or len(self._free_slots) <= len(self.waiting[0].forks):
            return None
        seq, blocks = self.waiting[0], self.blocks
        shared = blocks.match(seq.token_ids)
        full, tail = divmod(seq.num_tokens, blocks.block_size)
        num_tails = 1 if tail else 0  # for the sequence and each of its forks
        count = full - len(shared) + num_tails
        reserve = self.reserve if self.running else 0
        if blocks.num_free_without(shared) < count + len(seq.forks) * num_tails + reserve:
            return None
        self.waiting.popleft()
        self.num_waiting_tokens -= seq.num_left_with_forks
        blocks.share(shared)
        seq.block_table = shared + blocks.allocate(count)
        for fork in seq.forks:
            blocks.share(seq.block_table[:full])
            fork.block_table = seq.block_table[:full] + blocks.allocate(num_tails)
        for one in (seq, *seq.forks):
            one.capacity = len(one.block_table) * blocks.block_size
            one.batch_slot = self._free_slots.pop()
            one.status = Status.RUNNING
        seq.num_hashed_blocks = len(shared)
        seq.last_hash = blocks.hash_of(shared[-1]) if shared else 0
        # Of a prompt that is cached to its end, the last token is computed again: sampling needs its logits.
        seq.num_computed = min(len(shared) * blocks.block_size, seq.num_tokens - 1)
        self.uncached_part = 1 - seq.num_computed / seq.num_tokens
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = len(shared) * blocks.block_size
        return seq

    def _next_chunk(self, seq: Sequence, budget: int) -> PrefillChunk:
        start, end = seq.num_computed, min(seq.num_computed + budget, seq.num_tokens)
        # Blocks known before this chunk are shared, or were written by the chunk before it.
        write_from = seq.num_hashed_blocks * self.blocks.block_size
        seq.num_computed = end
        # Known from here on, even to the next sequence of this very step: a layer writes all K and V before it attends.
        self._register_full_blocks(seq, end)
        is_last = end == seq.num_tokens
        return PrefillChunk(
            batch_slot=seq.batch_slot,
            token_ids=seq.token_ids[start:end],
            start=start,
            write_from=write_from,
            block_table=list(seq.block_table),
            is_last=is_last,
            temperature=seq.params.temperature,
            seed=seq.seed,
            sampling=seq.sampling_metadata() if is_last else None,
            forks=tuple([self._fork(seq, fork) for fork in seq.forks]) if is_last else (),
        )

    def _fork(self, seq: Sequence, fork: Sequence) -> Fork:
        """Let a completion begin where the prompt, computed for `seq`, ends."""
        fork.num_computed, fork.num_hashed_blocks, fork.last_hash = seq.num_computed, seq.num_hashed_blocks, seq.last_hash
        table, temperature = list(fork.block_table), fork.params.temperature
        return Fork(fork.batch_slot, seq.num_computed, table, temperature, fork.seed, fork.sampling_metadata())

    def _register_full_blocks(self, seq: Sequence, length: int) -> None:
        """Tell the prefix cache of the blocks filled by the first `length` tokens, whose values are known."""
        size = self.blocks.block_size
        while (seq.num_hashed_blocks + 1) * size <= length:
            index = seq.num_hashed_blocks
            tokens = seq.token_ids[index * size : (index + 1) * size]
            seq.last_hash = self.blocks.register(seq.block_table[index], seq.last_hash, tokens)
            seq.num_hashed_blocks += 1

    def commit(
        self, tokens: list[int], logprobs: dict[int, dict[int, float]] = {}
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Take the tokens drawn by the oldest step in flight, and log-probabilities, by index, for those who asked.

        Returns the sequences that sampled one, and those among them that ended with it. A sequence that had ended before
        ran one step too far: its token is dropped.
        """
        sampled, ended = [], []
        block_size = self.blocks.block_size
        sampling = self._in_flight.popleft()
        assert len(sampling) == len(tokens), "a step answers one token for each sequence that draws"
        for i, of_token in logprobs.items():
            if sampling[i].status is not Status.FINISHED:
                sampling[i].logprobs.append(of_token)
        for seq, token in zip(sampling, tokens):
            if seq.status is Status.FINISHED:
                continue
            sampled.append(seq)
            seq.token_ids.append(token)
            length = len(seq.token_ids)
            if (length - 1) % block_size == 0:  # the tokens before this one fill a block
                self._register_full_blocks(seq, length - 1)
            if token in seq.stop_ids:
                seq.finish_reason = "stop"
                ended.append(seq)
            elif length == seq.max_len:
                seq.finish_reason = "length"
                ended.append(seq)
        if ended:
            for seq in ended:
                self._release(seq)
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        return sampled, ended

    def abort(self, seq: Sequence) -> None:
        """End a sequence now, wherever it stands."""
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self.num_waiting_tokens -= seq.num_left_with_forks
        elif seq in self.running:
            self.running.remove(seq)
        if self.prefilling is seq:
            self.prefilling = None
        for one in (seq, *seq.forks):
            one.finish_reason = "abort"
            self._release(one)
        seq.forks = ()

    def _release(self, seq: Sequence) -> None:
        """Give back a sequence's row and blocks. A step in flight may still use them: later steps come after it."""
        if seq.status is Status.RUNNING:
            self._give_back(seq)
        seq.status = Status.FINISHED
        del self.sequences[seq.id]

    def _preempt(self, seq: Sequence) -> None:
        if seq is self.prefilling:
            self.prefilling = None
        else:
            self.running.remove(seq)
        self.num_preemptions += 1
        seq.num_preemptions += 1
        for one in (seq, *seq.forks):
            self._give_back(one)
            one.reset()
            one.status = Status.WAITING
        self.waiting.appendleft(seq)
        self.num_waiting_tokens += seq.num_left_with_forks

    def _give_back(self, seq: Sequence) -> None:
        self.blocks.release(seq.block_table)
        self._free_slots.append(seq.batch_slot)
