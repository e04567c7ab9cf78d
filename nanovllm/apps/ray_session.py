"""A private folder for the Ray session of a job, and what ends the session when the job is gone.

Ray keeps its sockets and logs in a folder. In its own, /tmp/ray, other users could put a socket of
theirs in the object store's place, and Ray unpickles what it finds there. And two of Ray's
processes go on for a minute after a driver that was killed: they report its death to one another.

This file also is the program of a process that watches over the folder, so it imports nothing that
takes long.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A socket's path has at most 107 bytes, of which Ray takes up to 68 below this one.
LONGEST_FOLDER = 39
POLL_SECONDS, QUIET_SECONDS = 0.1, 0.3
END_SECONDS = 5  # that the session's processes take to end, at most


@contextmanager
def session_folder() -> Iterator[Path]:
    """Yield the path of a folder for one Ray session, inside one that nobody else can open.

    After the block, or when this process is gone, however that ends, the session's processes are
    killed, and the folder is removed.
    """
    folder = Path(tempfile.mkdtemp(prefix="nanovllm-"))
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="nanovllm-", dir="/tmp"))
    watcher = subprocess.Popen(
        [sys.executable, "-I", __file__, str(os.getpid()), str(folder)],
        stdin=subprocess.PIPE,  # which ends with this process
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal, and who kills a group, do not reach it
    )
    assert watcher.stdin is not None
    try:
        yield folder / "ray"  # which Ray opens to everybody
    finally:
        watcher.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            watcher.wait(2 * END_SECONDS)


def watch(driver: int, folder: Path) -> None:
    """Wait for the end of stdin. Then kill all processes that have files of the folder open, but
    for the driver, which may have ended its session and go on; and remove the folder.
    """
    sys.stdin.buffer.read()
    now = time.monotonic()
    end, quiet_since = now + END_SECONDS, now
    # A process that has not ended yet may start others.
    while now < end and now - quiet_since < QUIET_SECONDS:
        if users := users_of(folder) - {driver}:
            for pid in users:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            quiet_since = time.monotonic()
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)


def users_of(folder: Path) -> set[int]:
    """The processes that have files of a folder open; none where there is no /proc."""
    users = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:  # it has ended, or is another user's
            continue
        if any(path.startswith(f"{folder}/") for path in opened):
            users.add(int(process.name))
    return users


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]))
