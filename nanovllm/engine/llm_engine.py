"""The engine: the loop that schedules, launches and commits steps.

With overlap, step N + 1 is launched before the tokens of step N are read, so the device never waits
for Python.
"""

import random
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.block_tables import BlockTables
from nanovllm.engine.errors import explain, warn
from nanovllm.engine.interfaces import Constraints, Detokenizer, Runner, TokensInFlight
from nanovllm.engine.listener import EngineListener, Listeners
from nanovllm.engine.metrics import EngineMetrics
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.snapshots import Snapshots, StateRows
from nanovllm.engine.stateful_blocks import StatefulBlockManager, StatefulBlockTables
from nanovllm.models import find_model
from nanovllm.models.model_config import ModelConfig
from nanovllm.outputs import StepRecord
from nanovllm.sampling_params import SamplingParams


class Launched(NamedTuple):
    """A step that has been launched but not committed."""

    tokens: TokensInFlight
    has_prefills: bool  # some of the tokens may be the first of their sequences


class LLMEngine:
    """A model, a scheduler, and the unfinished requests: `add` queues one, `step` runs a step.

    The caller has checked the requests. Only one caller at a time may use the engine.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        runner: Runner,
        policy: SchedulingPolicy = SchedulingPolicy(),
        *,
        stop_ids: frozenset[int] = frozenset(),
        constraints: Constraints | None = None,
        make_detokenizer: Callable[[], Detokenizer] | None = None,
        enough_seqs: int | None = None,
        listeners: tuple[EngineListener, ...] = (),
    ) -> None:
        """Build an engine for the model whose configuration is `model_config`.

        Args:
            runner: Holds the model, and runs steps.
            stop_ids: Tokens that end a request when they are sampled.
            constraints: Says which tokens may follow, for requests that restrict their tokens.
            make_detokenizer: Makes the detokenizer, which reads the text of requests as it grows.
            enough_seqs: Beyond this many running sequences the device gains little. None: there is
                no such number.
            listeners: Listeners that hear of events, besides the metrics.
        """
        self.model_class = find_model(model_config)
        self.policy = policy
        self.stop_ids = stop_ids
        self.constraints = constraints
        self.make_detokenizer = make_detokenizer
        self.detokenizer: Detokenizer | None = None  # made for the first request that needs it
        self.vocab_size = model_config.vocab_size
        self.runner = runner
        self.max_model_len = self.runner.info.max_model_len
        self.window = model_config.largest_window
        is_cpu = self.runner.info.device == "cpu"
        self.overlap = not is_cpu if config.overlap is None else config.overlap
        self._enough_seqs = enough_seqs
        self.is_asleep = False  # asleep: the runner's memory is given back, and no step may run
        self._config = config
        self.metrics = EngineMetrics()
        self.listeners = (self.metrics, *listeners)
        self._listener = Listeners(*self.listeners)
        self.snapshots: Snapshots | None = None  # of a model with recurrent layers
        self.scheduler = self._make_scheduler()
        self.num_prefill_tokens = 0  # prompt tokens computed so far
        self.num_steps = 0
        self.last_step: StepRecord | None = None  # the figures at the launch of the last step
        self._in_flight: Launched | None = None
        self._constrained: list[Sequence] = []  # sequences with a constraint; some have finished
        self._next_id = 0  # of the next sequence
        self._seeds = random.Random(config.seed)

    def _make_scheduler(self) -> Scheduler:
        config, info = self._config, self.runner.info
        max_num_seqs = config.num_batch_slots
        sizes = info.num_blocks, config.kvcache_block_size, config.enable_prefix_caching
        blocks: BlockManager
        make_tables: type[BlockTables]
        if info.num_state_slots:  # some layers are recurrent
            max_num_seqs = min(max_num_seqs, info.num_state_slots)
            self.snapshots = Snapshots(StateRows(info.num_state_slots, info.num_snapshots))
            blocks = StatefulBlockManager(*sizes, self._listener, snapshots=self.snapshots)
            make_tables = StatefulBlockTables
        else:
            blocks, make_tables = BlockManager(*sizes, self._listener), BlockTables
        return Scheduler(
            blocks,
            self.policy,
            make_tables=make_tables,
            listener=self._listener,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens or config.max_num_batched_tokens,
            window=self.window,
            enough_seqs=self._enough_seqs,
        )

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        prompt_text: str | None = None,
        *,
        streams: bool = False,
        interactive: bool = False,
        score_from: int = 1,
    ) -> Request:
        """Queue a request that has been checked.

        `streams`: the text is read as it grows. `interactive`: a user waits for this request, not
        only for the whole batch it came in, so a policy should not delay it for the others.
        `score_from`: the first token of the prompt that `prompt_logprobs` reports.
        """
        assert params.max_tokens is not None, "the facade replaces None by a number"
        scores = None
        if params.prompt_logprobs is not None:
            scores = PromptScores(prompt, params.prompt_logprobs, score_from)
        stop_ids = frozenset() if params.ignore_eos else self.stop_ids
        request = Request(
            self._next_id,
            prompt,
            params,
            max_len=min(len(prompt) + params.max_tokens, self.max_model_len),
            seeds=[self._seed(params, i) for i in range(params.n)],
            stop_ids=stop_ids.union(params.stop_token_ids or ()),
            prompt_text=prompt_text,
            interactive=interactive,
            scores=scores,
            added_at=perf_counter(),
        )
        self._next_id += params.n
        if params.max_tokens:
            for seq in request.completions:
                self._prepare(seq, streams)
        self._listener.request_added(request)
        self.scheduler.add(request)
        return request

    def _seed(self, params: SamplingParams, completion: int) -> int:
        """Return the seed of a completion, which stands at this index among those of its prompt."""
        if params.seed is None:
            return self._seeds.getrandbits(63)
        return (params.seed + completion) % 2**63

    def _prepare(self, seq: Sequence, streams: bool) -> None:
        """Give a sequence its constraint and have its text read, where it needs these."""
        params = seq.params
        if self.constraints is not None and not params.samples_plainly:
            seq.constraint = self.constraints.make(params)
            if seq.constraint is not None:
                self._constrained.append(seq)
        if self.make_detokenizer is not None and (streams or params.stop):
            if self.detokenizer is None:
                self.detokenizer = self.make_detokenizer()
            self.detokenizer.add(seq)

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def step(self) -> list[Sequence]:
        """Launch the next step and commit one: with overlap the step before, otherwise this one.

        Returns the sequences that have ended. A sequence ends with finish_reason "error" if its
        logits are NaN or infinite, or if its constraints leave no token.
        """
        begin, num_preempted = perf_counter(), self.scheduler.num_preemptions
        self._listener.step_begins()
        batch = self.scheduler.schedule()
        step = self._record_step(batch or Batch(), begin, num_preempted)
        launched = None
        if batch is not None:
            self._listener.step_scheduled(batch)
            launched = Launched(self.runner.launch(batch), bool(batch.prefills))
            self._listener.step_launched(step)
        if not self.overlap:
            if self._constrained:
                launched = self._sample_constrained(launched)
            return self._commit(launched)
        previous, self._in_flight = self._in_flight, launched
        ended = self._commit(previous)  # this may drop the step in flight
        if self._constrained:
            self._in_flight = self._sample_constrained(self._in_flight)
        return ended

    def _sample_constrained(self, launched: Launched | None) -> Launched | None:
        """Sample the rows of the newest step whose sequences have a constraint.

        The tokens before these rows are known by now, while the device may still compute the step.
        Returns the step with the new tokens.
        """
        if launched is None:
            return None
        self._constrained = [seq for seq in self._constrained if seq.status is not Status.FINISHED]
        rows = [
            (i, seq)
            for i, seq in enumerate(self.scheduler.newest_step)
            if seq.constraint is not None and seq.status is not Status.FINISHED
        ]
        if not rows:
            return launched
        assert self.constraints is not None, "it made the constraints of these sequences"
        tokens = self.runner.sample_constrained(self.constraints.edits(rows))
        return launched._replace(tokens=tokens)

    def _commit(self, launched: Launched | None) -> list[Sequence]:
        """Wait for the tokens of a step and commit them. Returns the sequences that have ended."""
        if launched is None:
            return []
        sampled, ended = self._take_tokens(launched)
        if failed := [seq for seq in ended if seq.finish_reason == "error"]:
            self._end_with_error(failed)
        if self._constrained and self.constraints is not None:
            self._stop(self.constraints.completed(sampled), ended)
        if self.detokenizer is not None:
            self._stop(self.detokenizer.update(sampled), ended)
        if launched.has_prefills or ended:
            self._record_times(sampled if launched.has_prefills else [], ended)
        for seq in ended:
            seq.constraint = None  # it is large, and the caller may keep the sequence for long
            self._listener.sequence_finished(seq)
        self._drop_surplus_step()
        return ended

    def _take_tokens(self, launched: Launched) -> tuple[list[Sequence], list[Sequence]]:
        """Hand the tokens of a step to `Scheduler.commit`, and return what it returns."""
        result = launched.tokens.wait()
        self._listener.tokens_arrived()
        sampled, ended = self.scheduler.commit(*result)
        self._listener.tokens_committed(len(sampled))
        return sampled, ended

    def _end_with_error(self, failed: list[Sequence]) -> None:
        """Record why no token could be sampled for these sequences, and end their texts."""
        for seq in failed:
            seq.error = explain(seq)
            if self.detokenizer is not None:
                self.detokenizer.end(seq)
        if not self.metrics.last_call.errors:
            warn(failed[0])

    def _stop(self, stopped: list[Sequence], ended: list[Sequence]) -> None:
        """End the sequences `stopped`, whose output is complete, and add them to `ended`."""
        for seq in stopped:
            if seq.finish_reason is None:  # the scheduler has not ended the sequence
                self.scheduler.abort(seq)
                ended.append(seq)
            seq.finish_reason = "stop"

    def _drop_surplus_step(self) -> None:
        """Drop the tokens of the step in flight if every sequence has ended."""
        if self._in_flight is not None and not self.scheduler.has_unfinished():
            self._take_tokens(self._in_flight)
            self._in_flight = None

    def _record_step(self, batch: Batch, begin: float, num_preempted: int) -> StepRecord:
        """Record the figures of the step `batch`, whose planning began at `begin`.

        `num_preempted`: the number of preemptions before this step.
        """
        scheduler = self.scheduler
        self.last_step = step = StepRecord(
            number=self.num_steps,
            time=begin,
            prefill_tokens=batch.num_prefill_tokens,
            decode_tokens=len(batch.decode_slots),
            running=scheduler.num_running,
            waiting=len(scheduler.waiting),
            blocks_in_use=scheduler.blocks.num_used,
            num_blocks=scheduler.blocks.num_blocks,
            preemptions=scheduler.num_preemptions - num_preempted,
        )
        self.num_steps += 1
        self.num_prefill_tokens += step.prefill_tokens
        self._listener.step_recorded(step)
        return step

    def _record_times(self, sampled: list[Sequence], ended: list[Sequence]) -> None:
        now = perf_counter()
        for seq in sampled:
            if seq.first_token_at is None:
                seq.first_token_at = seq.request.clock(now)
        for seq in ended:
            seq.finished_at = seq.request.clock(now)

    def abort(self, request: Request) -> None:
        """End the unfinished completions of a request."""
        self._listener.step_begins()
        unfinished = request.unfinished
        for seq in unfinished:
            self.scheduler.abort(seq)
        for seq in request.completions:
            seq.constraint = None
            if self.detokenizer is not None:
                self.detokenizer.remove(seq)
        self._drop_surplus_step()
        for seq in unfinished:
            self._listener.sequence_finished(seq)

    def pause(self, request: Request) -> None:
        """Keep the unfinished completions of a request from running until `resume`."""
        for seq in request.unfinished:
            self.scheduler.pause(seq)
        request.pause(perf_counter())

    def resume(self, request: Request) -> None:
        """Let the completions of a request continue, if the request is paused."""
        if request.paused_at is not None:
            for seq in request.unfinished:
                self.scheduler.resume(seq)
            request.resume(perf_counter())

    def reset(self) -> None:
        """Drop every request after an error or interrupt, so that the engine is empty and usable.

        The error may have left the scheduler in any state, so a new scheduler replaces it. Another
        interrupt may come in this method.
        """
        self._listener.engine_reset()
        for seq in self.scheduler.sequences.values():  # before the scheduler is replaced
            seq.status, seq.finish_reason, seq.constraint = Status.FINISHED, "abort", None
        self.scheduler, self._in_flight = self._make_scheduler(), None
        if self.detokenizer is not None:
            self.detokenizer.clear()
        self.runner.synchronize()

    def close(self) -> None:
        """Give back all memory that the runner holds."""
        try:
            self.runner.close()
        finally:
            self._listener.engine_closed()
