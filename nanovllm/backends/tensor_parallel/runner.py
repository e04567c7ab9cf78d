"""The runner of several ranks, with the interface of the runner of one.

It commands the ranks' processes, notices when a rank dies or hangs, and then ends all ranks. Every
rank, rank 0 included, is a process of its own. The engine's process joins no process group and
holds no device memory, so it never waits in a collective: whatever happens to a rank, the engine's
process can report it and kill the other ranks.
"""

import os
import select
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from nanovllm.backends.cuda.device import resolve_device
from nanovllm.backends.tensor_parallel.answers import (
    Done,
    Failed,
    MalformedAnswer,
    Ready,
    unpack_answer,
)
from nanovllm.backends.tensor_parallel.channel import Channel, ChannelClosed
from nanovllm.backends.tensor_parallel.commands import (
    Launch,
    ReadLogits,
    SampleConstrained,
    Start,
    Synchronize,
    Task,
    pack_command,
)
from nanovllm.backends.tensor_parallel.rank_process import (
    Rank,
    end_ranks,
    how_ended,
    kill_ranks,
    open_store_file,
    spawn_rank,
    store_path,
)
from nanovllm.config import Config
from nanovllm.engine.batch import Batch, LogitsEdits, RunnerInfo, StepResult
from nanovllm.engine.errors import RankError
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models import build_model
from nanovllm.models.model_config import ModelConfig

# The time to wait after a rank reports an error. If the death of another rank caused the error,
# that rank is seen to be dead by then.
EVIDENCE_SECONDS = 0.5


Result = TypeVar("Result", StepResult, np.ndarray)


@dataclass(frozen=True, slots=True)
class RemoteTokens:
    """Sampled tokens on their way from rank 0."""

    runner: "TensorParallelRunner"
    step: int
    # The step whose result this one replaces. If rank 0 sends that result at all, it does so before
    # it sends this one's.
    replaced: int | None = None

    def wait(self) -> StepResult:
        """Wait until rank 0 has sent the step's result, and return it."""
        result = self.runner.result_of(self.step, StepResult)
        if self.replaced is not None:
            self.runner.drop_result(self.replaced)
        return result


# A frame, and each rank that must get it, with how many bytes of it each call has sent the rank.
Outgoing = tuple[memoryview, list[tuple[Rank, list[int]]]]


