"""Files that get their names once they are complete.

An incomplete file has another name. That name is drawn at random and the file must not exist yet,
so nobody can have placed a file or a link there.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

BUFFER = 2**20  # bytes written at once


def draw_mark() -> str:
    """Draw the random mark that makes the name of an incomplete file unique."""
    return secrets.token_hex(8)


def part_of(path: Path, mark: str) -> Path:
    """Return the name that the file `path` has until it is complete."""
    return path.with_name(f"{path.name}.{mark}.part")


@contextmanager
def whole_file(path: Path, mark: str | None = None) -> Iterator[BinaryIO]:
    """Open a new file, which becomes `path` when the block ends, or is removed if the block raises.

    The content is forced to the disk first, so `path` is complete even after a loss of power.

    Args:
        mark: The mark of an earlier attempt, which may have been killed. The file that it left is
            removed. None: draw a new mark.
    """
    part = part_of(path, mark or draw_mark())
    if mark is not None:
        part.unlink(missing_ok=True)
    file = open_new(part)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        force_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)  # the incomplete file may be what fills the disk
        if isinstance(error, OSError) and error.filename is None:  # a disk that is full names none
            error.filename = os.fspath(path)
        raise


def open_new(path: Path) -> BinaryIO:
    """Make a file and open it for writing. Raises FileExistsError if a file or link is there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    return open(os.open(path, flags, 0o666), "wb", buffering=BUFFER)


def force_folder(path: Path) -> None:
    """Force the names of a folder's files to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
