"""Several ranks behind the interface of one runner: start them, command them, notice their death, end them.

Every rank, rank 0 included, is a process of its own. So this process joins no process group and holds no GPU: whatever
happens to a rank, it can be reported and the others killed from here, where nothing waits in a collective. Ranks are
fresh interpreters that do not run the user's script again, so scripts need no `if __name__ == "__main__"`.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, RunnerInfo, StepResult
from nanovllm.distributed.channel import Channel, Done, Failed, Launch, Listening, Ready, Start, Synchronize
from nanovllm.gpu.device import resolve_device
from nanovllm.compose import build_runner
from nanovllm.models import build_model
from nanovllm.layers.parallel import ParallelGroup

START_SECONDS = 3600  # to load the model, however slow the disk: a rank that dies meanwhile is noticed at once
END_SECONDS = 5  # to leave when asked to
EVIDENCE_SECONDS = 0.5  # after the first complaint, for the rank that is its cause to be seen dead


class RankError(RuntimeError):
    """A rank died, raised or hung. All ranks are gone, and the LLM with them: make a new one."""


@dataclass
class Rank:
    """A rank's process, as the engine sees it."""

    number: int
    process: subprocess.Popen
    channel: Channel
    done: int = 0  # the last command it answered: on rank 0 its result is here, on the others it is launched
    answers: list[Any] = field(default_factory=list)  # all else it said


@dataclass(frozen=True, slots=True)
class RemoteTokens:
    """Tokens on their way from rank 0."""

    runner: "TensorParallelRunner"
    step: int

    def wait(self) -> StepResult:
        return self.runner.result_of(self.step)


Outgoing = tuple[memoryview, list[tuple[Rank, list[int]]]]  # a frame, and what of it was sent to each who gets it


