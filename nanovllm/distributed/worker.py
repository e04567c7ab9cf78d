"""The process of one rank: join the others, build the runner, do what the engine commands.

Knows no sequences and no policy. It ends when the engine closes the channel or dies with it: a thread waits for that
alone, so that a rank ends even from within a collective which others will never join. Runs in a fresh interpreter that
`tensor_parallel.spawn_rank` starts, and imports no more than a rank needs.
"""

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from contextlib import suppress

import torch

from nanovllm.cpu.threads import threads_of_rank
from nanovllm.distributed.channel import Channel, Done, Failed, Launch, Listening, Ready, Start, Synchronize
from nanovllm.gpu.device import resolve_device
from nanovllm.gpu.sampled_tokens import SampledTokens
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.distributed.collectives import connect_store, host_store, join_group

PR_SET_PDEATHSIG = 1


def run_rank(fd: int, dies_with_parent: bool) -> None:
    """Serve the engine at the other end of `fd`. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what Ctrl-C means is for the engine to decide
    faulthandler.register(signal.SIGUSR1)  # the engine asks thus where a rank hangs
    if dies_with_parent and sys.platform == "linux":
        # The kernel ends us even where no thread of ours can run Python. It counts the thread that started us as the
        # parent, so this is asked for only where that is the main one.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sock = socket.socket(fileno=fd)
    threading.Thread(target=_exit_when_closed, args=(sock,), daemon=True).start()
    channel = Channel(sock)
    try:
        _serve(channel)
    except EOFError:
        pass
    except BaseException as error:
        with suppress(OSError):  # the engine may be gone
            channel.send(Failed(str(error), traceback.format_exc(), is_users=isinstance(error, ValueError)))
    # Stay until the engine closes the channel: the others would take our end for the error, and complain too.
    threading.Event().wait()


def _exit_when_closed(sock: socket.socket) -> None:
    hung_up = select.poll()
    hung_up.register(sock, 0)  # no event but the hang-up, which needs no asking
    hung_up.poll()
    # Nothing here is worth an orderly end, and what is held by a collective would never come to one.
    os._exit(0)


def _serve(channel: Channel) -> None:
    runner = _start(channel)
    is_first = runner.group.rank == 0
    in_flight: deque[tuple[int, SampledTokens]] = deque()  # rank 0's steps whose tokens the engine waits for
    commands = select.poll()
    commands.register(channel.sock, select.POLLIN)
    while True:
        # The next command must not wait for tokens, nor tokens for a command: look for both by turns.
        while in_flight and not commands.poll(0):
            step, drawn = in_flight[0]
            if drawn.ready():
                in_flight.popleft()
                channel.send(Done(step, drawn.wait()))
        command = channel.receive()
        if isinstance(command, Launch):
            drawn = runner.launch(command.batch)
            if is_first:
                in_flight.append((command.step, drawn))
            else:
                channel.send(Done(command.step))
        elif isinstance(command, Synchronize):
            in_flight.clear()
            runner.synchronize()
            channel.send(Done(command.step))
        else:
            raise AssertionError(f"no command: {command!r}")


def _start(channel: Channel) -> ModelRunner:
    start: Start = channel.receive()
    if start.port is None:
        store, port = host_store()
        channel.send(Listening(port))
    else:
        store = connect_store(start.port)
    device = resolve_device(start.config.device, start.rank)
    if device.type == "cpu":
        # The ranks share the cores.
        torch.set_num_threads(threads_of_rank(start.size))
    group = join_group(start.rank, start.size, device, store, symmetric_memory=start.config.symmetric_memory)
    runner = start.runner_class(
        start.config,
        start.hf_config,
        start.folder,
        max_model_len=start.max_model_len,
        max_num_seqs=start.max_num_seqs,
        group=group,
    )
    channel.send(Ready(runner.info))
    return runner
