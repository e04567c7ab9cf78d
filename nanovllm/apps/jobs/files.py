"""A job's input and output as JSON Lines, read and written as a stream.

Knows files, lines and JSON. Knows nothing of what a line asks for.
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

LONGEST_LINE = 64 * 2**20  # bytes: more than any prompt, and less than a memory
PIECE = 2**20  # bytes of the input that are read and hashed at once
Ranges = list[tuple[int, int]]  # of line numbers, first and last, in order
AFTER_ALL = (2**63, 2**63)
Item = TypeVar("Item")
BOM = b"\xef\xbb\xbf"  # which some editors put before UTF-8
NO_UTF8 = {  # what a file that is not begins with, and what to do about it
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
    """One line of the input: its number, from 1, and its fields or what is wrong with it."""

    number: int
    fields: dict[str, Any]
    problem: str | None = None


class Source(Protocol):
    """An input that can be read more than once."""

    num_lines: int
    seen: "SeenFile"

    def lines(self, done: Ranges) -> Iterator[Line]:
        """The lines in order, but for those that are done."""


class JsonLines:
    """A file with a JSON object in each line."""

    def __init__(self, path: Path) -> None:
        """Count the lines, so that the time left can be told, and hash the file, so that it is
        known again.
        """
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
    """A file that was read once. What is read of it later is what was seen then, or an error: each
    piece of it is hashed, both times.
    """

    def __init__(
        self, path: Path, look_at: Callable[[int, bytes], None] = lambda start, piece: None
    ) -> None:
        """`look_at`: called with each piece and the place in the file where it begins."""
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
        """The file, to read from. Reading raises JobError where it is not what was seen."""
        return cast(BinaryIO, BufferedReader(SeenPieces(self), PIECE))

    def check(self) -> None:
        """Raise JobError if anything in the file is not what was seen."""
        with self.open() as file:
            while file.read(PIECE):
                pass

    def read_piece(self, file: BinaryIO, number: int) -> bytes:
        """One piece of the file; b"" after the last."""
        file.seek(number * PIECE)
        piece = file.read(PIECE)
        seen = self._digests[number] if number < len(self._digests) else digest_of(b"")
        if digest_of(piece) != seen:
            raise JobError(
                f"{self.path} has changed while the job ran. All results so far are of what it was "
                "before: put that back, and run the same command again; or, to begin anew, choose "
                "another output"
            )
        return piece


class SeenPieces(RawIOBase):
    """A SeenFile that is open. It reads and keeps one piece at a time."""

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
    return hashlib.blake2b(piece, digest_size=16).digest()


def open_input(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():
            raise RefusedError(
                f"{path} is no regular file: the input is read more than once, so write it to one"
            )
        return open(path, "rb")
    except OSError as error:
        raise RefusedError(f"cannot read the input: {error}") from error


def raw_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines, without a byte order mark; None for one that is too long."""
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
    """Consecutive numbers, and what is numbered, but for those that are done."""
    ranges = iter(done)
    first, last = next(ranges, AFTER_ALL)
    for number, item in numbered:
        if number > last:
            first, last = next(ranges, AFTER_ALL)
        if number < first:
            yield number, item


def parse(number: int, data: bytes | None) -> Line:
    if data is None:
        return Line(number, {}, f"it is longer than {LONGEST_LINE} bytes")
    if not data.strip():
        return Line(number, {}, "it is empty")
    try:
        fields = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError: of JSON and of UTF-8
        return Line(number, {}, f"it is no JSON: {error}")
    if not isinstance(fields, dict):
        return Line(number, {}, f"it is a JSON {type(fields).__name__}: use an object, {{...}}")
    return Line(number, fields)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def write_json_lines(path: Path, mark: str, records: Iterable[bytes]) -> None:
    """Write all of the output, or nothing; see `whole_file` for `mark`."""
    try:
        with whole_file(path, mark) as file:
            for record in records:
                file.write(record + b"\n")
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: Exception) -> JobError:
    return JobError(
        f"cannot write {path}: {error}. All results are kept: put that right, for example by "
        "making room, and run the same command again"
    )
