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
from nanovllm.engine.batch import Batch, RunnerInfo
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.interfaces import Constraints, Detokenizer
from nanovllm.engine.metrics import Metrics, StepRecord
from nanovllm.engine.model_runner import SampledTokens
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.models import find_model
from nanovllm.models.config_fields import largest_window
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.loader import check_num_layers


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
        make_runner: Callable[..., Any],
        policy: SchedulingPolicy = SchedulingPolicy(),
        count_enough_seqs: Callable[[RunnerInfo], int | None] = lambda info: None,
    ) -> None:
        """Load the model in `folder`, whose configuration is `hf_config`, and get ready to run.

        `make_runner`: a class of runners, such as ModelRunner, or a function like one.
        `count_enough_seqs`: says how many sequences make what runs the model about as fast as it
        gets; None: the more, the faster.
        """
        # Refuse other models first: they may not have what is read below.
        self.model_class = find_model(hf_config)
        if config.load_format == "auto":
            check_num_layers(hf_config.num_hidden_layers, folder, self.model_class)
        self.policy = policy
        self.detokenizer: Detokenizer | None = None  # made once a request needs its text read
        # compose.py sets these three once the model is loaded.
        self.stop_ids: frozenset[int] = frozenset()  # sampling one of them ends a request
        self.make_detokenizer: Callable[[], Detokenizer] | None = None
        self.constraints: Constraints | None = None

        self.vocab_size = hf_config.vocab_size
        self.runner = make_runner(config, hf_config, folder)
        self.max_model_len = self.runner.info.max_model_len
        self.window = largest_window(hf_config)
        is_cpu = self.runner.device.type == "cpu"
        self.overlap = not is_cpu if config.overlap is None else config.overlap
        self._enough_seqs = count_enough_seqs(self.runner.info)
        self.is_asleep = False  # the runner's memory is given back: no step may run
        self._config = config
        self.scheduler = self._make_scheduler()
        self.num_prefill_tokens = 0  # computed so far
        self.total = Metrics()
        self.last_call = Metrics()  # whoever begins a call may begin a new one
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
                self.runner.num_blocks, config.kvcache_block_size, config.enable_prefix_caching
            ),
            self.policy,
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

        Returns the sequences that have ended. Raises InvalidLogitsError if the model computed NaN
        or infinite logits: `reset` is needed then.
        """
        begin, num_preempted = perf_counter(), self.scheduler.num_preemptions
        batch = self.scheduler.schedule()
        self._record_launch(batch or Batch(), begin, num_preempted)
        launched = None
        if batch is not None:
            launched = Launched(self.runner.launch(batch), bool(batch.prefills))
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
        """Wait for a step's tokens; returns the sequences that end with theirs."""
        if launched is None:
            return []
        sampled, ended = self.scheduler.commit(*launched.tokens.wait())
        if self._constrained and self.constraints is not None:
            self._stop(self.constraints.completed(sampled), ended)
        if self.detokenizer is not None:
            self._stop(self.detokenizer.update(sampled), ended)
        if launched.has_prefills or ended:
            self._record_commit(sampled if launched.has_prefills else [], ended)
        self._drop_surplus_step()
        return ended

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
            self.scheduler.commit(*self._in_flight.tokens.wait())
            self._in_flight = None

    def _record_launch(self, batch: Batch, begin: float, num_preempted: int) -> None:
        """`num_preempted`: what the scheduler had preempted before this step."""
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
        for metrics in (self.total, self.last_call):
            metrics.peak_blocks = max(metrics.peak_blocks, step.blocks_in_use)

    def _record_commit(self, sampled: list[Sequence], ended: list[Sequence]) -> None:
        now = perf_counter()
        for seq in sampled:
            if seq.first_token_at is None:
                seq.first_token_at = seq.clock(now)
        for seq in ended:
            self.total.record(seq, seq.clock(now))
            self.last_call.record(seq, seq.clock(now))

    def abort(self, request: Sequence) -> None:
        """End what has not ended of a request's completions."""
        for seq in request.unfinished:
            self.scheduler.abort(seq)
        if self.detokenizer is not None:
            for seq in request.completions:
                self.detokenizer.remove(seq)
        self._drop_surplus_step()

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
        for seq in self.scheduler.sequences.values():  # before the scheduler that knows them goes
            seq.status, seq.finish_reason = Status.FINISHED, "abort"
        self.scheduler, self._in_flight = self._make_scheduler(), None
        if self.detokenizer is not None:
            self.detokenizer.clear()
        self.runner.synchronize()

    def close(self) -> None:
        self.runner.close()
