"""A job's input and output as JSON Lines, read and written as a stream.

Knows files, lines and JSON. Knows nothing of what a line asks for.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

from nanovllm.apps.jobs.errors import JobError, RefusedError

LONGEST_LINE = 64 * 2**20  # bytes: more than any prompt, and less than a memory
PIECE = 2**20  # bytes read at once where lines do not matter
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
    num_bytes: int
    digest: str  # of all bytes

    def lines(self, done: Ranges) -> Iterator[Line]:
        """The lines in order, but for those that are done."""


class JsonLines:
    """A file with a JSON object in each line."""

    def __init__(self, path: Path) -> None:
        """Count the lines, so that the time left can be told, and hash the file, so that it is
        known again.
        """
        self.path = path
        self.num_lines = self.num_bytes = 0
        digest, last = hashlib.blake2b(digest_size=16), b"\n"
        with open_input(path) as file:
            for piece in iter(lambda: file.read(PIECE), b""):
                if self.num_bytes == 0:
                    for magic, problem in NO_UTF8.items():
                        if piece.startswith(magic):
                            raise RefusedError(f"{path} {problem}")
                digest.update(piece)
                self.num_bytes += len(piece)
                self.num_lines += piece.count(b"\n")
                last = piece[-1:]
        self.num_lines += last != b"\n"
        self.digest = digest.hexdigest()

    def lines(self, done: Ranges) -> Iterator[Line]:
        with open_input(self.path) as file:
            for number, data in without(done, enumerate(raw_lines(file), 1)):
                yield parse(number, data)


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


def write_json_lines(path: Path, records: Iterable[bytes]) -> None:
    """Write all of the output, or nothing."""
    part = part_of(path)
    try:
        with open(part, "wb", buffering=PIECE) as file:
            for record in records:
                file.write(record + b"\n")
        put_in_place(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)  # it may be what takes the room
        raise cannot_write(path, error) from error


def part_of(path: Path) -> Path:
    """What an output is called until it is complete."""
    return path.with_name(path.name + ".part")


def put_in_place(part: Path, path: Path) -> None:
    """Force a file to the disk, then let it appear under its name, and force that too."""
    force(part)
    os.replace(part, path)
    force(path.parent)


def force(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: Exception) -> JobError:
    return JobError(
        f"cannot write {path}: {error}. All results are kept: put that right, for example by "
        "making room, and run the same command again"
    )
