"""The input and output of a job as JSON Lines, read and written as streams.

This file knows files, lines and JSON. formats.py knows what the fields of a line mean.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast

from nanovllm.apps.jobs.errors import JobError, RefusedError
from nanovllm.whole_files import whole_file

LONGEST_LINE = 64 * 2**20  # bytes: longer than any prompt, and small enough to hold in memory
PIECE = 2**20  # bytes; the input is read and hashed in pieces of this size
Ranges = list[tuple[int, int]]  # ranges of line numbers (first, last), in ascending order
AFTER_ALL = (2**63, 2**63)
Item = TypeVar("Item")
BOM = b"\xef\xbb\xbf"  # the byte order mark, which some editors write before UTF-8
NO_UTF8 = {  # first bytes of files that are not UTF-8: what they are, and the remedy
    b"\xff\xfe": "is UTF-16: convert it to UTF-8",
    b"\xfe\xff": "is UTF-16: convert it to UTF-8",
    b"\x1f\x8b": "is compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd: unpack it",
    b"BZh": "is compressed by bzip2: unpack it",
    b"\xfd7zXZ": "is compressed by xz: unpack it",
    b"PK\x03\x04": "is a zip archive: unpack it",
    b"PAR1": "is Parquet: name it .parquet",
}


class Line(NamedTuple):
    """One line of the input: its number (from 1), and its fields or the problem with it."""

    number: int
    fields: dict[str, Any]
    problem: str | None = None


class Source(Protocol):
    """The interface of an input, which can be read more than once."""

    num_lines: int
    seen: "SeenFile"

    def lines(self, done: Ranges) -> Iterator[Line]:
        """Yield the lines in order, without those in the ranges `done`."""


class JsonLines:
    """A file with a JSON object in each line."""

    def __init__(self, path: Path) -> None:
        """Count the lines, for the progress bar, and hash the file, to notice later changes."""
        self.num_lines, last = 0, b"\n"

        def look_at(start: int, piece: bytes) -> None:
            nonlocal last
            if start == 0:
                for magic, problem in NO_UTF8.items():
                    if piece.startswith(magic):
                        raise RefusedError(f"{path} {problem}")
                piece = piece.removeprefix(BOM)
            self.num_lines += piece.count(b"\n")
            last = piece[-1:] or last

        self.seen = SeenFile(path, look_at)
        self.num_lines += last != b"\n"

    def lines(self, done: Ranges) -> Iterator[Line]:
        with self.seen.open() as file:
            for number, data in without(done, enumerate(raw_lines(file), 1)):
                yield parse(number, data)


class SeenFile:
    """A file that has been read once, and whose later readers notice any change.

    Every piece of the file is hashed at each reading; a piece that differs from the first reading
    raises JobError.
    """

    def __init__(
        self, path: Path, look_at: Callable[[int, bytes], None] = lambda start, piece: None
    ) -> None:
        """Read and hash the whole file.

        look_at: called with the offset of each piece, and the piece.
        """
        self.path = path
        self.num_bytes = 0
        digest = hashlib.blake2b(digest_size=16)
        self._digests: list[bytes] = []
        with open_input(path) as file:
            for piece in iter(lambda: file.read(PIECE), b""):
                look_at(self.num_bytes, piece)
                digest.update(piece)
                self._digests.append(digest_of(piece))
                self.num_bytes += len(piece)
        self.digest = digest.hexdigest()

    def open(self) -> BinaryIO:
        """Open the file for reading. Reading a piece that has changed raises JobError."""
        return cast(BinaryIO, BufferedReader(SeenPieces(self), PIECE))

    def check(self) -> None:
        """Raise JobError if any part of the file has changed since the first reading."""
        with self.open() as file:
            while file.read(PIECE):
                pass

    def read_piece(self, file: BinaryIO, number: int) -> bytes:
        """Read a piece of the file; b"" after the last. Raises JobError if it has changed."""
        file.seek(number * PIECE)
        piece = file.read(PIECE)
        seen = self._digests[number] if number < len(self._digests) else digest_of(b"")
        if digest_of(piece) != seen:
            raise JobError(
                f"{self.path} has changed while the job ran. All results so far belong to the "
                "earlier version: restore that version, and run the same command again; or, to "
                "start over, choose another output"
            )
        return piece


class SeenPieces(RawIOBase):
    """An open SeenFile, which holds one piece in memory at a time."""

    def __init__(self, seen: SeenFile) -> None:
        self._seen = seen
        self._file = open_input(seen.path)
        self._place = 0
        self._number, self._piece = -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._seen.num_bytes}
        self._place = max(0, begin[whence] + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        number, start = divmod(self._place, PIECE)
        if number != self._number:
            self._piece = self._seen.read_piece(self._file, number)
            self._number = number
        data = self._piece[start : start + len(buffer)]
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def digest_of(piece: bytes) -> bytes:
    """Return the hash of a piece."""
    return hashlib.blake2b(piece, digest_size=16).digest()


def open_input(path: Path) -> BinaryIO:
    """Open the input. Raises RefusedError if it cannot be read, or is not a regular file."""
    try:
        if path.exists() and not path.is_file():
            raise RefusedError(
                f"{path} is not a regular file: the input is read more than once, so copy it to one"
            )
        return open(path, "rb")
    except OSError as error:
        raise RefusedError(f"cannot read the input: {error}") from error


def raw_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines, without a byte order mark; None for a line that is too long."""
    start = file.read(len(BOM))
    file.seek(len(BOM) if start == BOM else 0)
    while data := file.readline(LONGEST_LINE):
        if data.endswith(b"\n") or len(data) < LONGEST_LINE:
            yield data
            continue
        while data and not data.endswith(b"\n"):
            data = file.readline(PIECE)
        yield None


def without(done: Ranges, numbered: Iterable[tuple[int, Item]]) -> Iterator[tuple[int, Item]]:
    """Yield the numbered items, without those whose numbers are in the ranges `done`."""
    ranges = iter(done)
    first, last = next(ranges, AFTER_ALL)
    for number, item in numbered:
        if number > last:
            first, last = next(ranges, AFTER_ALL)
        if number < first:
            yield number, item


def parse(number: int, data: bytes | None) -> Line:
    """Parse the bytes of a line; None stands for a line that is too long."""
    if data is None:
        return Line(number, {}, f"the line is longer than {LONGEST_LINE} bytes: shorten it")
    if not data.strip():
        return Line(number, {}, "the line is empty: write a JSON object, or delete the line")
    try:
        fields = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError: invalid JSON or UTF-8
        return Line(number, {}, f"the line is not valid JSON: {error}")
    if not isinstance(fields, dict):
        return Line(
            number, {}, f"the line is a JSON {type(fields).__name__}: use an object, {{...}}"
        )
    return Line(number, fields)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON: use null or a finite number")


def write_json_lines(path: Path, mark: str, records: Iterable[bytes]) -> None:
    """Write the whole output or none of it. `whole_file` describes `mark`."""
    try:
        with whole_file(path, mark) as file:
            for record in records:
                file.write(record + b"\n")
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: Exception) -> JobError:
    """Make the error for an output that cannot be written."""
    return JobError(
        f"cannot write {path}: {error}. All results are kept: remove the cause, for example by "
        "freeing disk space, and run the same command again"
    )
