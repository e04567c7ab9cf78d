"""Decide which tokens run next: admission, chunked prefill, preemption, pauses.

Works on lengths, never on token values, so a step can be planned while the last one still runs;
`commit` hears later which tokens it sampled. Knows nothing about tensors, devices or models.
"""

from collections import deque

from nanovllm.engine.batch import Batch, PrefillChunk
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.errors import InvalidLogitsError
from nanovllm.engine.policy import SchedulingPolicy, WaitingQueue
from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.sampling_params import INVALID_TOKEN


class Scheduler:
    """Runs sequences under three limits: tokens of a step, batch slots, and KV blocks.

    A step runs every decoding sequence, then fills what is left of the token budget with prompts.
    The policy says which of them start. When blocks run out, the running sequence that the policy
    puts last gives its own back, and is computed anew later: the first ones always get on.
    """

    def __init__(
        self,
        blocks: BlockManager,
        policy: SchedulingPolicy = SchedulingPolicy(),
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
    ) -> None:
        """`window`: how many tokens a token sees, itself included, in the layer that lets it see
        most; None: all up to itself. What lies behind it is given back while a sequence runs.
        """
        self.blocks = blocks
        self.policy = policy
        self.window = window
        self.max_num_batched_tokens = max_num_batched_tokens
        assert max_num_seqs <= max_num_batched_tokens, "all that decode take a token of each step"
        self.max_num_seqs = max_num_seqs
        # Blocks to leave free when a sequence starts beside others, lest one be preempted at once.
        self.reserve = blocks.num_blocks // 64
        # A sequence starts with no more than these, which hold a step's tokens and all they see.
        self.most_blocks = blocks.num_blocks
        if window is not None:
            span = window + max_num_batched_tokens
            self.most_blocks = min(blocks.num_blocks, span // blocks.block_size + 2)
        self.sequences: dict[int, Sequence] = {}  # all unfinished, by id
        self.waiting = WaitingQueue()
        self.prefilling: list[Sequence] = []  # those whose prompts are computed in part
        self.running: list[Sequence] = []  # decoding, unless their last token is in flight
        # Those that do not run until they are resumed. They keep batch slots and blocks, if they
        # have them, until others need these. True: the prompt is computed in part.
        self.paused: dict[Sequence, bool] = {}
        self.num_preemptions = 0
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        # For each step in flight, the sequences that sample a token in it, in the batch's order.
        self._in_flight: deque[list[Sequence]] = deque()
        # One for each prompt chunk in flight that scores tokens.
        self._scoring: deque[PromptScores] = deque()
        self._block_copies: list[tuple[int, int]] = []  # of the step that is planned

    def add(self, seq: Sequence) -> None:
        for one in (seq, *seq.forks):
            self.sequences[one.id] = one
            one.order = self.policy.key(one), one.id
        self.waiting.add(seq)

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    @property
    def num_running(self) -> int:
        """Sequences that hold a batch slot and are not paused."""
        held = sum([1 + len(seq.forks) for seq in self.paused if seq.status is Status.RUNNING])
        return self.max_num_seqs - len(self._free_slots) - held

    @property
    def newest_step(self) -> list[Sequence]:
        """The sequences that sample in the step that was planned last, in the batch's order."""
        return self._in_flight[-1]

    def schedule(self) -> Batch | None:
        """Plan the next step. None: nothing can run until a step in flight is committed, or a
        paused sequence is resumed.
        """
        self.blocks.begin_step()
        self._block_copies = []
        if not self._make_room():
            return None
        decoding, new_blocks = self._schedule_decodes()
        decode_slots = tuple([seq.batch_slot for seq in decoding])
        shared_blocks = self.policy.shared_prefix_blocks(decoding)
        chunks, started = self._schedule_prefills(self.max_num_batched_tokens - len(decoding))
        if not decoding and not chunks:
            stuck = self.waiting or self.prefilling or self.running
            assert self._in_flight or not stuck, "if nothing is in flight, some can run"
            return None
        self._in_flight.append(decoding + started)
        copies = tuple(self._block_copies)
        return Batch(decode_slots, tuple(new_blocks), shared_blocks, tuple(chunks), copies)

    def _make_room(self) -> bool:
        """Preempt until every sequence that needs a block can have one. False: commit first."""
        while True:
            growing = [seq for seq in self.running if seq.num_tokens > seq.capacity]
            growing += [seq for seq in self.prefilling if seq.num_computed == seq.capacity]
            for seq in growing:
                self._give_back(seq)
            if len(growing) <= self.blocks.num_free:
                return True
            if self._preempt_paused():
                continue
            # A preempted sequence is computed anew from its tokens: all of them must be known.
            if self._in_flight:
                return False
            seq = max(self.running + self.prefilling, key=lambda seq: seq.order)
            self._withdraw(seq)
            self._preempt(seq)
            self.waiting.add(seq)

    def _give_back(self, seq: Sequence) -> None:
        """Release the blocks that none of a sequence's next tokens sees.

        They stay in its block table, though others may get them: attention masks what they hold.
        """
        num_behind = min(self._num_behind(seq.num_computed), seq.num_registered_blocks)
        if num_behind > seq.num_given_back:
            self.blocks.release(seq.block_table[seq.num_given_back : num_behind])
            seq.num_given_back = num_behind

    def _num_behind(self, position: int) -> int:
        """Leading blocks that no token from `position` on sees."""
        if self.window is None:
            return 0
        return max(0, position + 1 - self.window) // self.blocks.block_size

    def _grow(self, seq: Sequence, length: int) -> None:
        """Give a sequence blocks for `length` tokens, or as many as there are."""
        size = self.blocks.block_size
        count = min(-(-(length - seq.capacity) // size), self.blocks.num_free)
        seq.block_table += self.blocks.allocate(count)
        seq.capacity += count * size

    def _preempt_paused(self) -> bool:
        """Preempt the paused sequence that the policy puts last. False: none has anything to give,
        unless a step in flight is committed first.
        """
        holding = [
            seq
            for seq in self.paused
            if seq.status is Status.RUNNING and seq.num_tokens == len(seq.token_ids)
        ]
        if holding:
            self._preempt(max(holding, key=lambda seq: seq.order))
        return bool(holding)

    def _schedule_decodes(self) -> tuple[list[Sequence], list[tuple[int, int, int]]]:
        """Plan a token for each running sequence. Returns them, and the batch's `new_blocks`."""
        decoding = self.running.copy()
        new_blocks = []
        any_last = False
        for seq in decoding:
            length = seq.num_tokens
            # The step writes the K and V of position length - 1.
            if length > seq.capacity:
                self._grow(seq, length)
                new_blocks.append((seq.batch_slot, len(seq.block_table) - 1, seq.block_table[-1]))
            seq.num_computed = length
            seq.num_tokens = length + 1
            if length + 1 == seq.max_len:
                any_last = True
        if any_last:
            self.running = [seq for seq in decoding if seq.num_tokens < seq.max_len]
        return decoding, new_blocks

    def _schedule_prefills(self, budget: int) -> tuple[list[PrefillChunk], list[Sequence]]:
        """Fill `budget` tokens with prompts. Returns the chunks, and who samples after them."""
        chunks: list[PrefillChunk] = []
        started: list[Sequence] = []
        forks: list[Sequence] = []
        limit = max(1, self.policy.running_limit(self)) if self.waiting else 0
        while budget > 0:
            if self.waiting and not self.prefilling and self.num_running < limit:
                self._start_next()
            if not self.prefilling:
                break
            seq = self.prefilling[0]
            chunk = self._next_chunk(seq, budget)
            if not chunk.token_ids:  # no block is free
                break
            budget -= len(chunk.token_ids)
            chunks.append(chunk)
            if seq.scores is not None and chunk.scored is not None:
                self._scoring.append(seq.scores)
            if not chunk.is_last:
                break
            self.prefilling.pop(0)
            started.append(seq)
            forks += seq.forks
            for one in (seq, *seq.forks):
                one.num_tokens += 1
                if one.num_tokens < one.max_len:
                    self.running.append(one)
            seq.forks = ()
        if started:
            self.policy.order_decodes(self.running)
        return chunks, started + forks

    def _start_next(self) -> None:
        """Let the first waiting sequence run, and its forks, if there are slots and blocks."""
        seq, blocks = self.waiting.first, self.blocks
        # The blocks of its longest cached prefix, and those of them that its next tokens see.
        reusable = seq.token_ids[: seq.num_reusable]
        cached = blocks.match(reusable)
        num_cached = len(cached) * blocks.block_size
        num_behind = self._num_behind(min(num_cached, len(reusable) - 1))
        seen = cached[num_behind:]
        # How many more it needs.
        num_new = -(-seq.num_tokens // blocks.block_size) - len(cached)
        if not seq.forks:  # they need the whole prompt's blocks
            num_new = min(num_new, self.most_blocks - len(seen))
        if not self._make_room_to_start(seq, seen, num_new):
            return
        self.waiting.remove(seq)
        seq.num_given_back = num_behind
        seq.num_registered_blocks = len(cached)
        seq.prefix_id = blocks.prefix_id(cached[-1]) if cached else 0
        # Where the cached blocks end, a part of one more may be copied.
        next_tokens = reusable[num_cached : num_cached + blocks.block_size]
        run = blocks.match_run(seq.prefix_id, next_tokens)
        blocks.share(seen)
        seq.block_table = cached + blocks.allocate(num_new)
        if run is not None:  # even if its block was just taken: a step copies before it writes
            source, length = run
            self._block_copies.append((source, seq.block_table[len(cached)]))
            num_cached += length
        self._share_with_forks(seq)
        self._run(seq, num_cached)

    def _make_room_to_start(self, seq: Sequence, seen: list[int], num_new: int) -> bool:
        """Whether there are slots and blocks for a sequence and its forks. Paused ones give theirs.

        `seen`: the cached blocks that it shares. `num_new`: how many it needs besides.
        """
        num_tails = len(seq.forks) if seq.num_tokens % self.blocks.block_size else 0
        needed = num_new + num_tails + (self.reserve if self.running else 0)
        while (
            len(self._free_slots) <= len(seq.forks) or self.blocks.num_free_without(seen) < needed
        ):
            if not self._preempt_paused():
                return False
        return True

    def _share_with_forks(self, seq: Sequence) -> None:
        """Let the forks share the blocks that the prompt fills. A last one that it fills in part,
        each has for itself.
        """
        num_full, tail = divmod(seq.num_tokens, self.blocks.block_size)
        for fork in seq.forks:
            self.blocks.share(seq.block_table[seq.num_given_back : num_full])
            fork.block_table = seq.block_table[:num_full] + self.blocks.allocate(1 if tail else 0)
            fork.num_given_back = seq.num_given_back

    def _run(self, seq: Sequence, num_cached: int) -> None:
        """Give a sequence that has its blocks, and its forks, slots; let its prompt be computed."""
        for one in (seq, *seq.forks):
            one.capacity = len(one.block_table) * self.blocks.block_size
            one.batch_slot = self._free_slots.pop()
            one.status = Status.RUNNING
        # If all of a prompt is cached, its last token is computed again: sampling needs its logits.
        seq.num_computed = min(num_cached, seq.num_reusable - 1)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_cached
        self.prefilling.append(seq)
        self.policy.started(seq)

    def _next_chunk(self, seq: Sequence, budget: int) -> PrefillChunk:
        """Plan to compute what is left of a prompt, or `budget` tokens of it, or what blocks are
        there for.
        """
        start, end = seq.num_computed, min(seq.num_computed + budget, seq.num_tokens)
        if end > seq.capacity:
            self._give_back(seq)
            self._grow(seq, end)
            end = min(end, seq.capacity)
        # Blocks registered before this chunk are shared, or were written by the chunk before it.
        write_from = seq.num_registered_blocks * self.blocks.block_size
        seq.num_computed = end
        # From here on others may share them, even the next sequence of this very step: a layer
        # writes all K and V before it attends.
        self._register_blocks(seq, end)
        for fork in seq.forks:
            fork.num_registered_blocks, fork.prefix_id = seq.num_registered_blocks, seq.prefix_id
        return seq.prefill_chunk(start, end, write_from)

    def _register_blocks(self, seq: Sequence, length: int) -> None:
        """Tell the prefix cache of the blocks that hold the first `length` tokens, all known."""
        size = self.blocks.block_size
        for start in range(seq.num_registered_blocks * size, length, size):
            token_ids = seq.token_ids[start : min(start + size, length)]
            block = seq.block_table[start // size]
            prefix_id = self.blocks.register(block, seq.prefix_id, token_ids)
            if len(token_ids) == size:
                seq.prefix_id = prefix_id
                seq.num_registered_blocks += 1

    def commit(
        self,
        tokens: list[int],
        logprobs: dict[int, bytes] | None = None,
        prompt_logprobs: tuple[bytes, ...] = (),
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Take what the oldest step in flight sampled: tokens in order, log-probabilities by index,
        and those of prompts.

        Returns the sequences that got a token, and those among them that ended with it. One that
        had ended before ran one step too far, and its token is dropped. Raises InvalidLogitsError
        if logits were NaN or infinite: only a new scheduler goes on from there.
        """
        sampling = self._in_flight.popleft()
        assert len(sampling) == len(tokens), "a step answers a token for each one that samples"
        for i, of_token in (logprobs or {}).items():
            if sampling[i].status is not Status.FINISHED:
                sampling[i].logprobs.append(of_token)
        for of_tokens in prompt_logprobs:
            self._scoring.popleft().records.append(of_tokens)
        sampled, ended = [], []
        # Looked up once and not for each token.
        block_size, finished = self.blocks.block_size, Status.FINISHED
        for seq, token in zip(sampling, tokens):
            if seq.status is finished:
                continue
            if token == INVALID_TOKEN:
                invalid = [one for one, of in zip(sampling, tokens) if of == INVALID_TOKEN]
                raise InvalidLogitsError([one for one in invalid if one.status is not finished])
            sampled.append(seq)
            seq.token_ids.append(token)
            length = len(seq.token_ids)
            if (length - 1) % block_size == 0:  # the tokens before this one fill a block
                self._register_blocks(seq, length - 1)
            if token in seq.stop_ids:
                seq.finish_reason = "stop"
                ended.append(seq)
            elif length == seq.max_len:
                seq.finish_reason = "length"
                if seq.held_back is not None:
                    seq.token_ids[-1:] = seq.held_back
                ended.append(seq)
        if ended:
            for seq in ended:
                self._finish(seq)
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        return sampled, ended

    def abort(self, seq: Sequence) -> None:
        """End a sequence now, wherever it stands, and the forks that wait for it."""
        self._withdraw(seq)
        for one in (seq, *seq.forks):
            one.finish_reason = "abort"
            self._finish(one)
        seq.forks = ()

    def pause(self, seq: Sequence) -> None:
        """Let a sequence run no more, nor the forks that wait for it, until `resume`. If it is in
        flight, it still gets that step's token, and may end with it.
        """
        if seq not in self.paused:
            is_prefilling = seq in self.prefilling
            self._withdraw(seq)
            self.paused[seq] = is_prefilling

    def resume(self, seq: Sequence) -> None:
        """Let a paused sequence go on where it was, or anew if others needed its blocks."""
        is_prefilling = self.paused.pop(seq)
        if seq.status is Status.WAITING:
            self.waiting.add(seq)
        elif is_prefilling:
            self.prefilling.append(seq)
        elif seq.num_tokens < seq.max_len:  # else its last token is in flight
            self.running.append(seq)
            self.policy.order_decodes(self.running)

    def _withdraw(self, seq: Sequence) -> None:
        """Take a sequence from where it stands: nowhere, if its last token is in flight."""
        if seq in self.paused:
            del self.paused[seq]
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        elif seq in self.prefilling:
            self.prefilling.remove(seq)
        elif seq in self.running:
            self.running.remove(seq)

    def _finish(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._release(seq)
        seq.status = Status.FINISHED
        self.paused.pop(seq, None)
        del self.sequences[seq.id]

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's slot and blocks: it must be computed anew."""
        self.num_preemptions += 1
        seq.num_preemptions += 1
        for one in (seq, *seq.forks):
            self._release(one)
            one.reset()
            one.status = Status.WAITING

    def _release(self, seq: Sequence) -> None:
        """Give back slot and blocks. A step in flight may still use them: later steps follow it."""
        # The last token has no K and V yet, unless it ran one step too far.
        self._register_blocks(seq, min(seq.num_computed, len(seq.token_ids) - 1))
        self.blocks.release(seq.block_table[seq.num_given_back :])
        self._free_slots.append(seq.batch_slot)
