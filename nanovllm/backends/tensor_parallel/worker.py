"""The process of one rank: it joins the other ranks, builds the runner and does the commands.

It knows nothing about sequences or policies. `rank_process.spawn_rank` starts it as a fresh
interpreter. The process ends when the engine closes the channel or dies. A thread does nothing but
wait for that, so a rank ends even while it waits in a collective that the other ranks never join.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from nanovllm.backends.cpu.threads import threads_of_rank
from nanovllm.backends.cuda.device import resolve_device
from nanovllm.backends.tensor_parallel.answers import Answer, Done, Failed, Ready, pack_answer
from nanovllm.backends.tensor_parallel.channel import Channel, ChannelClosed
from nanovllm.backends.tensor_parallel.collectives import join_group
from nanovllm.backends.tensor_parallel.commands import (
    Launch,
    ReadLogits,
    SampleConstrained,
    Start,
    Synchronize,
    Task,
    unpack_command,
)
from nanovllm.engine.batch import LogitsEdits
from nanovllm.engine.model_runner import ModelRunner, SampledTokens

PR_SET_PDEATHSIG = 1


def run_rank(rank: int, fd: int, *, engine_pid: int, dies_with_parent: bool) -> None:
    """Serve the engine at the other end of the socket `fd`. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides what Ctrl-C means
    if dies_with_parent and sys.platform == "linux":
        # The kernel then ends this process together with its parent, even if no thread here can run
        # Python. The kernel regards the thread that started this process as the parent, so this is
        # right only if that was the main thread.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sock = socket.socket(fileno=fd)
    threading.Thread(target=_exit_without_engine, args=(sock, engine_pid), daemon=True).start()
    channel = Channel(sock)
    try:
        _serve(rank, channel)
    except ChannelClosed:
        pass
    except BaseException as error:
        is_users = isinstance(error, ValueError)
        failed = Failed(str(error) if is_users else "", traceback.format_exc(), is_users)
        with suppress(OSError):  # the engine may be gone
            _answer(channel, failed)
    # Stay until the engine closes the channel. If this process ended, the other ranks would fail as
    # well, and it would be harder to tell which rank failed first.
    threading.Event().wait()


def _exit_without_engine(sock: socket.socket, engine_pid: int) -> None:
    """Exit when the engine has closed its end of the channel, or its process has ended."""
    gone = select.poll()
    gone.register(sock, 0)  # poll reports a hang-up in any case
    if hasattr(os, "pidfd_open"):
        # A process that the engine forked holds a copy of the engine's end of the channel. The copy
        # keeps the channel open if the engine is killed.
        with suppress(OSError):  # the kernel has no pidfd_open, or the engine is gone
            gone.register(os.pidfd_open(engine_pid), select.POLLIN)
    if os.getppid() == engine_pid:
        gone.poll()
    os._exit(0)  # there is nothing to save, and an orderly exit could wait in a collective


def _serve(rank: int, channel: Channel) -> None:
    """Start the runner, then do commands until the channel closes."""
    runner = _start(rank, channel)
    # The steps of rank 0 whose results the engine waits for.
    in_flight: deque[tuple[int, SampledTokens]] = deque()
    commands = select.poll()
    commands.register(channel.sock, select.POLLIN)
    while True:
        # A command must not wait for a result, nor a result for a command. So look for both by
        # turns.
        while in_flight and not commands.poll(0):
            step, sampled = in_flight[0]
            if sampled.ready():
                in_flight.popleft()
                _answer(channel, Done(step, sampled.wait()))
        command = unpack_command(channel.receive())
        if isinstance(command, (Launch, SampleConstrained)):
            if isinstance(command, Launch):
                sampled = runner.launch(command.batch)
            else:
                sampled = runner.sample_constrained(_with_logits(command))
            if rank == 0:
                in_flight.append((command.step, sampled))
            else:
                _answer(channel, Done(command.step))
        elif isinstance(command, ReadLogits):
            logits = runner.read_logits(command.edits, command.rows)
            _answer(channel, Done(command.step, logits if rank == 0 else None))
        elif isinstance(command, Synchronize):
            in_flight.clear()
            runner.synchronize()
            _answer(channel, Done(command.step))
        elif isinstance(command, Task):
            _answer(channel, Done(command.step, error=do(command, runner)))
        else:
            raise AssertionError(f"no command: {command!r}")


def _answer(channel: Channel, answer: Answer) -> None:
    channel.send(pack_answer(answer))


def _with_logits(command: SampleConstrained) -> LogitsEdits:
    """Return the command's edits with processors that return the logits of the command.

    The user's processors returned these logits in the engine's process.
    """
    processors: dict[int, Any] = {row: partial(_replace, by) for row, by in command.logits.items()}
    return command.edits._replace(processors=processors)


def _replace(by: np.ndarray, logits: Any) -> torch.Tensor:
    return torch.from_numpy(by).to(logits.device)


def do(command: Task, runner: ModelRunner) -> str:
    """Do a task, and return the message of a ValueError that it raises, or "".

    A ValueError is the user's mistake, which must not end the rank.
    """
    try:
        command.task(runner, *command.args)
    except ValueError as error:
        return str(error)
    return ""


def _start(rank: int, channel: Channel) -> ModelRunner:
    """Receive Start, join the other ranks, build the runner and answer Ready."""
    start = unpack_command(channel.receive())
    assert isinstance(start, Start)
    device = resolve_device(start.config.device, rank)
    if device.type == "cpu":
        # The ranks share the cores of one CPU.
        torch.set_num_threads(threads_of_rank(start.size))
    group = join_group(
        rank,
        start.size,
        device,
        start.store_path,
        symmetric_memory=start.config.symmetric_memory,
    )
    runner = start.build_runner(start.config, start.model_config, start.folder, group=group)
    _answer(channel, Ready(runner.info))
    return runner