class TensorParallelRunner:
    """A runner with the interface of ModelRunner, whose ranks have a ModelRunner each.

    An interrupt (Ctrl-C) may come anywhere. `synchronize` then makes the runner usable again. It
    may be interrupted, too, and be called again.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        folder: str | Path,
        build_runner: Callable[..., Any],
    ) -> None:
        """Start the ranks. Each of them calls `build_runner` to build its runner."""
        num_parameters = check_split(config, model_config)
        self._start_seconds = config.start_timeout
        self._step_seconds = config.step_timeout
        self._step = 0  # the number of the last command
        self._launched: int | None = None  # the number of the last Launch
        self._outgoing: Outgoing = memoryview(b""), []
        self._results: dict[int, Any] = {}  # command number -> result that nobody has taken yet
        self._errors: dict[int, str] = {}  # command number -> error of a task
        self._lost: str | None = None  # why the ranks are gone; None: they are there
        self._ranks: list[Rank] = []
        self._by_fd: dict[int, Rank] = {}
        self._poll = select.poll()
        # The finalizer serves a runner that nobody closes. `close` ends the ranks without it,
        # because a finalizer does not run again after an interrupt has cut it short.
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, end_ranks, self._ranks, self._owner)
        try:
            start = Start(
                size=config.tensor_parallel_size,
                store_path="",
                build_runner=build_runner,
                # A user's own policy may not be picklable, and no rank schedules.
                config=replace(config, scheduling_policy="fcfs"),
                model_config=model_config,
                folder=str(folder),
            )
            infos = self._start(start)
        except BaseException:
            self.close()
            raise
        kv_cache_bytes = sum(info.kv_cache_bytes for info in infos)
        self.info = replace(
            infos[0],
            num_parameters=num_parameters,
            kv_cache_bytes=kv_cache_bytes,
            state_bytes=sum(info.state_bytes for info in infos),
        )

    def _start(self, start: Start) -> list[RunnerInfo]:
        """Start every rank, wait until all are ready, and return the info of each one's runner."""
        with open_store_file() as store:
            for number in range(start.size):
                rank = spawn_rank(number, store, timeout=self._step_seconds)
                self._ranks.append(rank)
                self._by_fd[rank.channel.sock.fileno()] = rank
                self._poll.register(rank.channel.sock, select.POLLIN)
            frame = Channel.frame(pack_command(replace(start, store_path=store_path(store))))
            self._outgoing = frame, [(rank, []) for rank in self._ranks]
            self._send()
            self._listen(lambda: all(rank.ready for rank in self._ranks), self._start_seconds)
        return [rank.ready.info for rank in self._ranks if rank.ready is not None]

    def launch(self, batch: Batch) -> RemoteTokens:
        """Start a step on every rank and return at once.

        `wait` of the returned object waits for the sampled tokens.
        """
        self._launched = self._command(Launch(self._step + 1, batch))
        return RemoteTokens(self, self._launched)

    def sample_constrained(self, edits: LogitsEdits) -> RemoteTokens:
        """Sample the last step's constrained rows on every rank, from edited logits.

        Logits processors are the user's functions. They are called in this process, on a copy of
        the logits in its memory.
        """
        processors, edits = edits.processors, edits._replace(processors={})
        logits: dict[int, np.ndarray] = {}
        if processors:
            read = self._command(ReadLogits(self._step + 1, edits, [*processors]))
            rows = torch.from_numpy(self.result_of(read, np.ndarray))
            logits = {
                row: function(rows[i]).float().numpy(force=True)
                for i, (row, function) in enumerate(processors.items())
            }
        step = self._command(SampleConstrained(self._step + 1, edits, logits))
        return RemoteTokens(self, step, replaced=self._launched)

    def result_of(self, step: int, kind: type[Result]) -> Result:
        """Wait for rank 0's result of a command, and take it. It must be of class `kind`."""
        self._listen(lambda: step in self._results, self._step_seconds)
        result = self._results.pop(step)
        if not isinstance(result, kind):
            self._give_up(f"rank 0 answered a {type(result).__name__}, not a {kind.__name__}")
        return result

    def drop_result(self, step: int) -> None:
        """Drop the result of a step that nobody takes, if it has arrived."""
        self._results.pop(step, None)

    def synchronize(self) -> None:
        """Wait until every rank has done all commands, and drop the results that nobody took.

        This does nothing if the ranks are gone.
        """
        if self._lost is not None or not self._finalizer.alive:
            return
        step = self._command(Synchronize(self._step + 1))
        self._listen(lambda: all(rank.done == step for rank in self._ranks), self._step_seconds)
        self._results.clear()
        self._errors.clear()

    def on_all_ranks(self, task: Callable[..., None], *args: Any) -> None:
        """Call `task(runner, *args)` on every rank, with its own runner, and wait for all of them.

        The task may take as long as the start. A ValueError that it raises on a rank is raised here
        with the same message.
        """
        step = self._command(Task(self._step + 1, task, args))
        self._listen(lambda: all(rank.done == step for rank in self._ranks), self._start_seconds)
        if error := self._errors.pop(step, ""):
            raise ValueError(error)

    def close(self) -> None:
        """End every rank's process and so free its memory."""
        end_ranks(self._ranks, self._owner)
        self._finalizer.detach()

    def _command(
        self, message: Launch | SampleConstrained | ReadLogits | Synchronize | Task
    ) -> int:
        """Send a command to every rank, and return the command's number."""
        if self._lost is not None:
            raise RankError(f"this LLM lost its ranks: make a new LLM. The cause: {self._lost}")
        # An interrupt may have left a part of the last command unsent. Every rank gets every
        # command, so the rest goes first.
        self._send()
        self._step = message.step
        self._outgoing = Channel.frame(pack_command(message)), [(rank, []) for rank in self._ranks]
        self._send()
        return message.step

    def _send(self) -> None:
        """Send each rank the rest of the last command, and read answers meanwhile.

        A rank whose answer nobody reads accepts no more bytes. Neither do the ranks that wait for
        it in a collective. So a send that did not read might wait forever.
        """
        frame, receivers = self._outgoing
        for rank, sent in receivers:
            sock = rank.channel.sock
            while sum(sent) < len(frame):
                self._poll.modify(sock, select.POLLIN | select.POLLOUT)
                try:
                    ready = dict(self._poll.poll(self._step_seconds * 1000))
                finally:
                    self._poll.modify(sock, select.POLLIN)
                if not ready:
                    self._fail_silent([rank], self._step_seconds)
                for fd, event in ready.items():
                    if event & ~select.POLLOUT:
                        self._hear(self._by_fd[fd])
                if ready.get(sock.fileno(), 0) & select.POLLOUT:
                    try:
                        rank.channel.send_some(frame, sent)
                    except OSError:
                        self._fail(rank)

    def _listen(self, until: Callable[[], Any], seconds: float) -> None:
        """Read the ranks' answers until the condition `until` holds.

        Raises RankError if a rank ends, or if all ranks are silent for this many seconds.
        """
        deadline = time.monotonic() + seconds
        while not until():
            heard = self._poll.poll(min(500, seconds * 1000))
            for fd, _ in heard:
                self._hear(self._by_fd[fd])
            if heard:
                deadline = time.monotonic() + seconds
                continue
            for rank in self._ranks:
                # A closed channel would tell of a rank's end, but a process that the rank started
                # may still hold the channel open.
                if rank.process.poll() is not None:
                    self._fail(rank)
            if time.monotonic() > deadline:
                self._fail_silent(self._behind(), seconds)

    def _behind(self) -> list[Rank]:
        """Return the ranks that the other ranks wait for."""
        if self._step == 0:
            return [rank for rank in self._ranks if rank.ready is None]
        least = min(rank.done for rank in self._ranks)
        return [rank for rank in self._ranks if rank.done == least]

    def _hear(self, rank: Rank) -> None:
        """Receive one answer of a rank and record it. End all ranks if it reports a failure."""
        try:
            message = unpack_answer(rank.channel.receive())
        except (ChannelClosed, OSError):
            self._fail(rank)
        except MalformedAnswer as error:
            self._give_up(
                f"rank {rank.number} of {len(self._ranks)} sent a malformed answer ({error})"
            )
        if isinstance(message, Done):
            rank.done = message.step
            if message.result is not None:
                self._results[message.step] = message.result
            if message.error:
                self._errors[message.step] = message.error
        elif isinstance(message, Failed):
            self._fail(rank, message)
        else:
            assert isinstance(message, Ready), message
            rank.ready = message

    def _fail(self, rank: Rank, failed: Failed | None = None) -> NoReturn:
        """End all ranks and raise the cause: `rank` died or, if `failed` is given, raised."""
        time.sleep(EVIDENCE_SECONDS)
        if failed is not None:
            # A rank that loses a peer in a collective raises at once and stays alive. So if another
            # rank is dead, its death is the cause.
            dead = next((other for other in self._ranks if other.process.poll() is not None), None)
            if dead is not None:
                rank, failed = dead, None
        if failed is not None and failed.is_users and self._step == 0:
            cause = RankError(f"rank {rank.number} raised:\n{failed.traceback}")
            raise ValueError(failed.error) from cause
        if failed is not None:
            what = f"raised:\n{failed.traceback}"
        else:
            what = f"died: {how_ended(rank.process)}"
        self._give_up(f"rank {rank.number} of {len(self._ranks)} {what}")

    def _fail_silent(self, ranks: list[Rank], seconds: float) -> NoReturn:
        """End all ranks and raise the cause: `ranks` sent no answer for this many seconds."""
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGUSR1)  # the rank prints the stack of each thread
            time.sleep(EVIDENCE_SECONDS)  # ranks that print at the same time would mix their lines
        names = " and ".join(str(rank.number) for rank in ranks)
        remedy = "If a step may take longer, raise step_timeout"
        if self._step == 0 or seconds != self._step_seconds:
            remedy = "If loading may take longer, raise start_timeout"
        self._give_up(
            f"rank{'s' * (len(ranks) > 1)} {names} of {len(self._ranks)} gave no sign for "
            f"{seconds:g} s; where each rank hangs is on stderr. {remedy}"
        )

    def _give_up(self, what: str) -> NoReturn:
        """Kill all ranks and raise RankError with what happened."""
        self._lost = what + (" (while starting)" if self._step == 0 else "")
        kill_ranks(self._ranks)
        self.close()
        raise RankError(self._lost)


def check_split(config: Config, model_config: ModelConfig) -> int:
    """Raise ValueError if the ranks cannot split the model, or if there are too few devices.

    Returns the number of parameters of the whole model.
    """
    group = ParallelGroup(0, config.tensor_parallel_size)
    # This check comes first, because a user may ask for a billion ranks.
    group.shard(model_config.num_attention_heads, "num_attention_heads")
    with torch.device("meta"):
        build_model(model_config, group)
        whole = build_model(model_config, ParallelGroup())
    for rank in range(config.tensor_parallel_size):
        resolve_device(config.device, rank)
    return sum(parameter.numel() for parameter in whole.parameters())
