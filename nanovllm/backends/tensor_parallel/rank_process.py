"""The process of a rank, as the engine sees it: how it starts, how it ends, how it is killed.

A rank is a fresh interpreter that runs worker.py. It does not run the user's script again, so
scripts need no `if __name__ == "__main__"`.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO

from nanovllm.backends.tensor_parallel.answers import Ready
from nanovllm.backends.tensor_parallel.channel import Channel

END_SECONDS = 5  # the time that a rank may take to exit when it is asked to


@dataclass
class Rank:
    """A rank's process, as the engine sees it."""

    number: int
    process: subprocess.Popen
    channel: Channel
    done: int = 0  # the number of the last command that the rank answered
    ready: Ready | None = None


def open_store_file() -> IO[bytes]:
    """Open an empty file through which the ranks find each other; only this user can open it."""
    if sys.platform != "linux":
        return tempfile.NamedTemporaryFile(prefix="nanovllm-")
    # The file has no name. It is gone when the last process that holds it ends, in whatever way.
    fd = os.memfd_create("nanovllm-ranks")
    try:
        return os.fdopen(above_stdio(fd), "rb")
    finally:
        os.close(fd)


def store_path(store: IO[bytes]) -> str:
    """Return the path by which a rank opens the store file."""
    return f"/proc/self/fd/{store.fileno()}" if sys.platform == "linux" else store.name


def spawn_rank(number: int, store: IO[bytes], timeout: float) -> Rank:
    """Start a rank's process: a fresh interpreter that finds modules where this one does."""
    ours, theirs = open_socket_pair()
    # For the kernel, the parent is the thread that starts the rank. Only the main thread is sure to
    # live as long as this process.
    dies_with_parent = threading.current_thread() is threading.main_thread()
    arguments = (
        f"{number}, {theirs.fileno()}, engine_pid={os.getpid()}, "
        f"dies_with_parent={dies_with_parent}"
    )
    code = (
        # On this signal a rank prints where it hangs. This comes first, for an import may hang.
        "import faulthandler, signal; faulthandler.register(signal.SIGUSR1); "
        f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; "
        f"from nanovllm.backends.tensor_parallel.worker import run_rank; run_rank({arguments})"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                stdin=subprocess.DEVNULL,  # this process may be reading its script from stdin
                stdout=inherited(1),
                stderr=inherited(2),
                pass_fds=[theirs.fileno(), store.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal goes to this process alone
            )
    except BaseException:
        ours.close()  # if the rank was started nevertheless, it exits now
        raise
    return Rank(number, process, Channel(ours, timeout))


def inherited(fd: int) -> int | None:
    """Choose a rank's stdout or stderr: this process's own, or the null device if it is closed."""
    try:
        is_open = os.get_inheritable(fd)  # a file that took a closed number is not inheritable
    except OSError:
        is_open = False
    return None if is_open else subprocess.DEVNULL


def open_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Open two connected sockets whose descriptors have numbers above 2."""
    pair = socket.socketpair()
    try:
        ours, theirs = [socket.socket(fileno=above_stdio(sock.fileno())) for sock in pair]
    finally:
        for sock in pair:
            sock.close()
    return ours, theirs


def above_stdio(fd: int) -> int:
    """Copy a descriptor to a number above 2.

    If stdin, stdout or stderr is closed, a new file gets its number, and print would write to the
    file.
    """
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def end_ranks(ranks: list[Rank], owner: int) -> None:
    """Ask the ranks to exit, wait, and kill those that do not exit in time.

    An interrupt while this waits kills the ranks, and is raised when they are gone. In a process
    other than the `owner` this does nothing: a fork must not end the ranks of its parent.
    """
    if os.getpid() != owner:
        return
    try:
        for rank in ranks:
            rank.channel.close()  # a rank exits when its channel closes
        deadline = time.monotonic() + END_SECONDS
        for rank in ranks:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        kill_ranks(ranks)


def kill_ranks(ranks: list[Rank]) -> None:
    """Kill the ranks that still run, and wait until they are gone.

    An interrupt only makes this begin again. The last interrupt is raised at the end.
    """
    interrupt = None
    while True:
        try:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.wait(END_SECONDS)
            break
        except subprocess.TimeoutExpired:
            break  # the rank is stuck inside the kernel, which ends it when it can
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def how_ended(process: subprocess.Popen) -> str:
    """Say how a process ended, for an error message."""
    try:
        status = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "it closed its channel"
    if status >= 0:
        return f"it exited with status {status}"
    hint = ", perhaps because memory ran out" if -status == signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-status).name}{hint}"
