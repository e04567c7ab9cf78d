"""A private folder for the Ray session of a job, and a process that cleans up after the session.

Ray keeps its sockets and logs in a folder. In the default folder, /tmp/ray, other users could
replace the socket of the object store by one of theirs, and Ray unpickles what it reads there. In
addition, two of Ray's processes live on for a minute after a killed driver.

This file is also the program of the process that watches the folder, so it imports nothing that is
slow to import.
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

# The path of a socket has at most 107 bytes, of which Ray uses up to 68 below this folder.
LONGEST_FOLDER = 39
POLL_SECONDS, QUIET_SECONDS = 0.1, 0.3
END_SECONDS = 5  # longest time that the session's processes take to end


@contextmanager
def session_folder() -> Iterator[Path]:
    """Yield the path of a folder for one Ray session, inside a folder that only this user can open.

    After the block, or when this process has ended in any way, the processes of the session are
    killed and the folder is removed.
    """
    folder = Path(tempfile.mkdtemp(prefix="nanovllm-"))
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="nanovllm-", dir="/tmp"))
    watcher = subprocess.Popen(
        [sys.executable, "-I", __file__, str(os.getpid()), str(folder)],
        stdin=subprocess.PIPE,  # closed by the end of this process
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to the process group, such as Ctrl-C, do not reach it
    )
    assert watcher.stdin is not None
    try:
        yield folder / "ray"  # Ray makes this inner folder accessible to everybody
    finally:
        watcher.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            watcher.wait(2 * END_SECONDS)


def watch(driver: int, folder: Path) -> None:
    """Wait for the end of stdin, then kill the processes that use the folder, and remove it.

    The driver is not killed: it may have ended its session and continue.
    """
    sys.stdin.buffer.read()
    now = time.monotonic()
    end, quiet_since = now + END_SECONDS, now
    # A process that is still running may start others, so look until none is found for a while.
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
    """Find the processes that have files of a folder open; none on a system without /proc."""
    users = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:  # the process has ended, or belongs to another user
            continue
        if any(path.startswith(f"{folder}/") for path in opened):
            users.add(int(process.name))
    return users


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]))
