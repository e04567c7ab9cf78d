"""Files that appear under their names once they are complete.

Until then they have another name, which nobody can have given to a file or a link of his own: it is
drawn at random, and the file is only ever made anew.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

BUFFER = 2**20  # bytes written at once


def draw_mark() -> str:
    """Draw what makes the name of an incomplete file its own."""
    return secrets.token_hex(8)


def part_of(path: Path, mark: str) -> Path:
    """Say what the file that is to become `path` is called until then."""
    return path.with_name(f"{path.name}.{mark}.part")


@contextmanager
def whole_file(path: Path, mark: str | None = None) -> Iterator[BinaryIO]:
    """Make a file to write to, which becomes `path` when the block ends, and is gone if it raises.

    What was written is forced to the disk first, so `path` is whole after a loss of power, too.

    Args:
        mark: one that was drawn for an earlier try, which may have been killed: what that has left
            is removed. None: draw one.
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
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)  # it may be what takes the room
        raise


def open_new(path: Path) -> BinaryIO:
    """Make a file and open it to write. Raises FileExistsError for what is there, links too."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    return open(os.open(path, flags, 0o666), "wb", buffering=BUFFER)


def force_folder(path: Path) -> None:
    """Force to the disk which names the files of a folder have."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