class TensorParallelRunner:
    """Looks like a ModelRunner; each of its ranks has one."""

    def __init__(self, config: Config, hf_config, folder: str, *, max_model_len: int, max_num_seqs: int) -> None:
        num_parameters = check_split(config, hf_config)
        self._step_seconds = config.step_timeout
        self._step = 0  # the last command's number
        self._outgoing: Outgoing = memoryview(b""), []
        self._drawn: dict[int, StepResult] = {}  # those that arrived, by step
        self._lost: str | None = None  # why the ranks are gone
        self._ranks: list[Rank] = []
        self._by_fd: dict[int, Rank] = {}
        self._poll = select.poll()
        self._end = weakref.finalize(self, end_ranks, self._ranks, os.getpid())
        try:
            for number in range(config.tensor_parallel_size):
                self._ranks.append(rank := spawn_rank(number, timeout=self._step_seconds))
                self._by_fd[rank.channel.sock.fileno()] = rank
                self._poll.register(rank.channel.sock, select.POLLIN)
            infos = self._start(config, plain_config(hf_config), folder, max_model_len, max_num_seqs)
        except BaseException:
            self._end()
            raise
        kv_cache_bytes = sum(info.kv_cache_bytes for info in infos)
        self.info = replace(infos[0], num_parameters=num_parameters, kv_cache_bytes=kv_cache_bytes)
        self.num_blocks = self.info.num_blocks
        self.device = torch.device(self.info.device)

    def _start(
        self, config: Config, hf_config, folder: str, max_model_len: int, max_num_seqs: int
    ) -> list[RunnerInfo]:
        """Tell every rank what to be, and wait until all are; returns what each says of itself."""

        def start(rank: Rank, port: int | None) -> None:
            message = Start(
                rank=rank.number,
                size=len(self._ranks),
                port=port,
                runner_class=build_runner,
                config=config,
                hf_config=hf_config,
                folder=folder,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
            )
            self._outgoing = Channel.frame(message), [(rank, [])]
            self._send()

        first, *others = self._ranks
        start(first, None)
        self._listen(lambda: first.answers, START_SECONDS)
        listening: Listening = first.answers.pop()
        for rank in others:
            start(rank, listening.port)
        self._listen(lambda: all(rank.answers for rank in self._ranks), START_SECONDS)
        ready: list[Ready] = [rank.answers.pop() for rank in self._ranks]
        return [answer.info for answer in ready]

    def launch(self, batch: Batch) -> RemoteTokens:
        """Start a step on every rank and return at once; `wait` on what it returns gives the result."""
        return RemoteTokens(self, self._command(Launch(self._step + 1, batch)))

    def result_of(self, step: int) -> StepResult:
        self._listen(lambda: step in self._drawn, self._step_seconds)
        return self._drawn.pop(step)

    def synchronize(self) -> None:
        """Wait until every rank has finished what it was commanded. Does nothing when the ranks are gone."""
        if not self._end.alive:
            return
        try:
            step = self._command(Synchronize(self._step + 1))
            self._listen(lambda: all(rank.done == step for rank in self._ranks), self._step_seconds)
        except BaseException as error:
            # A second Ctrl-C comes when a rank hangs: do not wait for it any more.
            self._lost = self._lost or f"{type(error).__name__} while they finished their last step"
            self._end()
            raise
        self._drawn.clear()

    def close(self) -> None:
        """End every rank's process, which gives its device's memory back."""
        self._end()

    def _command(self, message: Launch | Synchronize) -> int:
        if self._lost is not None:
            raise RankError(f"this LLM lost its ranks, make a new one. What happened: {self._lost}")
        self._send()  # the rest of a command that Ctrl-C came into: every rank gets the same ones
        self._step = message.step
        self._outgoing = Channel.frame(message), [(rank, []) for rank in self._ranks]
        self._send()
        return message.step

    def _send(self) -> None:
        """Send each rank what it has not got of the command, and hear what ranks say meanwhile.

        For one that waits until its answer is taken takes no command, nor do those that wait for it in a collective.
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
        """Take what the ranks say until the condition holds. Silence for so many seconds means that they hang."""
        deadline = time.monotonic() + seconds
        while not until():
            heard = self._poll.poll(500)
            for fd, _ in heard:
                self._hear(self._by_fd[fd])
            if heard:
                deadline = time.monotonic() + seconds
                continue
            for rank in self._ranks:
                if rank.process.poll() is not None:  # its end of the channel is held by somebody it started
                    self._fail(rank)
            if time.monotonic() > deadline:
                behind = min(rank.done for rank in self._ranks)
                self._fail_silent([rank for rank in self._ranks if rank.done == behind], seconds)

    def _hear(self, rank: Rank) -> None:
        try:
            message = rank.channel.receive()
        except (EOFError, OSError):
            self._fail(rank)
        if isinstance(message, Done):
            rank.done = message.step
            if message.result is not None:
                self._drawn[message.step] = message.result
        elif isinstance(message, Failed):
            self._fail(rank, message)
        else:
            rank.answers.append(message)

    def _fail(self, rank: Rank, failed: Failed | None = None) -> NoReturn:
        """End all ranks and say why: this one died or, if it says so itself, raised."""
        time.sleep(EVIDENCE_SECONDS)
        if failed is not None:
            # Who loses a peer in a collective complains at once; who raises stays alive. So a dead one is the cause.
            dead = next((other for other in self._ranks if other.process.poll() is not None), None)
            if dead is not None:
                rank, failed = dead, None
        if failed is not None and failed.is_users and self._step == 0:
            raise ValueError(failed.error) from RankError(f"rank {rank.number} raised:\n{failed.traceback}")
        what = f"raised:\n{failed.traceback}" if failed is not None else f"died: {how_ended(rank.process)}"
        self._give_up(f"rank {rank.number} of {len(self._ranks)} {what}")

    def _fail_silent(self, ranks: list[Rank], seconds: float) -> NoReturn:
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGUSR1)  # which has it print where its threads are
            time.sleep(EVIDENCE_SECONDS)  # one after the other: two that print at once garble each other's lines
        names = " and ".join(str(rank.number) for rank in ranks)
        self._give_up(
            f"rank{'s' * (len(ranks) > 1)} {names} of {len(self._ranks)} gave no sign for {seconds:g} s; where each rank "
            "hangs is on stderr. If a step may take longer, raise step_timeout"
        )

    def _give_up(self, what: str) -> NoReturn:
        self._lost = what + (" (while starting)" if self._step == 0 else "")
        for rank in self._ranks:
            rank.process.kill()
        self._end()
        raise RankError(self._lost)


def check_split(config: Config, hf_config) -> int:
    """Refuse what cannot be split over the ranks, or what there are no devices for; returns the model's parameters."""
    group = ParallelGroup(0, config.tensor_parallel_size)
    group.shard(hf_config.num_attention_heads, "num_attention_heads")  # first of all: there may be a billion ranks
    with torch.device("meta"):
        build_model(hf_config, group)
        whole = build_model(hf_config, ParallelGroup())
    for rank in range(config.tensor_parallel_size):
        resolve_device(config.device, rank)
    return sum(parameter.numel() for parameter in whole.parameters())


def plain_config(hf_config) -> SimpleNamespace:
    """The configuration's values without their class, so that a rank need not import transformers, which takes seconds."""
    values = {name: value for name, value in vars(hf_config).items() if not name.startswith("_")}
    values.update((alias, getattr(hf_config, alias)) for alias in getattr(hf_config, "attribute_map", {}))
    return SimpleNamespace(**values)


def spawn_rank(number: int, timeout: float) -> Rank:
    """Start a rank's process: a fresh interpreter that finds modules where this one does and runs none of its script."""
    ours, theirs = socket.socketpair()
    with theirs:
        in_main_thread = threading.current_thread() is threading.main_thread()
        code = (
            f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; from nanovllm.distributed.worker import run_rank; "
            f"run_rank({theirs.fileno()}, dies_with_parent={in_main_thread})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,  # this process may be reading its script there
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in a terminal goes to this process alone
        )
    return Rank(number, process, Channel(ours, timeout))


def end_ranks(ranks: list[Rank], owner: int) -> None:
    """Let the ranks go, and make sure that they are gone."""
    if os.getpid() != owner:
        return  # a fork of the process whose ranks these are
    for rank in ranks:
        rank.channel.close()  # which each takes for the end
    deadline = time.monotonic() + END_SECONDS
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(END_SECONDS)


def how_ended(process: subprocess.Popen) -> str:
    try:
        status = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "it closed its channel"
    if status >= 0:
        return f"it exited with status {status}"
    hint = ", perhaps because memory ran out" if -status == signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-status).name}{hint}"
