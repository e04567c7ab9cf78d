"""The input and output of a job as Parquet, read and written in parts.

Only this file imports pyarrow, an optional package.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanovllm.apps.jobs.errors import RefusedError
from nanovllm.apps.jobs.files import (
    Line,
    Ranges,
    SeenFile,
    cannot_write,
    without,
)
from nanovllm.apps.jobs.formats import known_fields
from nanovllm.whole_files import whole_file

ROWS = 1024  # rows in memory at a time
REQUEST = {*known_fields(())} - {"id"}
LOGPROBS = pa.list_(pa.map_(pa.int32(), pa.float32()))
COMPLETION = [
    ("text", pa.string()),
    ("token_ids", pa.list_(pa.int32())),
    ("finish_reason", pa.string()),
    ("stop_reason", pa.string()),  # text, or a token id written as text
    ("logprobs", LOGPROBS),
    ("cumulative_logprob", pa.float64()),
]
RESULT = [
    *COMPLETION,
    ("num_prompt_tokens", pa.int32()),
    ("completions", pa.list_(pa.struct(COMPLETION))),
    ("prompt_logprobs", LOGPROBS),
    ("error", pa.string()),
]


class ParquetRows:
    """A Parquet file whose columns are the fields of lines; null stands for an absent field."""

    def __init__(self, path: Path, known: Collection[str]) -> None:
        """Open the file, and hash it to notice later changes.

        known: the columns that are allowed. Raises RefusedError for any other.
        """
        self.path = path
        self.seen = SeenFile(path)
        try:
            self._file = pq.ParquetFile(self.seen.open())
        except pa.ArrowException as error:
            raise RefusedError(f"{path} is not a Parquet file: {error}") from error
        self.num_lines = self._file.metadata.num_rows
        self.schema = self._file.schema_arrow
        for name in self.schema.names:
            if name not in known:
                raise RefusedError(
                    f"{path} has a column {name!r}, which is not a field of a request: remove the "
                    f"column, or copy it to the output with --keep {name}"
                )

    def lines(self, done: Ranges) -> Iterator[Line]:
        end = 0
        for group in range(self._file.num_row_groups):
            begin, end = end, end + self._file.metadata.row_group(group).num_rows
            if any(first <= begin + 1 and end <= last for first, last in done):
                continue
            numbered = enumerate(self._rows(group), begin + 1)
            inside = [(first, last) for first, last in done if last > begin]
            for number, row in without(inside, numbered):
                yield Line(number, given_fields(row))

    def _rows(self, group: int) -> Iterator[dict[str, Any]]:
        for batch in self._file.iter_batches(ROWS, row_groups=[group]):
            yield from batch.to_pylist()


def output_schema(repeated: Iterable[str], source: Any) -> pa.Schema:
    """Return the columns of an output.

    A field that is copied from a Parquet input keeps its type. A field that is copied from another
    input is text: its own text, or JSON.
    """
    given = source.schema if isinstance(source, ParquetRows) else pa.schema([])
    types = {name: given.field(name).type for name in given.names}
    return pa.schema(
        [
            ("line", pa.int64()),
            *[(name, types.get(name, pa.string())) for name in repeated],
            *RESULT,
        ]
    )


def write_parquet(path: Path, mark: str, records: Iterable[bytes], *, schema: pa.Schema) -> None:
    """Write the whole output or none of it. `whole_file` describes `mark`."""
    try:
        with whole_file(path, mark) as file, pq.ParquetWriter(file, schema) as writer:
            while rows := [json.loads(record) for record in islice(records, ROWS)]:
                writer.write_table(as_table(rows, schema))
    except OSError as error:
        raise cannot_write(path, error) from error


def as_table(records: Iterable[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Make a table of records. Fields of a record that the schema lacks are left out."""
    return pa.Table.from_pylist([as_row(record, schema) for record in records], schema)


def given_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without its nulls, which stand for absent fields.

    All structs of a column have the same fields, so nulls inside the fields of a request stand for
    absent fields too.
    """
    return {
        name: without_nulls(value) if name in REQUEST else value
        for name, value in row.items()
        if value is not None
    }


def without_nulls(value: Any) -> Any:
    """Remove null fields from all dicts inside a value."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def as_row(row: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """Convert the fields of a record, in place, to the types of the schema."""
    for part in (row, *row.get("completions", ())):
        if part.get("stop_reason") is not None:
            part["stop_reason"] = str(part["stop_reason"])
        for name in ("logprobs", "prompt_logprobs"):
            if name in part:  # in JSON the keys are text; in the map they are token ids
                part[name] = [
                    one and [(int(token), value) for token, value in one.items()]
                    for one in part[name]
                ]
    for field in schema:
        value = row.get(field.name)
        if pa.types.is_string(field.type) and value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            row[field.name] = text.encode(errors="replace").decode()  # replace lone surrogates
    return row
