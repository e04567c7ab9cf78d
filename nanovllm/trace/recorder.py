"""Record what an engine does, as events, without a word of it in the engine.

The classes here do what those of the core do, and note it. A step that only decodes costs the host
a few microseconds, however many sequences run: nothing here looks at each of them. Events stay in
memory until they are written.
"""

import os
import weakref
from collections.abc import Callable
from datetime import datetime
from os import fspath
from pathlib import Path
from time import perf_counter
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, RunnerInfo
from nanovllm.engine.block_manager import BlockManager, Prefix
from nanovllm.engine.block_tables import BlockTables
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.metrics import StepRecord
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.sampling_params import SamplingParams
from nanovllm.trace.events import (
    Added,
    Committed,
    Event,
    Evicted,
    Finished,
    GaveBack,
    Grew,
    Launched,
    Paused,
    Preempted,
    Registered,
    Released,
    Reset,
    Resumed,
    Run,
    Started,
)
from nanovllm.trace.files import check_writable, write
from nanovllm.trace.replay import Replay


class Recorder:
    """Takes notes, and writes them to a file when the engine is closed, when it is collected as
    garbage, or when the interpreter exits: after an error or Ctrl-C too.
    """

    def __init__(self, path: str) -> None:
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise ValueError(f"trace is {path!r}, but there is no folder {folder}: make it first")
        check_writable(path)
        self.path = os.path.abspath(path)
        self.events: list[Event] = []
        self._pid = os.getpid()
        self._begin = perf_counter()
        self._num_written = 0
        self._mark = 0.0  # until when the host's time is accounted for
        self._seq_of_slot: dict[int, int] = {}
        self._decode_slots: tuple[int, ...] = ()
        self._decoding: frozenset[int] = frozenset()
        self._num_launched = self._num_committed = 0
        self._planned: Launched | None = None  # as far as it is known before its launch

    def now(self) -> float:
        return perf_counter() - self._begin

    def start(self, run: Run) -> None:
        """Begin anew, with nothing but `run`. No sequence may be under way."""
        self.events = [run._replace(began_at=datetime.now().isoformat(timespec="seconds"))]
        self._begin, self._num_written = perf_counter(), 0
        self._decode_slots, self._decoding = (), frozenset()

    def restart(self, **facts: Any) -> None:
        """Forget what was recorded; the next event is the first. `facts` replace those of the Run.

        No sequence may be under way.
        """
        run, *events = self.events
        assert isinstance(run, Run)
        replay = Replay(run)
        for event in events:
            replay.apply(event)
        assert not replay.tables, "whoever restarts a recording has waited for all requests"
        cached = sorted(replay.known.items())
        blocks, hashes = (tuple([pair[i] for pair in cached]) for i in (0, 1))
        self.start(run._replace(cached_blocks=blocks, cached_hashes=hashes, **facts))

    def write(self) -> None:
        """Write the file, if there is anything new. A forked process does not."""
        if os.getpid() == self._pid and self._num_written < len(self.events):
            self._num_written = len(self.events)
            write(self.events, self.path)

    def _lap(self) -> float:
        """Seconds since the last call."""
        now = self.now()
        seconds, self._mark = now - self._mark, now
        return seconds

    # What happens, in the order of a step.

    def add(self, event: Event) -> None:
        self.events.append(event)

    def registered(self, block: int, prefix_hash: int) -> None:
        if not isinstance(self.events[-1], Registered):
            self.add(Registered([], []))
        event = self.events[-1]
        assert isinstance(event, Registered)
        event.blocks.append(block)
        event.hashes.append(f"{prefix_hash:016x}")

    def evicted(self, block: int) -> None:
        last = self.events[-1]
        if isinstance(last, Evicted):
            last.blocks.append(block)
        else:
            self.add(Evicted([block]))

    def begin_step(self) -> None:
        self._mark = self.now()

    def started(self, seq: Sequence, shared_blocks: int, cached_tokens: int) -> None:
        self._seq_of_slot[seq.batch_slot] = seq.id
        table = tuple(seq.block_table)
        given_back = seq.num_given_back
        self.add(Started(seq.id, seq.batch_slot, table, shared_blocks, cached_tokens, given_back))

    def scheduled(self, batch: Batch) -> None:
        begin, schedule_seconds = self._mark, self._lap()
        seq_of_slot = self._seq_of_slot
        joined: frozenset[int] = frozenset()
        left: frozenset[int] = frozenset()
        # A slot that gets another sequence misses the step in which that one's prompt ends.
        if batch.decode_slots != self._decode_slots:
            self._decode_slots, before = batch.decode_slots, self._decoding
            self._decoding = frozenset([seq_of_slot[slot] for slot in batch.decode_slots])
            joined, left = self._decoding - before, before - self._decoding
        self._planned = Launched(
            step=self._num_launched,
            time=begin,
            decode_tokens=len(batch.decode_slots),
            prefills=tuple([(seq_of_slot[c.batch_slot], c.start, c.end) for c in batch.prefills]),
            forked=tuple(
                [(seq_of_slot[f.batch_slot], f.end) for c in batch.prefills for f in c.forks]
            ),
            grown=tuple([(seq_of_slot[slot], block) for slot, _, block in batch.new_blocks]),
            joined=tuple(joined),
            left=tuple(left),
            running=0,
            waiting=0,
            blocks_in_use=0,
            schedule_seconds=schedule_seconds,
            launch_seconds=0.0,
        )

    def launched(self, step: StepRecord) -> None:
        assert self._planned is not None
        event = self._planned._replace(
            running=step.running,
            waiting=step.waiting,
            blocks_in_use=step.blocks_in_use,
            launch_seconds=self._lap(),
        )
        self.add(event)
        self._num_launched += 1

    def commits(self, commit: Callable[..., Any], *sampled: Any) -> Any:
        """Run `commit`, which takes what a step sampled."""
        wait_seconds = self._lap()
        time = self._mark
        answer = commit(*sampled)
        step, num_tokens = self._num_committed, len(answer[0])
        self.add(Committed(step, time, num_tokens, wait_seconds, self._lap()))
        self._num_committed += 1
        return answer

    def finished(self, seq: Sequence) -> None:
        num_output = len(seq.token_ids) - seq.num_prompt_tokens
        self.add(Finished(self.now(), seq.id, seq.finish_reason or "", num_output))

    def reset(self) -> None:
        self.add(Reset(self.now()))
        self._seq_of_slot.clear()
        self._decode_slots, self._decoding = (), frozenset()
        self._num_committed = self._num_launched  # what was in flight is dropped


