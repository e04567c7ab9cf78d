"""The journal of a job: its results so far, which survive a killed process and a power failure.

The journal is a SQLite file beside the output, with a row for each line that has its result, in the
order in which results arrive. Every write is handed to the operating system at once, so a killed
process loses no result. Once a second all rows are forced to the disk, so a power failure loses the
results of at most one second. A thread does both, and converts results to JSON: the loop that feeds
the device never waits for the disk.

SQLite first writes whole pages to a log beside the file, where a small result takes a dozen
kilobytes. So the log is emptied into the file once a second, and also whenever it has grown to a
megabyte: on a nearly full disk, the log takes little of the space that the results need.

The journal knows nothing about the contents of a record.
"""

import json
import queue
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any, NamedTuple

from nanovllm.apps.jobs.errors import JobError, RefusedError

SYNC_SECONDS = 1.0  # between two times at which all rows are forced to the disk
MOST_LOGGED = 2**20  # bytes at which the log is emptied
MOST_TOGETHER = 2**18  # bytes of records in one transaction, all of which the log holds
MOST_QUEUED = 4096  # results waiting for the writing thread; beyond these, the job waits
COLUMNS = {  # the columns of each table, the same in all versions of this library
    "job": ["key", "value"],
    "results": ["line", "failed", "prompt_tokens", "output_tokens", "record"],
}
SCHEMA = """
CREATE TABLE IF NOT EXISTS job (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    line INTEGER PRIMARY KEY,  -- number of the line in the input, from 1
    failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    record BLOB NOT NULL  -- the line of the output, as JSON in UTF-8
);
-- With this index, counting does not read the records.
CREATE INDEX IF NOT EXISTS counts ON results (line, failed, prompt_tokens, output_tokens);
"""
MAGIC = b"SQLite format 3\0"
# Characters that some readers take for the end of a line, and lone surrogates.
ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


def files_of(journal: Path) -> list[Path]:
    """List the journal and the files that SQLite may keep beside it."""
    return [journal.with_name(journal.name + end) for end in ("", "-wal", "-journal")]


class Result(NamedTuple):
    """The result of one line of the input."""

    line: int
    failed: bool
    prompt_tokens: int
    output_tokens: int
    record: dict[str, Any]


