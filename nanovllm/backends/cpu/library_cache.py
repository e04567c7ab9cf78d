"""A folder in the user's cache that keeps compiled libraries between starts.

Anyone who can write a library into the folder can run code as the user who loads it. So the folder
and its files must belong to this user, and nobody else may write to them. A library is read from
its file, checked, and loaded from memory, so the code that runs is the code that was checked, even
if the file changes afterwards. A file ends with a checksum, because a power loss or a full disk can
leave a file in part.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("nanovllm")

CHECKSUM_BYTES = hashlib.sha256().digest_size
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class LibraryCache:
    """The open folder of libraries.

    Files are read and written through the folder's descriptor, so that nobody can put another
    folder in the place of the one that was checked.
    """

    def __init__(self, path: Path, folder: int) -> None:
        self._path, self._folder = path, folder

    def read(self, name: str) -> bytes | None:
        """Return the library that was kept under `name`.

        Returns None if there is no such library, if its file is not whole, or if another user may
        have written it.
        """
        # Do not follow a link in the file's place, and do not wait for a pipe there.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with open(os.open(name, flags, dir_fd=self._folder), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    return None
                if reason := reason_for_distrust(status):
                    logger.warning(
                        f"{self._path / name} {reason}: it is not loaded, and a newly compiled "
                        "library takes its place"
                    )
                    return None
                data = file.read()
        except OSError:
            return None
        library, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
        return library if checksum == hashlib.sha256(library).digest() else None

    def keep(self, name: str, library: bytes) -> None:
        """Keep a library under `name`, or leave the folder as it is if it cannot be written to.

        Other processes never find a part of the file, whenever they look and whenever the power
        fails.
        """
        part = f"{name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(OSError):
            try:
                with open(os.open(part, flags, 0o600, dir_fd=self._folder), "wb") as file:
                    file.write(library + hashlib.sha256(library).digest())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                os.fsync(self._folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part, dir_fd=self._folder)
                raise


@contextmanager
def open_cache() -> Iterator[LibraryCache | None]:
    """Open the folder of libraries for the `with` block; make the folder if there is none.

    Yields None if the folder cannot be made or opened. Yields None and logs a warning with a remedy
    if other users could have written to the folder. The path may hold links: the folder to which
    they lead is the one that is checked.
    """
    path = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nanovllm")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        if reason := reason_for_distrust(os.fstat(folder)):
            logger.warning(
                f"{path} {reason}: compiled kernels are neither loaded from this folder nor kept "
                "in it, so each start compiles them anew. Remove what others could have put "
                f"there and run chmod go-w {path}, or set XDG_CACHE_HOME to a folder of your own"
            )
            yield None
        else:
            yield LibraryCache(path, folder)
    finally:
        os.close(folder)


def reason_for_distrust(status: os.stat_result) -> str:
    """Say why another user may have written to a file or folder; return "" if nobody else can."""
    if status.st_uid != os.getuid():
        return f"belongs to another user, number {status.st_uid}"
    return "may be written to by other users" if status.st_mode & OTHERS_MAY_WRITE else ""


def load_library(library: bytes) -> ctypes.CDLL:
    """Load a library from memory. Raises OSError if the bytes are no library."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # there is no /proc, or the kernel runs nothing from there
            return _load_from_memory(library)
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        return ctypes.CDLL(file.name)


def _load_from_memory(library: bytes) -> ctypes.CDLL:
    """Load a library from a file without a name, because many servers run nothing from /tmp."""
    with open(os.memfd_create("nanovllm-library"), "wb") as file:
        file.write(library)
        file.flush()
        # The copy's number is at least 3, so it cannot be that of a closed stdin, stdout or stderr.
        descriptor = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    try:
        # The dynamic linker takes two libraries of the same path for one. The descriptor stays
        # open, so that no other library gets the same number and thus the same path.
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError:
        os.close(descriptor)
        raise
