"""Threads and processes in tests, each waited for with an end: what one answers, and which a block
of code has left.
"""

import faulthandler
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

CHILD_SECONDS = 60  # then a child counts as hung and is killed
SECONDS = 120  # then anything else does


def in_thread(call: Callable[[], Any]) -> Future:
    """Start a thread. `result(SECONDS)` is what the call returns, or raises what it raises.

    If it hangs, the tests' process ends all the same: a daemon, unlike an executor's thread.
    """
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def started(command: list, **options) -> Iterator[subprocess.Popen]:
    """A process in a session of its own. With all that it started there it is killed at the end."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def fresh_process() -> Iterator[Callable[..., Any]]:
    """A function: call(function, *args) has a process that has done nothing else do that.

    For what forks. A fork copies the locks that threads hold, and the tests' process has threads of
    many libraries: a child, or what shares a lock with it, may wait forever.
    """
    spawn = multiprocessing.get_context("spawn")
    # One thread, which is all that a fork copies.
    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (1,)) as pool:
        pid = pool.submit(os.getpid).result(SECONDS)
        try:
            yield lambda *call: pool.submit(ended_if_it_hangs, *call).result(SECONDS + 20)
        finally:
            os.kill(pid, signal.SIGKILL)


def ended_if_it_hangs(function: Callable[..., Any], *args) -> Any:
    """What the function returns, unless this process hangs: it says where, and ends."""
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
    try:
        return function(*args)
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def alarms(handler: Callable, delay: float = 0, interval: float = 0) -> Iterator[None]:
    """SIGALRM calls `handler`: after `delay` seconds, if not 0, and then every `interval`.

    After the block the signal is what it was: the end of a test that hangs. The handler may raise
    in the block, not at its end. What it raises in a finalizer is dropped: Python hands that to a
    hook, and if the next signal came in pytest's hook, the test would fail.
    """
    left = signal.setitimer(signal.ITIMER_REAL, 0)
    previous = signal.signal(signal.SIGALRM, handler)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        signal.setitimer(signal.ITIMER_REAL, delay, interval)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, *left)


def in_fork(answer: Callable[[], Any]) -> Any:
    """Fork, and return what `answer` returns in the child; an exception is returned as its text."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_SECONDS)
            os.write(writing, pickle.dumps(said(answer)))
        finally:
            os._exit(0)
    os.close(writing)
    if not select.select([reading], [], [], CHILD_SECONDS + 10)[0]:
        os.kill(child, signal.SIGKILL)  # it hangs in what runs at a fork, before its alarm is set
    with open(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child hangs or died: wait status {status}"
    return pickle.loads(data)


def said(answer: Callable[[], Any]) -> Any:
    try:
        return answer()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def descendants(pid: int, zombies: bool = True) -> set[int]:
    """Processes that a process started, directly or not.

    `zombies`: also those that have ended and that nobody waited for.
    """
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if zombies or state != "Z":
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found, todo = set(), [pid]
    while todo:
        new = children.get(todo.pop(), [])
        found.update(new)
        todo += new
    return found


@contextmanager
def no_process_left(seconds: float = CHILD_SECONDS, zombies: bool = True) -> Iterator[None]:
    """What the block starts is gone at its end, at the latest after so many seconds."""
    before = descendants(os.getpid())
    yield
    deadline = time.monotonic() + seconds
    while (left := descendants(os.getpid(), zombies) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()