class Totals(NamedTuple):
    """Counts over all results so far."""

    done: int = 0  # lines, including the failed ones
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class Journal:
    """The journal of one job, which one process at a time can open.

    path: the file; it is created if it does not exist.
    state: the description of the job that `begin` and `finish` stored; {} in a new journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._queue: queue.Queue[Result | None] = queue.Queue(MOST_QUEUED)
        # Thread.join will not do: Python 3.11 takes a thread for ended if a signal interrupts it.
        self._written = Event()
        self._error: BaseException | None = None  # the error of the writing thread
        try:
            # check_same_thread would not let both threads use the connection. The main thread and
            # the writing thread take turns, and never use the connection at the same time.
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=0
            )
        except sqlite3.OperationalError as error:
            raise RefusedError(
                f"cannot create {path}, the journal of the job: check that the folder exists and "
                f"that you may write to it ({error})"
            ) from error
        try:
            with self._explaining():
                self.state = self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> dict[str, Any]:
        # The lock is held from the first access until `close`, and needs no shared memory, which
        # network file systems lack.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._check_tables()  # before anything below changes the file
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # `_sync` forces rows to the disk
        # Otherwise SQLite overwrites deleted rows with zeros, which all go through the log.
        self._db.execute("PRAGMA secure_delete = OFF")
        (page,) = self._db.execute("PRAGMA page_size").fetchone()
        self._db.execute(f"PRAGMA wal_autocheckpoint = {MOST_LOGGED // page}")
        self._sync()  # the log of a killed process may take disk space that is needed now
        self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
        rows = self._db.execute("SELECT key, value FROM job").fetchall()
        try:
            state = {key: json.loads(value) for key, value in rows}
        except ValueError as error:
            raise self._not_ours(error) from error
        if "identity" not in state and self.totals().done:
            raise self._not_ours("it does not say which job its results belong to")
        return state

    def _check_tables(self) -> None:
        """Raise RefusedError if the SQLite file belongs to another program."""
        names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        tables = {
            name: [column for _, column, *_ in self._db.execute(f'PRAGMA table_info("{quoted}")')]
            for (name,) in self._db.execute(names).fetchall()
            for quoted in [name.replace('"', '""')]
        }
        # A process that was killed early may have left no tables; a finished job has no results.
        if tables and not (COLUMNS.items() >= tables.items() and "job" in tables):
            raise self._not_ours(f"it has tables {', '.join(map(repr, sorted(tables)))}")

    def _not_ours(self, reason: object) -> RefusedError:
        return RefusedError(
            f"{self.path} exists, but is not the journal of a job ({reason}): choose another "
            "output, or move the file away"
        )

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn SQLite's errors into JobErrors that name a remedy."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise self._explained(error) from error

    def _explained(self, error: BaseException) -> JobError:
        if not isinstance(error, sqlite3.DatabaseError) or self._is_of_the_disk(error):
            return JobError(
                f"cannot write {self.path}: {error}. All earlier results are kept: remove the "
                "cause, for example by freeing disk space, and run the same command again"
            )
        if "locked" in str(error):
            return RefusedError(
                f"{self.path} is in use: another run writes this output. Wait for that run, or "
                "stop it"
            )
        with open(self.path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return self._not_ours(error)
        return RefusedError(
            f"{self.path}, the journal of the job, is damaged; it may be an incomplete copy: "
            f"{error}. Restore a complete copy; or, to start over, remove the journal, and "
            f"{self.path.stem} if it exists, and run the same command again"
        )

    @staticmethod
    def _is_of_the_disk(error: sqlite3.DatabaseError) -> bool:
        """Return whether the file could not be read or written; its content may be sound."""
        return isinstance(error, sqlite3.OperationalError) and "locked" not in str(error)

    def begin(self, state: dict[str, Any]) -> None:
        """Store the description of the job."""
        self._keep(state)

    def finish(self, state: dict[str, Any]) -> None:
        """Store that the job has ended, and delete the results."""
        self._keep(state)
        try:
            self._db.execute("DROP TABLE results")
            self._db.execute("VACUUM")
        except sqlite3.DatabaseError:
            pass  # the output is complete: results that stay here only take disk space

    def _keep(self, state: dict[str, Any]) -> None:
        rows = [(key, json.dumps(value)) for key, value in state.items()]
        with self._explaining():
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO job VALUES (?, ?)", rows)
            self._db.execute("COMMIT")
            self._sync()
        self.state |= state

    def done(self) -> list[tuple[int, int]]:
        """Return the lines that have results, as ranges (first, last) in ascending order."""
        ranges: list[tuple[int, int]] = []
        first = last = 0
        for (line,) in self._select("SELECT line FROM results ORDER BY line"):
            if line != last + 1 or not first:
                if first:
                    ranges.append((first, last))
                first = line
            last = line
        return [*ranges, (first, last)] if first else []

    def totals(self) -> Totals:
        """Count lines and tokens of all results."""
        (row,) = self._select(
            "SELECT count(*), sum(failed), sum(prompt_tokens), sum(output_tokens) FROM results"
        )
        return Totals(*[value or 0 for value in row])

    def first_failed(self) -> int | None:
        """Return the first line that failed, or None."""
        rows = self._select("SELECT line FROM results WHERE failed ORDER BY line LIMIT 1")
        return next(rows, (None,))[0]

    def records(self) -> Iterator[bytes]:
        """Yield the records of all results, in the order of the input."""
        for (record,) in self._select("SELECT record FROM results ORDER BY line"):
            yield record

    def _select(self, query: str) -> Iterator[tuple]:
        with self._explaining():
            yield from self._db.execute(query)

    def __enter__(self) -> "Journal":
        """Start the writing thread. Until `__exit__`, only `add` may be called."""
        self._written.clear()
        Thread(target=self._write, name="journal", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Write all added results, and force them to the disk. Raises JobError if that fails."""
        self._queue.put(None)
        try:
            self._written.wait()
        except BaseException:  # a second signal does not lose the results that were added
            self._written.wait()
            raise
        if self._error is not None and (not exc or exc[0] is None):
            raise self._explained(self._error) from self._error

    def add(self, result: Result) -> None:
        """Add a result. Raises JobError if an earlier result could not be written."""
        if self._error is not None:
            raise self._explained(self._error) from self._error
        self._queue.put(result)

    def close(self) -> None:
        self._db.close()

    def _write(self) -> None:
        """Write all waiting results together, and wait for more. Runs in the writing thread."""
        try:
            synced, dirty, more = monotonic(), False, True
            while more:
                due = max(0.0, synced + SYNC_SECONDS - monotonic())
                results, more = self._next_results(due if dirty else None)
                if results:
                    self._insert(results)
                    dirty = True
                if dirty and (not more or monotonic() >= synced + SYNC_SECONDS):
                    self._sync()
                    synced, dirty = monotonic(), False
        except BaseException as error:
            self._error = error
            while more and self._queue.get() is not None:  # so that `add` never blocks forever
                pass
        finally:
            self._written.set()

    def _next_results(self, seconds: float | None) -> tuple[list[Result], bool]:
        """Take all waiting results. Waits for the first one, at most `seconds`.

        Returns the results, and whether more may come.
        """
        results = []
        try:
            result = self._queue.get(timeout=seconds)
            while result is not None:
                results.append(result)
                result = self._queue.get_nowait()
        except queue.Empty:
            return results, True
        return results, False

    def _insert(self, results: list[Result]) -> None:
        rows, size = [], 0
        for result in results:
            rows.append((*result[:-1], record := to_json(result.record)))
            size += len(record)
            if size > MOST_TOGETHER:
                self._commit(rows)
                rows, size = [], 0
        self._commit(rows)

    def _commit(self, rows: list[tuple]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT INTO results VALUES (?, ?, ?, ?, ?)", rows)
        self._db.execute("COMMIT")

    def _sync(self) -> None:
        """Force all committed rows to the disk, which SQLite does when it empties its log.

        Raises sqlite3.OperationalError if that fails.
        """
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def to_json(record: dict[str, Any]) -> bytes:
    """Encode a record as one line of JSON in UTF-8."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    if ESCAPED.search(text):
        text = json.dumps(record, allow_nan=False)
    return text.encode()
