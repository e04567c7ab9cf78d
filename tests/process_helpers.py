"""Processes in tests: what a forked child answers, and which processes a block of code has left."""

import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHILD_SECONDS = 60  # then a child counts as hung and is killed


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
def no_process_left(seconds: float = 20, zombies: bool = True) -> Iterator[None]:
    """What the block starts is gone at its end, at the latest after so many seconds."""
    before = descendants(os.getpid())
    yield
    deadline = time.monotonic() + seconds
    while (left := descendants(os.getpid(), zombies) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()


@contextmanager
def ignored_in_finalizers() -> Iterator[None]:
    """Where signals raise exceptions: one that comes in a finalizer is dropped.

    Python hands it to a hook then. If the next signal came in pytest's hook, the test would fail.
    """
    previous, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = previous
