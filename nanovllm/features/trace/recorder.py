"""The listener that records what an engine does as the events of a trace.

In a step that only decodes, the listener takes the host a few microseconds, however many sequences
run, because it does not look at each of them. Events stay in memory until they are written.
"""

import os
import weakref
from array import array
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, RunnerInfo
from nanovllm.engine.listener import EngineListener
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.features.trace.events import (
    Added,
    Committed,
    Event,
    Evicted,
    Finished,
    GaveBack,
    Grew,
    Kept,
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
from nanovllm.features.trace.files import check_writable, write
from nanovllm.features.trace.replay import Replay
from nanovllm.models.model_config import ModelConfig
from nanovllm.outputs import StepRecord

TEXT_TOKENS = 512  # the trace has the text of so many leading tokens of a prompt or output
# Decodes lists of tokens to texts, with special tokens in the lists that the second argument names.
Decode = Callable[[list[list[int]], range], list[str]]


class Recorder(EngineListener):
    """A listener that records events and writes them to a file.

    It writes when the engine is closed, when the engine is collected as garbage, or when the
    interpreter exits, even after an error or Ctrl-C.
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
        self._mark = 0.0  # the time up to which the host's time is accounted for
        self._seq_of_slot: dict[int, int] = {}
        self._decode_slots: tuple[int, ...] = ()
        self._decoding: frozenset[int] = frozenset()
        self._num_launched = self._num_committed = 0
        self._wait_seconds = 0.0  # how long the host waited for the tokens that arrived last
        self._planned: Launched | None = None  # the scheduled step, with what is known of it so far
        self._decode: Decode | None = None  # None: the trace has no text
        # Place in `events` -> tokens whose text the event gets. They are decoded when the trace is
        # written, so that decoding does not slow down the run.
        self._tokens: dict[int, array[int]] = {}

    def now(self) -> float:
        """Return the seconds since the trace began."""
        return perf_counter() - self._begin

    def follow(
        self,
        engine: LLMEngine,
        config: Config,
        model_config: ModelConfig,
        folder: str | Path,
        decode: Decode | None = None,
    ) -> None:
        """Begin the trace of an engine that has just been built.

        Without `decode`, the trace has no text of prompts and outputs.
        """
        self._decode = decode
        self._start(describe(engine, config, model_config, folder))
        # The finalizer holds `self`, which holds no reference to the engine. So the engine can be
        # collected.
        weakref.finalize(engine, self.write)

    def _start(self, run: Run) -> None:
        """Begin a new trace with the event `run`. No sequence may be under way."""
        self.events = [run._replace(began_at=datetime.now().isoformat(timespec="seconds"))]
        self._begin, self._num_written = perf_counter(), 0
        self._tokens.clear()
        self._decode_slots, self._decoding = (), frozenset()

    def restart(self, **facts: Any) -> None:
        """Drop the recorded events and begin a new trace. `facts` replace fields of its Run.

        No sequence may be under way. The new Run lists the blocks that the prefix cache knows now.
        """
        run, *events = self.events
        assert isinstance(run, Run)
        replay = Replay(run)
        for event in events:
            replay.apply(event)
        assert not replay.tables, "whoever restarts a recording has waited for all requests"
        blocks = tuple(sorted(replay.known))
        hashes = tuple([replay.known[block] for block in blocks])
        self._start(run._replace(cached_blocks=blocks, cached_hashes=hashes, **facts))

    def write(self) -> None:
        """Write the file if there are new events. A forked process does not write."""
        if os.getpid() == self._pid and self._num_written < len(self.events):
            self._num_written = len(self.events)
            self._read_texts()
            write(self.events, self.path)

    def _lap(self) -> float:
        """Return the seconds since the last call."""
        now = self.now()
        seconds, self._mark = now - self._mark, now
        return seconds

    def _add(self, event: Event) -> None:
        self.events.append(event)

    def _keep_tokens(self, token_ids: list[int]) -> None:
        """Keep the tokens whose text the next event gets."""
        if self._decode is not None:
            # One token more than the text will have shows that the text is cut.
            self._tokens[len(self.events)] = array("q", token_ids[: TEXT_TOKENS + 1])

    def _read_texts(self) -> None:
        """Decode the tokens that were kept, and put the texts into their events."""
        if self._decode is None or not self._tokens:
            return
        token_ids = [kept[:TEXT_TOKENS].tolist() for kept in self._tokens.values()]
        texts = self._decode(token_ids, range(len(token_ids)))
        for (i, kept), text in zip(self._tokens.items(), texts):
            event = self.events[i]
            assert isinstance(event, (Added, Finished))
            cut = " …" if len(kept) > TEXT_TOKENS else ""
            self.events[i] = event._replace(text=text + cut)
        self._tokens.clear()

    # The engine calls these methods; see EngineListener.

    def request_added(self, request: Request) -> None:
        max_tokens = 0
        self._keep_tokens(request.prompt)
        for seq in request.completions:
            if request.params.max_tokens:
                max_tokens = seq.max_len - seq.num_prompt_tokens
            self._add(
                Added(
                    self.now(),
                    seq.id,
                    request.id,
                    prompt_tokens=seq.num_prompt_tokens,
                    max_tokens=max_tokens,
                )
            )

    def block_registered(self, block: int, prefix_hash: int) -> None:
        if not isinstance(self.events[-1], Registered):
            self._add(Registered([], []))
        event = self.events[-1]
        assert isinstance(event, Registered)
        event.blocks.append(block)
        event.hashes.append(f"{prefix_hash:016x}")

    def block_evicted(self, block: int) -> None:
        last = self.events[-1]
        if isinstance(last, Evicted):
            last.blocks.append(block)
        else:
            self._add(Evicted([block]))

    def blocks_grown(self, seq: Sequence, blocks: list[int]) -> None:
        self._add(Grew(seq.id, tuple(blocks)))

    def blocks_given_back(self, seq: Sequence) -> None:
        self._add(GaveBack(seq.id, seq.num_given_back))

    def snapshot_saved(self, seq: Sequence, num_tokens: int) -> None:
        self._add(Kept(seq.id, num_tokens))

    def sequence_started(
        self, seq: Sequence, num_shared_blocks: int, num_cached: int, why: Callable[[], str]
    ) -> None:
        self._seq_of_slot[seq.batch_slot] = seq.id
        event = Started(
            seq=seq.id,
            slot=seq.batch_slot,
            blocks=tuple(seq.block_table),
            shared_blocks=num_shared_blocks,
            cached_tokens=num_cached,
            given_back=seq.num_given_back,
            reason=why(),
        )
        self._add(event)

    def sequence_preempted(self, seq: Sequence) -> None:
        self._add(Preempted(seq.id))

    def sequence_released(self, seq: Sequence) -> None:
        self._add(Released(seq.id))

    def sequence_paused(self, seq: Sequence) -> None:
        self._add(Paused(self.now(), seq.id))

    def sequence_resumed(self, seq: Sequence) -> None:
        self._add(Resumed(self.now(), seq.id))

    def step_begins(self) -> None:
        self._mark = self.now()

    def step_scheduled(self, batch: Batch) -> None:
        begin, schedule_seconds = self._mark, self._lap()
        seq_of_slot = self._seq_of_slot
        joined: frozenset[int] = frozenset()
        left: frozenset[int] = frozenset()
        # Comparing slots is enough to see that sequences changed: a slot that another sequence gets
        # does not decode in the step that computes the end of that sequence's prompt.
        if batch.decode_slots != self._decode_slots:
            self._decode_slots, before = batch.decode_slots, self._decoding
            self._decoding = frozenset([seq_of_slot[slot] for slot in batch.decode_slots])
            joined, left = self._decoding - before, before - self._decoding
        self._planned = Launched(
            step=self._num_launched,
            time=begin,
            decode_tokens=len(batch.decode_slots),
            prefills=tuple([(seq_of_slot[c.batch_slot], c.start, c.end) for c in batch.prefills]),
            grown=tuple([(seq_of_slot[slot], block) for slot, _, block in batch.new_blocks]),
            joined=tuple(joined),
            left=tuple(left),
            running=0,
            waiting=0,
            blocks_in_use=0,
            schedule_seconds=schedule_seconds,
            launch_seconds=0.0,
        )

    def step_launched(self, step: StepRecord) -> None:
        assert self._planned is not None
        event = self._planned._replace(
            running=step.running,
            waiting=step.waiting,
            blocks_in_use=step.blocks_in_use,
            launch_seconds=self._lap(),
        )
        self._add(event)
        self._num_launched += 1

    def tokens_arrived(self) -> None:
        self._wait_seconds = self._lap()

    def tokens_committed(self, num_tokens: int) -> None:
        arrived = self._mark  # before `_lap` moves it
        self._add(
            Committed(
                self._num_committed,
                time=arrived,
                tokens=num_tokens,
                wait_seconds=self._wait_seconds,
                commit_seconds=self._lap(),
            )
        )
        self._num_committed += 1

    def sequence_finished(self, seq: Sequence) -> None:
        num_output = len(seq.token_ids) - seq.num_prompt_tokens
        self._keep_tokens(seq.output_ids)
        self._add(Finished(self.now(), seq.id, seq.finish_reason or "", num_output))

    def engine_reset(self) -> None:
        self._add(Reset(self.now()))
        self._seq_of_slot.clear()
        self._decode_slots, self._decoding = (), frozenset()
        self._num_committed = self._num_launched  # what was in flight is dropped

    def engine_closed(self) -> None:
        self.write()


def describe(
    engine: LLMEngine, config: Config, model_config: ModelConfig, folder: str | Path
) -> Run:
    """Describe an engine as the first event of its trace."""
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
        weight_bytes=bytes_of_weights(info, model_config),
    )


def bytes_of_weights(info: RunnerInfo, model_config: ModelConfig) -> int | None:
    """Count the bytes of weights that each decode step reads, on all ranks together.

    Returns None for a model with experts, because the tokens decide which experts a step reads, and
    for quantised weights.
    """
    if model_config.num_experts or info.weight_format:
        return None
    # A step reads only a few rows of an embedding, unless the embedding is the head as well.
    embedding = (
        0
        if model_config.tie_word_embeddings
        else model_config.vocab_size * model_config.hidden_size
    )
    return (info.num_parameters - embedding) * (4 if info.dtype == "float32" else 2)
