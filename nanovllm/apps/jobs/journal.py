"""What a job has finished so far, kept so that it survives the process and the machine.

A SQLite file beside the output, with a row for each line that has its result, in whatever order the
results come. Every write is handed to the system at once, so a process that is killed loses none
of it. Once a second all of it is forced to the disk, so a loss of power costs one second's results
at most. A thread of its own does both, and turns results into JSON: the loop that feeds the device
does not wait for a disk.

SQLite writes to a log beside the file first, in whole pages: a small result takes a dozen kilobytes
there. So the log is emptied into the file not only once a second but also whenever it has grown to
a megabyte. On a disk that gets full, it holds little room that the results themselves do not need.

Knows nothing of what a result says.
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

SYNC_SECONDS = 1.0  # between two times that everything is forced to the disk
MOST_LOGGED = 2**20  # bytes of the log, beyond which it is emptied
MOST_TOGETHER = 2**18  # bytes of records that are committed together: the log holds all of these
MOST_QUEUED = 4096  # results that wait for the writing thread: then the job waits for it
COLUMNS = {  # of each table, as other versions of this library have them, too
    "job": ["key", "value"],
    "results": ["line", "failed", "prompt_tokens", "output_tokens", "record"],
}
SCHEMA = """
CREATE TABLE IF NOT EXISTS job (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    line INTEGER PRIMARY KEY,  -- of the input, from 1
    failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    record BLOB NOT NULL  -- what goes to the output, as JSON in UTF-8
);
-- So that counting does not read the records.
CREATE INDEX IF NOT EXISTS counts ON results (line, failed, prompt_tokens, output_tokens);
"""
MAGIC = b"SQLite format 3\0"
# Characters that some readers take for the end of a line, and halves of characters.
ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


def files_of(journal: Path) -> list[Path]:
    """The journal, and the files that SQLite has beside it meanwhile."""
    return [journal.with_name(journal.name + end) for end in ("", "-wal", "-journal")]


class Result(NamedTuple):
    """What one line of the input has come to."""

    line: int
    failed: bool
    prompt_tokens: int
    output_tokens: int
    record: dict[str, Any]


class Totals(NamedTuple):
    done: int = 0  # lines, the failed ones included
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class Journal:
    """The journal of one job. No other process can open it meanwhile.

    path: the file, which is made if it is not there.
    state: what was kept of the job by `begin` and `finish`; {} for a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._queue: queue.Queue[Result | None] = queue.Queue(MOST_QUEUED)
        # Not Thread.join: Python 3.11 takes a thread for ended if a signal comes meanwhile.
        self._written = Event()
        self._error: BaseException | None = None  # of the writing thread
        try:
            # The locks of the module would not let the main thread read what the writer has
            # written: the two take turns, and never use the connection at the same time.
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=0
            )
        except sqlite3.OperationalError as error:
            raise RefusedError(
                f"cannot make {path}, the job's journal: check that its folder is there and that "
                f"you may write to it ({error})"
            ) from error
        try:
            with self._explaining():
                self.state = self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> dict[str, Any]:
        # Exclusive: from the first access to `close`, and without shared memory, which file systems
        # of several machines do not have.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._check_tables()  # first: all that follows changes the file
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # forced to the disk by `_sync`
        # Else what is dropped is overwritten with zeros, which all go to the log.
        self._db.execute("PRAGMA secure_delete = OFF")
        (page,) = self._db.execute("PRAGMA page_size").fetchone()
        self._db.execute(f"PRAGMA wal_autocheckpoint = {MOST_LOGGED // page}")
        self._sync()  # what a killed process has left in the log may take the room that is needed
        self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
        rows = self._db.execute("SELECT key, value FROM job").fetchall()
        try:
            state = {key: json.loads(value) for key, value in rows}
        except ValueError as error:
            raise self._not_ours(error) from error
        if "identity" not in state and self.totals().done:
            raise self._not_ours("it does not say what its results are of")
        return state

    def _check_tables(self) -> None:
        """Refuse a file of SQLite's that is another program's."""
        names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        tables = {
            name: [column for _, column, *_ in self._db.execute(f'PRAGMA table_info("{quoted}")')]
            for (name,) in self._db.execute(names).fetchall()
            for quoted in [name.replace('"', '""')]
        }
        # A process that was killed early may have left no tables, a finished job no results.
        if tables and not (COLUMNS.items() >= tables.items() and "job" in tables):
            raise self._not_ours(f"it has tables {', '.join(map(repr, sorted(tables)))}")

    def _not_ours(self, reason: object) -> RefusedError:
        return RefusedError(
            f"{self.path} is there, but is no journal of a job ({reason}): choose another output, "
            "or move that file away"
        )

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say what SQLite's errors mean for the job, and what helps."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise self._explained(error) from error

    def _explained(self, error: BaseException) -> JobError:
        if not isinstance(error, sqlite3.DatabaseError) or self._is_of_the_disk(error):
            return JobError(
                f"cannot write {self.path}: {error}. What was written before is kept: put that "
                "right, for example by making room, and run the same command again"
            )
        if "locked" in str(error):
            return RefusedError(
                f"{self.path} is in use: another run writes this output. Wait for it, or end it"
            )
        with open(self.path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return self._not_ours(error)
        return RefusedError(
            f"{self.path}, the job's journal, is damaged, as where a copy was cut off: {error}. "
            f"Put a whole copy in its place; or, to begin anew, remove it, and {self.path.stem} if "
            "that is there, and run the same command again"
        )

    @staticmethod
    def _is_of_the_disk(error: sqlite3.DatabaseError) -> bool:
        """Whether SQLite could not read or write, and says nothing against what is there."""
        return isinstance(error, sqlite3.OperationalError) and "locked" not in str(error)

    def begin(self, state: dict[str, Any]) -> None:
        """Keep what the job is."""
        self._keep(state)

    def finish(self, state: dict[str, Any]) -> None:
        """Keep that the job has ended, and drop the results."""
        self._keep(state)
        try:
            self._db.execute("DROP TABLE results")
            self._db.execute("VACUUM")
        except sqlite3.DatabaseError:
            pass  # the output is there: what is left takes room, and nothing else

    def _keep(self, state: dict[str, Any]) -> None:
        rows = [(key, json.dumps(value)) for key, value in state.items()]
        with self._explaining():
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO job VALUES (?, ?)", rows)
            self._db.execute("COMMIT")
            self._sync()
        self.state |= state

    def done(self) -> list[tuple[int, int]]:
        """The lines that have results, as ranges: their first and last lines, in order."""
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
        (row,) = self._select(
            "SELECT count(*), sum(failed), sum(prompt_tokens), sum(output_tokens) FROM results"
        )
        return Totals(*[value or 0 for value in row])

    def first_failed(self) -> int | None:
        """The first line with an error."""
        rows = self._select("SELECT line FROM results WHERE failed ORDER BY line LIMIT 1")
        return next(rows, (None,))[0]

    def records(self) -> Iterator[bytes]:
        """What goes to the output, in the order of the input."""
        for (record,) in self._select("SELECT record FROM results ORDER BY line"):
            yield record

    def _select(self, query: str) -> Iterator[tuple]:
        with self._explaining():
            yield from self._db.execute(query)

    def __enter__(self) -> "Journal":
        """Begin to write. Until `__exit__`, only `add` may be called."""
        self._written.clear()
        Thread(target=self._write, name="journal", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Write what was added, and force it to the disk. Raises JobError if that fails."""
        self._queue.put(None)
        try:
            self._written.wait()
        except BaseException:  # a second signal: what was added is written all the same
            self._written.wait()
            raise
        if self._error is not None and (not exc or exc[0] is None):
            raise self._explained(self._error) from self._error

    def add(self, result: Result) -> None:
        """Keep a result. Raises JobError if an earlier one could not be written."""
        if self._error is not None:
            raise self._explained(self._error) from self._error
        self._queue.put(result)

    def close(self) -> None:
        self._db.close()

    def _write(self) -> None:
        """What the thread does: write what is there, all of it at once, and wait for more."""
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
            while more and self._queue.get() is not None:  # lest whoever adds waits forever
                pass
        finally:
            self._written.set()

    def _next_results(self, seconds: float | None) -> tuple[list[Result], bool]:
        """All results that wait, and whether more may come. Waits for the first, so long."""
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
        """Force all that was committed to the disk: SQLite does so when it empties its log.

        Raises sqlite3.OperationalError if that fails.
        """
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def to_json(record: dict[str, Any]) -> bytes:
    """A record as one line of JSON, in UTF-8."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    if ESCAPED.search(text):
        text = json.dumps(record, allow_nan=False)
    return text.encode()
