"""Several ranks behind the interface of one runner.

Commands the ranks' processes, notices when one dies or hangs, and ends all then.
Every rank, rank 0 included, is a process of its own. This process joins no process group and holds
no device memory, so nothing here waits in a collective: whatever happens to a rank, this process
can report it and kill the others.
"""

import os
import select
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
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
    Constrain,
    Launch,
    ReadLogits,
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

# After the first complaint: if another rank's death is its cause, that is visible by then.
EVIDENCE_SECONDS = 0.5


Result = TypeVar("Result", StepResult, np.ndarray)


@dataclass(frozen=True, slots=True)
class RemoteTokens:
    """Sampled tokens on their way from rank 0."""

    runner: "TensorParallelRunner"
    step: int
    # The step whose answer this one's takes the place of; rank 0 has sent that before, if at all.
    replaced: int | None = None

    def wait(self) -> StepResult:
        result = self.runner.result_of(self.step, StepResult)
        if self.replaced is not None:
            self.runner.drop_result(self.replaced)
        return result


# A frame, and each rank that gets it with the numbers of bytes it was sent.
Outgoing = tuple[memoryview, list[tuple[Rank, list[int]]]]


class TensorParallelRunner:
    """Has the interface of ModelRunner. Each of its ranks has a ModelRunner.

    An interrupt (Ctrl-C) may come anywhere. `synchronize` then makes the runner usable again, and
    may itself be interrupted and called again.
    """

    def __init__(
        self, config: Config, hf_config, folder: str | Path, build_runner: Callable[..., Any]
    ) -> None:
        """Start the ranks, each of which builds its runner by `build_runner`."""
        num_parameters = check_split(config, hf_config)
        self._start_seconds = config.start_timeout
        self._step_seconds = config.step_timeout
        self._step = 0  # the last command's number
        self._launched: int | None = None  # the last launch's
        self._outgoing: Outgoing = memoryview(b""), []
        self._results: dict[int, Any] = {}  # those that have arrived, by step
        self._errors: dict[int, str] = {}  # of tasks, likewise
        self._lost: str | None = None  # why the ranks are gone
        self._ranks: list[Rank] = []
        self._by_fd: dict[int, Rank] = {}
        self._poll = select.poll()
        # For a runner that nobody closes. `close` ends the ranks itself: a finalizer runs only
        # once, even if an interrupt cuts it short.
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, end_ranks, self._ranks, self._owner)
        try:
            start = Start(
                size=config.tensor_parallel_size,
                store_path="",
                build_runner=build_runner,
                # A policy of the reader's own may not cross. No rank schedules.
                config=replace(config, scheduling_policy="fcfs"),
                hf_config=plain_config(hf_config),
                folder=str(folder),
            )
            infos = self._start(start)
        except BaseException:
            self.close()
            raise
        kv_cache_bytes = sum(info.kv_cache_bytes for info in infos)
        self.info = replace(infos[0], num_parameters=num_parameters, kv_cache_bytes=kv_cache_bytes)
        self.num_blocks = self.info.num_blocks
        self.device = torch.device(self.info.device)

    def _start(self, start: Start) -> list[RunnerInfo]:
        """Start every rank and wait until all are ready; returns what each says of its runner."""
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
        """Start a step on every rank and return at once; `wait` gives the sampled tokens."""
        self._launched = self._command(Launch(self._step + 1, batch))
        return RemoteTokens(self, self._launched)

    def constrain(self, edits: LogitsEdits) -> RemoteTokens:
        """Complete the last step on every rank. Processors are called here, where the user's
        functions are, on logits in this process's memory.
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
        step = self._command(Constrain(self._step + 1, edits, logits))
        return RemoteTokens(self, step, replaced=self._launched)

    def result_of(self, step: int, kind: type[Result]) -> Result:
        self._listen(lambda: step in self._results, self._step_seconds)
        result = self._results.pop(step)
        if not isinstance(result, kind):
            self._give_up(f"rank 0 answered a {type(result).__name__}, not a {kind.__name__}")
        return result

    def drop_result(self, step: int) -> None:
        """Forget what has come of a step whose result nobody takes."""
        self._results.pop(step, None)

    def synchronize(self) -> None:
        """Wait until every rank has done what it was commanded, and drop results that nobody took.

        Does nothing if the ranks are gone.
        """
        if self._lost is not None or not self._finalizer.alive:
            return
        step = self._command(Synchronize(self._step + 1))
        self._listen(lambda: all(rank.done == step for rank in self._ranks), self._step_seconds)
        self._results.clear()
        self._errors.clear()

    def on_all_ranks(self, task: Callable[..., None], *args: Any) -> None:
        """Have every rank do `task(its runner, *args)`, and wait until all have.

        It may take as long as the start. A ValueError on a rank is raised here.
        """
        step = self._command(Task(self._step + 1, task, args))
        self._listen(lambda: all(rank.done == step for rank in self._ranks), self._start_seconds)
        if error := self._errors.pop(step, ""):
            raise ValueError(error)

    def close(self) -> None:
        """End every rank's process, which gives its memory back."""
        end_ranks(self._ranks, self._owner)
        self._finalizer.detach()

    def _command(self, message: Launch | Constrain | ReadLogits | Synchronize | Task) -> int:
        if self._lost is not None:
            raise RankError(f"this LLM lost its ranks, make a new one. What happened: {self._lost}")
        self._send()  # what an interrupt left of the last command: every rank gets all commands
        self._step = message.step
        self._outgoing = Channel.frame(pack_command(message)), [(rank, []) for rank in self._ranks]
        self._send()
        return message.step

    def _send(self) -> None:
        """Send each rank what it has not yet got of the command, and read what ranks say meanwhile.

        A rank whose answer nobody reads accepts no command. Nor do the ranks that wait for it in a
        collective.
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
        """Read what the ranks say until the condition holds.

        Raises RankError if one ends, or if all are silent for so many seconds.
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
                # A process that the rank started may hold its end of the channel open.
                if rank.process.poll() is not None:
                    self._fail(rank)
            if time.monotonic() > deadline:
                self._fail_silent(self._behind(), seconds)

    def _behind(self) -> list[Rank]:
        """The ranks that the others wait for."""
        if self._step == 0:
            return [rank for rank in self._ranks if rank.ready is None]
        least = min(rank.done for rank in self._ranks)
        return [rank for rank in self._ranks if rank.done == least]

    def _hear(self, rank: Rank) -> None:
        try:
            message = unpack_answer(rank.channel.receive())
        except (ChannelClosed, OSError):
            self._fail(rank)
        except MalformedAnswer as error:
            self._give_up(
                f"rank {rank.number} of {len(self._ranks)} sent what is no answer ({error})"
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
        """End all ranks and say why: this one died or, if it says so itself, raised."""
        time.sleep(EVIDENCE_SECONDS)
        if failed is not None:
            # A rank that loses a peer in a collective raises at once, and stays alive. So if one
            # is dead, its death is the cause.
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
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGUSR1)  # has it print the stack of each thread
            time.sleep(EVIDENCE_SECONDS)  # two ranks that print at once garble each other's lines
        names = " and ".join(str(rank.number) for rank in ranks)
        remedy = "If a step may take longer, raise step_timeout"
        if self._step == 0 or seconds != self._step_seconds:
            remedy = "If loading may take longer, raise start_timeout"
        self._give_up(
            f"rank{'s' * (len(ranks) > 1)} {names} of {len(self._ranks)} gave no sign for "
            f"{seconds:g} s; where each rank hangs is on stderr. {remedy}"
        )

    def _give_up(self, what: str) -> NoReturn:
        self._lost = what + (" (while starting)" if self._step == 0 else "")
        kill_ranks(self._ranks)
        self.close()
        raise RankError(self._lost)


def check_split(config: Config, hf_config) -> int:
    """Refuse what cannot be split over the ranks, or what there are no devices for.

    Returns the number of the whole model's parameters.
    """
    group = ParallelGroup(0, config.tensor_parallel_size)
    # This comes first, since somebody may ask for a billion ranks.
    group.shard(hf_config.num_attention_heads, "num_attention_heads")
    with torch.device("meta"):
        build_model(hf_config, group)
        whole = build_model(hf_config, ParallelGroup())
    for rank in range(config.tensor_parallel_size):
        resolve_device(config.device, rank)
    return sum(parameter.numel() for parameter in whole.parameters())


def plain_config(hf_config) -> SimpleNamespace:
    """The configuration's values without their class.

    So a rank need not import transformers, which takes seconds.
    """
    values = {name: value for name, value in vars(hf_config).items() if not name.startswith("_")}
    aliases = getattr(hf_config, "attribute_map", {})
    values.update((alias, getattr(hf_config, alias)) for alias in aliases)
    return SimpleNamespace(**values)