class RecordedBlocks(BlockManager):
    recorder: Recorder

    def register(self, block: int, before: Prefix, token_ids: list[int]) -> Prefix:
        old_key = self._keys[block]
        prefix = super().register(block, before, token_ids)
        if self._keys[block] is not None and self._keys[block] is not old_key:
            self.recorder.registered(block, prefix.hash)
        return prefix

    def forget(self, block: int) -> None:
        if self._keys[block] is not None:
            self.recorder.evicted(block)
        super().forget(block)


class RecordedTables(BlockTables):
    recorder: Recorder

    def give_back(self, seq: Sequence) -> None:
        before = seq.num_given_back
        super().give_back(seq)
        if seq.num_given_back > before:
            self.recorder.add(GaveBack(seq.id, seq.num_given_back))

    def make_room(self, seq: Sequence, length: int) -> int:  # of those that decode, the step tells
        before = len(seq.block_table)
        room = super().make_room(seq, length)
        if grown := tuple(seq.block_table[before:]):
            self.recorder.add(Grew(seq.id, grown))
        return room


class RecordedScheduler(Scheduler):
    recorder: Recorder

    def schedule(self) -> Batch | None:
        batch = super().schedule()
        if batch is not None:
            self.recorder.scheduled(batch)
        return batch

    def commit(self, *sampled: Any) -> tuple[list[Sequence], list[Sequence]]:
        return self.recorder.commits(super().commit, *sampled)

    def _start_next(self) -> None:
        first = self.waiting.first
        super()._start_next()
        if first.status is Status.RUNNING:
            size = self.blocks.block_size
            num_shared, num_cached = first.num_registered_blocks, first.num_cached_tokens
            if first.num_preemptions:  # it has been counted
                # Of a prompt that is cached to its end, the last token is computed again.
                num_cached = max(num_shared * size, first.num_computed)
            self.recorder.started(first, num_shared, num_cached or 0)
            for fork in first.forks:
                self.recorder.started(fork, first.num_tokens // size, 0)

    def _preempt(self, seq: Sequence) -> None:
        self.recorder.add(Preempted(seq.id))
        super()._preempt(seq)

    def pause(self, seq: Sequence) -> None:
        was_paused = seq in self.paused
        super().pause(seq)
        if not was_paused:
            self.recorder.add(Paused(self.recorder.now(), seq.id))

    def resume(self, seq: Sequence) -> None:
        super().resume(seq)
        self.recorder.add(Resumed(self.recorder.now(), seq.id))

    def _release(self, seq: Sequence) -> None:
        super()._release(seq)
        self.recorder.add(Released(seq.id))


class RecordedEngine(LLMEngine):
    """An engine that keeps a trace; `config.trace` is the path of its file."""

    def __init__(self, config: Config, hf_config, folder: str | Path, *options: Any) -> None:
        assert config.trace is not None
        self.recorder = Recorder(fspath(config.trace))
        super().__init__(config, hf_config, folder, *options)
        self._launch, self.runner.launch = self.runner.launch, self._recorded_launch
        self.recorder.start(describe(self, config, hf_config, folder))
        # Not a method of this object's: that would keep it alive.
        self._write = weakref.finalize(self, self.recorder.write)

    def _make_scheduler(self) -> Scheduler:
        scheduler = super()._make_scheduler()
        scheduler.__class__ = RecordedScheduler
        scheduler.tables.__class__ = RecordedTables
        scheduler.blocks.__class__ = RecordedBlocks
        for part in (scheduler, scheduler.tables, scheduler.blocks):
            vars(part)["recorder"] = self.recorder
        return scheduler

    def _recorded_launch(self, batch: Batch) -> Any:
        answer = self._launch(batch)
        assert self.last_step is not None
        self.recorder.launched(self.last_step)
        return answer

    def add(
        self, prompt: list[int], params: SamplingParams, text: str | None = None, **how: Any
    ) -> Sequence:
        request = super().add(prompt, params, text, **how)
        for seq in request.completions:
            max_tokens = seq.max_len - seq.num_prompt_tokens if params.max_tokens else 0
            added = Added(
                self.recorder.now(), seq.id, request.id, seq.num_prompt_tokens, max_tokens
            )
            self.recorder.add(added)
        return request

    def step(self) -> list[Sequence]:
        self.recorder.begin_step()
        ended = super().step()
        for seq in ended:
            self.recorder.finished(seq)
        return ended

    def abort(self, request: Sequence) -> None:
        self.recorder.begin_step()
        aborted = [seq for seq in request.completions if seq.status is not Status.FINISHED]
        super().abort(request)
        for seq in aborted:
            self.recorder.finished(seq)

    def reset(self) -> None:
        self.recorder.reset()
        super().reset()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._write()


def describe(engine: LLMEngine, config: Config, hf_config, folder: str | Path) -> Run:
    info, blocks = engine.runner.info, engine.scheduler.blocks
    return Run(
        model=Path(folder).absolute().name if Path(config.model).is_dir() else config.model,
        device=info.device,
        dtype=info.dtype,
        attention=info.attention,
        overlap=engine.overlap,
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        max_num_seqs=engine.scheduler.max_num_seqs,
        max_num_batched_tokens=engine.scheduler.max_num_batched_tokens,
        kv_bytes_per_token=info.kv_cache_bytes / (blocks.num_blocks * blocks.block_size),
        weight_bytes=bytes_of_weights(info, hf_config),
    )


def bytes_of_weights(info: RunnerInfo, hf_config) -> int | None:
    """That each decode step reads, on all ranks together. None: which experts it reads depends on
    the tokens.
    """
    if getattr(hf_config, "num_experts", None):
        return None
    # Of an embedding that is not the head as well, a step reads a few rows.
    embedding = 0 if hf_config.tie_word_embeddings else hf_config.vocab_size * hf_config.hidden_size
    return (info.num_parameters - embedding) * (4 if info.dtype == "float32" else 2)
