"""Requests in, outputs out: the loop that schedules, launches and commits.

With overlap, step N + 1 is launched before step N's tokens are read, so the device never waits for
Python.
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.errors import explain, warn
from nanovllm.engine.interfaces import Constraints, Detokenizer
from nanovllm.engine.listener import EngineListener, Listeners
from nanovllm.engine.metrics import EngineMetrics
from nanovllm.engine.model_runner import SampledTokens
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.models import find_model
from nanovllm.models.config_fields import largest_window
from nanovllm.outputs import StepRecord
from nanovllm.sampling_params import SamplingParams


class Launched(NamedTuple):
    """A step that has been launched and not committed."""

    tokens: SampledTokens
    has_prefills: bool  # so some of the tokens may be their sequences' first


class LLMEngine:
    """A model, a scheduler, and the requests under way: `add` queues one, `step` advances all.

    Requests have been checked. One caller at a time may use it.
    """

    def __init__(
        self,
        config: Config,
        hf_config,
        folder: str | Path,
        runner: Any,
        policy: SchedulingPolicy = SchedulingPolicy(),
        *,
        stop_ids: frozenset[int] = frozenset(),
        constraints: Constraints | None = None,
        make_detokenizer: Callable[[], Detokenizer] | None = None,
        enough_seqs: int | None = None,
        listeners: tuple[EngineListener, ...] = (),
    ) -> None:
        """Get ready to run the model in `folder`, whose configuration is `hf_config`.

        Args:
            runner: what holds the model; a ModelRunner, or what has its interface.
            stop_ids: tokens that end a request when they are sampled.
            constraints: what says which tokens may follow, for requests that restrict them.
            make_detokenizer: makes what reads the text of requests as it grows.
            listeners: who hears what happens, beside the metrics.
            enough_seqs: sequences that make the device about as fast as it gets; None: the more,
                the faster.
        """
        self.model_class = find_model(hf_config)
        self.policy = policy
        self.stop_ids = stop_ids
        self.constraints = constraints
        self.make_detokenizer = make_detokenizer
        self.detokenizer: Detokenizer | None = None  # made once a request needs its text read
        self.vocab_size = hf_config.vocab_size
        self.runner = runner
        self.max_model_len = self.runner.info.max_model_len
        self.window = largest_window(hf_config)
        is_cpu = self.runner.device.type == "cpu"
        self.overlap = not is_cpu if config.overlap is None else config.overlap
        self._enough_seqs = enough_seqs
        self.is_asleep = False  # the runner's memory is given back: no step may run
        self._config = config
        self.metrics = EngineMetrics()
        self.listeners = (self.metrics, *listeners)
        self._listener = Listeners(*self.listeners)
        self.scheduler = self._make_scheduler()
        self.num_prefill_tokens = 0  # computed so far
        self.num_steps = 0
        self.last_step: StepRecord | None = None  # as it was launched
        self._in_flight: Launched | None = None
        self._constrained: list[Sequence] = []  # those with a constraint, some of them finished
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)

    def _make_scheduler(self) -> Scheduler:
        config = self._config
        return Scheduler(
            BlockManager(
                self.runner.num_blocks,
                config.kvcache_block_size,
                config.enable_prefix_caching,
                self._listener,
            ),
            self.policy,
            listener=self._listener,
            max_num_seqs=config.num_batch_slots,
            max_num_batched_tokens=config.max_num_batched_tokens,
            window=self.window,
            enough_seqs=self._enough_seqs,
        )

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        text: str | None = None,
        *,
        streams: bool = False,
        interactive: bool = False,
        score_from: int = 1,
    ) -> Sequence:
        """Queue a request that has been checked; returns its first completion, which keeps `text`.

        `streams`: its text is read as it grows. `interactive`: somebody waits for this request, not
        only for the whole batch it came in, so a policy should not hold it back for the others.
        `score_from`: the first token of the prompt that `prompt_logprobs` is asked for.
        """
        seq, *siblings = [
            self._make_sequence(prompt, params, i, interactive) for i in range(params.n)
        ]
        seq.prompt_text = text
        seq.siblings = seq.forks = tuple(siblings)
        for sibling in siblings:
            sibling.parent = seq
        if params.prompt_logprobs is not None:
            seq.scores = PromptScores(prompt, params.prompt_logprobs, score_from)
        if params.max_tokens:
            for one in seq.completions:
                self._follow(one, streams)
        self._listener.request_added(seq)
        self.scheduler.add(seq)
        return seq

    def _make_sequence(
        self, prompt: list[int], params: SamplingParams, completion: int, interactive: bool
    ) -> Sequence:
        if params.seed is None:
            seed = self._seeds.getrandbits(63)
        else:
            seed = (params.seed + completion) % 2**63
        assert params.max_tokens is not None, "the facade puts a number for as many as fit"
        stop_ids = frozenset() if params.ignore_eos else self.stop_ids
        seq = Sequence(
            next(self._ids),
            prompt,
            params,
            max_len=min(len(prompt) + params.max_tokens, self.max_model_len),
            seed=seed,
            stop_ids=stop_ids.union(params.stop_token_ids or ()),
            interactive=interactive,
        )
        seq.added_at = perf_counter()
        return seq

    def _follow(self, seq: Sequence, streams: bool) -> None:
        """Give a sequence the constraint and the detokenizer that it needs as it grows, if any."""
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
        """Launch the next step and commit one: the last with overlap, else this one.

        Returns the sequences that have ended: one of which the logits are NaN or infinite, or the
        constraints leave no token, with finish_reason "error".
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
                launched = self._constrain(launched)
            return self._commit(launched)
        previous, self._in_flight = self._in_flight, launched
        ended = self._commit(previous)  # may drop what is in flight
        if self._constrained:
            self._in_flight = self._constrain(self._in_flight)
        return ended

    def _constrain(self, launched: Launched | None) -> Launched | None:
        """Sample the rows of the newest step that have a constraint: all tokens before theirs are
        known by now. The device may still compute the step. Returns it with these tokens.
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
        assert self.constraints is not None, "it made what the sequences have"
        tokens = self.runner.constrain(self.constraints.edits(rows))
        return launched._replace(tokens=tokens)

    def _commit(self, launched: Launched | None) -> list[Sequence]:
        """Wait for a step's tokens; returns the sequences that end with this step."""
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
            self._listener.sequence_finished(seq)
        self._drop_surplus_step()
        return ended

    def _take_tokens(self, launched: Launched) -> tuple[list[Sequence], list[Sequence]]:
        """Wait for a step's tokens and commit them; returns what `Scheduler.commit` does."""
        result = launched.tokens.wait()
        self._listener.tokens_arrived()
        sampled, ended = self.scheduler.commit(*result)
        self._listener.tokens_committed(len(sampled))
        return sampled, ended

    def _end_with_error(self, failed: list[Sequence]) -> None:
        """Say of sequences why none of their tokens could be sampled, and end their texts."""
        for seq in failed:
            seq.error = explain(seq)
            if self.detokenizer is not None:
                self.detokenizer.end(seq)
        if not self.metrics.last_call.errors:
            warn(failed[0])

    def _stop(self, stopped: list[Sequence], ended: list[Sequence]) -> None:
        """Sequences that are complete, or come to a stop string, join those that `ended`."""
        for seq in stopped:
            if seq.finish_reason is None:  # the scheduler did not end it
                self.scheduler.abort(seq)
                ended.append(seq)
            seq.finish_reason = "stop"

    def _drop_surplus_step(self) -> None:
        """When every sequence has ended, nobody wants the tokens of the step in flight."""
        if self._in_flight is not None and not self.scheduler.has_unfinished():
            self._take_tokens(self._in_flight)
            self._in_flight = None

    def _record_step(self, batch: Batch, begin: float, num_preempted: int) -> StepRecord:
        """Note the figures of the step `batch`, which began to be planned at `begin`.

        `num_preempted`: sequences that the scheduler had preempted before it.
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
                seq.first_token_at = seq.clock(now)
        for seq in ended:
            seq.finished_at = seq.clock(now)

    def abort(self, request: Sequence) -> None:
        """End what has not ended of a request's completions."""
        self._listener.step_begins()
        unfinished = [seq for seq in request.completions if seq.status is not Status.FINISHED]
        for seq in request.unfinished:
            self.scheduler.abort(seq)
        if self.detokenizer is not None:
            for seq in request.completions:
                self.detokenizer.remove(seq)
        self._drop_surplus_step()
        for seq in unfinished:
            self._listener.sequence_finished(seq)

    def pause(self, request: Sequence) -> None:
        """Let what has not ended of a request run no more, until `resume`."""
        for seq in request.unfinished:
            self.scheduler.pause(seq)
            if seq.paused_at is None:
                seq.paused_at = perf_counter()

    def resume(self, request: Sequence) -> None:
        """Let what is paused of a request go on. Its times leave the pause out."""
        for seq in request.unfinished:
            if seq.paused_at is None:
                continue
            self.scheduler.resume(seq)
            seq.shift_times(perf_counter() - seq.paused_at)
            seq.paused_at = None

    def reset(self) -> None:
        """Drop every request, as after an error or interrupt: the next call finds an empty engine.

        It may have come between any two lines of the scheduler's, so a new scheduler takes its
        place. Another interrupt may come in here.
        """
        self._listener.engine_reset()
        for seq in self.scheduler.sequences.values():  # before the scheduler that knows them goes
            seq.status, seq.finish_reason = Status.FINISHED, "abort"
        self.scheduler, self._in_flight = self._make_scheduler(), None
        if self.detokenizer is not None:
            self.detokenizer.clear()
        self.runner.synchronize()

    def close(self) -> None:
        try:
            self.runner.close()
        finally:
            self._listener.engine_closed()
