"""A job's input and output as Parquet, row group by row group. Owns pyarrow, an extra."""

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

ROWS = 1024  # that are in memory at once
REQUEST = {*known_fields(())} - {"id"}
LOGPROBS = pa.list_(pa.map_(pa.int32(), pa.float32()))
COMPLETION = [
    ("text", pa.string()),
    ("token_ids", pa.list_(pa.int32())),
    ("finish_reason", pa.string()),
    ("stop_reason", pa.string()),  # a token id as text
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
    """A Parquet file whose columns are the fields of a line; null is a field that is not there."""

    def __init__(self, path: Path, known: Collection[str]) -> None:
        """`known`: the columns that there may be."""
        self.path = path
        self.seen = SeenFile(path)
        try:
            self._file = pq.ParquetFile(self.seen.open())
        except pa.ArrowException as error:
            raise RefusedError(f"{path} is no Parquet file: {error}") from error
        self.num_lines = self._file.metadata.num_rows
        self.schema = self._file.schema_arrow
        for name in self.schema.names:
            if name not in known:
                raise RefusedError(
                    f"{path} has a column {name!r}, which is no field of a request: leave it out, "
                    f"or let it be copied to the output by --keep {name}"
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
    """The columns of an output. A field that is repeated has the type that it has in a Parquet
    input; of another input, it is text, or JSON in text.
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
    """Write all of the output, or nothing; see `whole_file` for `mark`."""
    try:
        with whole_file(path, mark) as file, pq.ParquetWriter(file, schema) as writer:
            while rows := [json.loads(record) for record in islice(records, ROWS)]:
                writer.write_table(as_table(rows, schema))
    except OSError as error:
        raise cannot_write(path, error) from error


def as_table(records: Iterable[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Records of results as rows. What a record has and the schema has not is left out."""
    return pa.Table.from_pylist([as_row(record, schema) for record in records], schema)


def given_fields(row: dict[str, Any]) -> dict[str, Any]:
    """A row without its nulls, which are fields that are not there. All structs of a column have
    the same fields, so it is the same with those inside what a request says.
    """
    return {
        name: without_nulls(value) if name in REQUEST else value
        for name, value in row.items()
        if value is not None
    }


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def as_row(row: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    for part in (row, *row.get("completions", ())):
        if part.get("stop_reason") is not None:
            part["stop_reason"] = str(part["stop_reason"])
        for name in ("logprobs", "prompt_logprobs"):
            if name in part:  # JSON's names are text, a map's keys are token ids
                part[name] = [
                    one and [(int(token), value) for token, value in one.items()]
                    for one in part[name]
                ]
    for field in schema:
        value = row.get(field.name)
        if pa.types.is_string(field.type) and value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            row[field.name] = text.encode(errors="replace").decode()  # without halves of characters
    return row
