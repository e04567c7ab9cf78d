"""The scheduler: admission, chunked prefill, preemption and pauses.

The scheduler works on lengths and never on token values. It can therefore plan a step while the
previous step still runs; `commit` takes the tokens later. This module knows nothing about tensors,
devices or models. Who starts next, and who is preempted, is for the policy to say (policy.py).
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from functools import partial

from nanovllm.engine.batch import Batch, PrefillChunk
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.block_tables import BlockTables, StartPlan
from nanovllm.engine.listener import NOBODY, EngineListener
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.sampling_params import INVALID_TOKEN


class Scheduler:
    """The planner of steps, under three limits: tokens per step, batch slots, and KV blocks.

    A step runs every decoding sequence, then fills the rest of the token budget with prompts. The
    policy decides which prompts start. When the blocks run out, paused sequences are preempted
    first, then the running sequence that the policy puts last. A preempted sequence gives its
    blocks back, and is recomputed later.

    Of several completions of a prompt, the first one computes the prompt. The others follow as
    sequences that find it in the prefix cache.
    """

    def __init__(
        self,
        blocks: BlockManager,
        policy: SchedulingPolicy = SchedulingPolicy(),
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        enough_seqs: int | None = None,
        listener: EngineListener = NOBODY,
        make_tables: type[BlockTables] = BlockTables,
    ) -> None:
        """Build a scheduler without sequences.

        Args:
            window: The sliding window; see BlockTables.
            enough_seqs: Beyond this many running sequences, more of them hardly raise the
                throughput. None: `max_num_seqs`.
            make_tables: The class of the block tables. `blocks` must suit it.
        """
        self.blocks = blocks
        self.tables = make_tables(blocks, window, max_num_batched_tokens, listener)
        self.listener = listener
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        assert max_num_seqs <= max_num_batched_tokens, "each decoding sequence takes a token"
        self.max_num_seqs = max_num_seqs
        # The policy reads this number, and may start no more sequences once so many run.
        self.enough_seqs = min(enough_seqs or max_num_seqs, max_num_seqs)
        # While others decode, a sequence starts only if this many blocks stay free. Otherwise those
        # would soon need more blocks than there are, and one would be preempted.
        self.reserve = blocks.num_blocks // 64
        self.sequences: dict[int, Sequence] = {}  # all unfinished sequences, by id
        self.waiting = WaitingQueue(self.tables)
        self.prefilling: list[Sequence] = []  # sequences whose prompts are partly computed
        # Sequences that get a token in each step, without those whose last token is in flight.
        self.decoding: list[Sequence] = []
        # Sequences that do not run until they are resumed. They keep their batch slots and blocks
        # until other sequences need the blocks. The value says whether the sequence was in
        # `prefilling` when it was paused.
        self.paused: dict[Sequence, bool] = {}
        self.num_preemptions = 0
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        # For each step in flight: the sequences that sample a token in it, in batch order.
        self._steps_in_flight: deque[list[Sequence]] = deque()
        # The PromptScores of each chunk in flight that scores tokens, oldest first.
        self._scoring: deque[PromptScores] = deque()

    def add(self, request: Request) -> None:
        """Queue the completions of a request."""
        request.root = self.blocks.new_root(len(request.completions))
        for seq in request.completions:
            self.sequences[seq.id] = seq
            seq.order = self.policy.key(seq), seq.id
            self.waiting.add(seq)

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    @property
    def num_running(self) -> int:
        """The number of sequences that hold a batch slot and are not paused."""
        num_paused = sum([seq.status is Status.RUNNING for seq in self.paused])
        return self.max_num_seqs - len(self._free_slots) - num_paused

    @property
    def newest_step(self) -> list[Sequence]:
        """The sequences that sample in the most recently planned step, in batch order."""
        return self._steps_in_flight[-1]

    def schedule(self) -> Batch | None:
        """Plan the next step.

        Returns None if nothing can run until a step in flight is committed or a paused sequence is
        resumed.
        """
        self.tables.begin_step()
        if not self._make_room():
            return None
        decoding, new_blocks = self._schedule_decodes()
        decode_slots = tuple([seq.batch_slot for seq in decoding])
        shared_blocks = self.policy.shared_prefix_blocks(decoding)
        chunks, prefilled = self._schedule_prefills(self.max_num_batched_tokens - len(decoding))
        if not decoding and not chunks:
            stuck = self.waiting or self.prefilling or self.decoding
            assert self._steps_in_flight or not stuck, "without a step in flight, a sequence runs"
            return None
        self._steps_in_flight.append(decoding + prefilled)
        return Batch(
            decode_slots,
            tuple(new_blocks),
            shared_blocks,
            tuple(chunks),
            block_copies=tuple(self.tables.copies),
            state_copies=self.tables.take_state_copies(),
        )

    def _make_room(self) -> bool:
        """Preempt sequences until there is a block for each sequence that needs one.

        Returns False if a step in flight must be committed first.
        """
        while True:
            growing = [seq for seq in self.decoding if seq.num_tokens > seq.capacity]
            growing += [seq for seq in self.prefilling if seq.num_computed == seq.capacity]
            for seq in growing:
                self.tables.give_back(seq)  # blocks that have left its sliding window
            if len(growing) <= self.blocks.num_free:
                return True
            if self._preempt_paused():
                continue
            # A preempted sequence is recomputed from its tokens, so all of them must be known.
            if self._steps_in_flight:
                return False
            seq = max(self.decoding + self.prefilling, key=lambda seq: seq.order)
            self._withdraw(seq)
            self._preempt(seq)
            self.waiting.add(seq)

    def _preempt_paused(self) -> bool:
        """Preempt the paused sequence that the policy puts last, of those that hold blocks and are
        not in flight. Returns False if there is no such sequence.
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
        """Plan one token for each decoding sequence.

        Returns the sequences, and the `new_blocks` of the batch.
        """
        decoding = self.decoding.copy()
        new_blocks = []
        any_last = False
        for seq in decoding:
            length = seq.num_tokens
            # The step writes the K and V of the last token, whose position is length - 1.
            if length > seq.capacity:
                self.tables.extend(seq, length)
                new_blocks.append((seq.batch_slot, len(seq.block_table) - 1, seq.block_table[-1]))
            seq.num_computed = length
            seq.num_tokens = length + 1
            if length + 1 == seq.max_len:
                any_last = True
        if any_last:
            self.decoding = [seq for seq in decoding if seq.num_tokens < seq.max_len]
        return decoding, new_blocks

    def _schedule_prefills(self, budget: int) -> tuple[list[PrefillChunk], list[Sequence]]:
        """Fill a budget of `budget` tokens with chunks of prompts.

        The loop takes one prompt after the other, those that are partly computed first. It ends
        when the budget, the blocks or the prompts are used up.

        Returns the chunks, and the sequences whose last chunk is among them. Each of these samples
        a token in this step.
        """
        chunks: list[PrefillChunk] = []
        prefilled: list[Sequence] = []
        # Sequences whose prompts go on in the next step: several if the tables end chunks early.
        unfinished: list[Sequence] = []
        limit = max(1, self.policy.running_limit(self)) if self.waiting else 0
        # Completions that can start in the next step, because this one computes their prompts.
        # Slots and blocks are kept free for them, so that they can share these prompts.
        num_following = 0
        while budget > 0:
            seq = self._next_prompt(limit, num_following)
            if seq is None:
                break
            num_following += self.waiting.num_followers(seq.request)
            chunk = self._next_chunk(seq, budget)
            if chunk.token_ids:
                budget -= len(chunk.token_ids)
                chunks.append(chunk)
            if chunk.is_last:
                prefilled.append(seq)
                seq.num_tokens += 1
                if seq.num_tokens < seq.max_len:
                    self.decoding.append(seq)  # `_find_room` takes it into account at once
            else:
                unfinished.append(seq)
                if seq.num_computed == seq.capacity:  # no block is free
                    break
        self.prefilling[:0] = unfinished
        if prefilled:
            self.policy.order_decodes(self.decoding)
        # The other completions of these prompts start in the next step at the earliest: they copy
        # the last block of the prompt if it is partly full, and this step still writes it.
        for seq in prefilled:
            self.waiting.queue_followers(seq.request)
        return chunks, prefilled

    def _next_prompt(self, limit: int, num_following: int) -> Sequence | None:
        """Take a sequence whose prompt is partly computed. If there is none, start the first
        waiting sequence; a request starts only while fewer than `limit` sequences run.

        Returns None if no sequence can start in this step.
        """
        if self.prefilling:
            return self.prefilling.pop(0)
        if not self.waiting:
            return None
        seq = self.waiting.first
        # The policy decides when a request starts. Its further completions follow.
        if seq.is_first and self.num_running >= limit:
            return None
        plan = self._find_room(seq, num_following + self.waiting.num_followers(seq.request))
        if plan is None:
            return None
        self._start(seq, plan)
        return seq

    def _find_room(self, seq: Sequence, num_following: int) -> StartPlan | None:
        """Find a free slot and free blocks for a waiting sequence, and preempt paused sequences for
        them if need be.

        If others decode, `num_following` more slots and `num_following` + `reserve` more blocks
        must be free.

        Returns None if the sequence cannot start in this step.
        """
        more_slots = num_following if self.decoding else 0
        more_blocks = num_following + self.reserve if self.decoding else 0
        while True:
            plan = self.tables.plan(seq)
            if len(self._free_slots) > more_slots and self.tables.have_room(plan, more_blocks):
                return None if plan.must_wait else plan
            if not self._preempt_paused():
                return None

    def _start(self, seq: Sequence, plan: StartPlan) -> None:
        """Start a waiting sequence with a free slot and the blocks of `plan`."""
        seq.batch_slot = self._free_slots.pop()
        seq.status = Status.RUNNING
        self.tables.start(seq, plan)
        self.waiting.remove(seq)
        # The last reusable token is computed even if it is cached, because the sampler needs its
        # hidden state.
        seq.num_computed = min(plan.num_cached, seq.num_reusable - 1)
        if seq.request.num_cached_tokens is None:
            seq.request.num_cached_tokens = plan.num_cached
        self.policy.started(seq)
        why = partial(self.reason, seq)
        self.listener.sequence_started(seq, seq.num_registered_blocks, plan.num_cached, why)

    def reason(self, seq: Sequence) -> str:
        """Say in a phrase why a sequence starts before the others that wait."""
        if seq.num_preemptions:
            return "preempted sequences start before new ones"
        if not seq.is_first:
            return "further completions start once their prompt is computed"
        # A policy that does not derive from SchedulingPolicy may lack the method.
        say = getattr(self.policy, "reason", None)
        return "" if say is None else str(say(seq))

    def _next_chunk(self, seq: Sequence, budget: int) -> PrefillChunk:
        """Plan the next chunk of a prompt: at most `budget` tokens, and no more than fit in blocks.

        The chunk is empty if no block is free.
        """
        start = seq.num_computed
        end = min(start + budget, seq.num_tokens)
        end = self.tables.extend_for_chunk(seq, end)
        # Blocks that are already registered are shared, or an earlier chunk has written them.
        write_from = seq.num_registered_blocks * self.blocks.block_size
        seq.num_computed = end
        # Other sequences may share the chunk's blocks at once, even the next sequence of this step:
        # each layer writes all K and V before it computes attention.
        self.tables.register(seq, end)
        scores, scored = seq.request.scores, None
        if scores is not None and (scored := scores.take(start, end)):
            self._scoring.append(scores)
        return seq.prefill_chunk(start, end, write_from, scored)

    def commit(
        self,
        tokens: list[int],
        logprobs: dict[int, bytes] | None = None,
        prompt_logprobs: tuple[bytes, ...] = (),
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Take the result of the oldest step in flight. The arguments are StepResult's fields.

        If a sequence ended before this step was committed, its token of this step is dropped.

        Returns the sequences that got a token, and the sequences that have ended. A sequence for
        which no token could be sampled ends with finish_reason "error" and is not in the first
        list.
        """
        sampling = self._steps_in_flight.popleft()
        assert len(sampling) == len(tokens), "a step has a token for each sequence that samples"
        for i, record in (logprobs or {}).items():
            if sampling[i].status is not Status.FINISHED and tokens[i] != INVALID_TOKEN:
                sampling[i].logprobs.append(record)
        for records in prompt_logprobs:
            self._scoring.popleft().records.append(records)
        sampled, ended = [], []
        # These attributes are looked up once, not once per token.
        block_size, finished = self.blocks.block_size, Status.FINISHED
        for seq, token in zip(sampling, tokens):
            if seq.status is finished:
                continue
            if token == INVALID_TOKEN:
                seq.finish_reason = "error"
                ended.append(seq)
                continue
            sampled.append(seq)
            seq.token_ids.append(token)
            length = len(seq.token_ids)
            if (length - 1) % block_size == 0:  # the tokens before this one fill their last block
                self.tables.register(seq, length - 1)
            if token in seq.stop_ids:
                seq.finish_reason = "stop"
                ended.append(seq)
            elif length == seq.max_len:
                seq.finish_reason = "length"
                ended.append(seq)
        if ended:
            for seq in ended:
                self._finish(seq)
            self.decoding = [seq for seq in self.decoding if seq.status is Status.RUNNING]
        return sampled, ended

    def abort(self, seq: Sequence) -> None:
        """End a sequence, whatever its status.

        Before the prompt is computed, abort the first completion only together with all others:
        they would wait for the prompt for ever.
        """
        self._withdraw(seq)
        seq.finish_reason = "abort"
        self._finish(seq)

    def pause(self, seq: Sequence) -> None:
        """Keep a sequence from running until `resume`.

        A sequence that is in flight still gets the token of that step, and may end with it.
        """
        if seq not in self.paused:
            is_prefilling = seq in self.prefilling
            self._withdraw(seq)
            self.paused[seq] = is_prefilling
            self.listener.sequence_paused(seq)

    def resume(self, seq: Sequence) -> None:
        """Let a paused sequence continue. A sequence that was preempted meanwhile is recomputed."""
        is_prefilling = self.paused.pop(seq)
        self.listener.sequence_resumed(seq)
        if seq.status is Status.WAITING:
            self.waiting.add(seq)
        elif is_prefilling:
            self.prefilling.append(seq)
        elif seq.num_tokens < seq.max_len:  # otherwise its last token is in flight
            self.decoding.append(seq)
            self.policy.order_decodes(self.decoding)

    def _withdraw(self, seq: Sequence) -> None:
        """Remove a sequence from the list that holds it.

        A sequence whose last token is in flight is in no list.
        """
        if seq in self.paused:
            del self.paused[seq]
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        elif seq in self.prefilling:
            self.prefilling.remove(seq)
        elif seq in self.decoding:
            self.decoding.remove(seq)

    def _finish(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._release(seq)
        if seq.params.max_tokens == 0:  # `token_ids` lacks the prompt's last token: see num_inputs
            seq.token_ids = seq.request.prompt.copy()
        seq.status = Status.FINISHED
        self.paused.pop(seq, None)
        del self.sequences[seq.id]

    def _preempt(self, seq: Sequence) -> None:
        """Take the batch slot and the blocks of a sequence, which is recomputed later."""
        self.listener.sequence_preempted(seq)
        self.num_preemptions += 1
        seq.num_preemptions += 1
        self._release(seq)
        seq.reset()
        seq.status = Status.WAITING

    def _release(self, seq: Sequence) -> None:
        if seq.finish_reason == "error":
            self.tables.discard(seq)
        else:
            self.tables.release(seq)
        self._free_slots.append(seq.batch_slot)
        self.listener.sequence_released(seq)


class WaitingQueue:
    """The waiting sequences in the order in which they start.

    Preempted sequences and further completions of computed prompts come first. Completions of a
    prompt that is not computed yet are not in the order: they are in `followers` until then.
    """

    def __init__(self, tables: BlockTables) -> None:
        """Build an empty queue. `tables` hears which sequences wait."""
        self.tables = tables
        self._sequences: list[Sequence] = []
        self.followers: set[Sequence] = set()
        self.num_tokens_left = 0  # tokens that all waiting sequences may still generate

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    def add(self, seq: Sequence) -> None:
        self.num_tokens_left += seq.num_tokens_left
        self.tables.sequence_queued(seq)
        if seq.waits_for_prompt:
            self.followers.add(seq)
        else:
            self._insert(seq)

    def num_followers(self, request: Request) -> int:
        """Count the completions that wait for the request's prompt."""
        return sum([seq in self.followers for seq in request.completions])

    def queue_followers(self, request: Request) -> None:
        """Give the completions that waited for the request's prompt their places in the order."""
        for seq in request.completions:
            if seq in self.followers:
                self.followers.remove(seq)
                self._insert(seq)

    def _insert(self, seq: Sequence) -> None:
        insort(
            self._sequences,
            seq,
            key=lambda seq: (seq.num_preemptions == 0 and seq.is_first, seq.order),
        )

    def remove(self, seq: Sequence) -> None:
        self.num_tokens_left -= seq.num_tokens_left
        self.tables.sequence_unqueued(seq)
        if seq in self.followers:
            self.followers.remove(seq)
        else:
            self._sequences.remove(seq)

    def __len__(self) -> int:
        """Count the sequences that are in the order."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)
