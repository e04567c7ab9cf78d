"""The loop of a job: it turns lines into requests, runs them, and stores their results."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

from nanovllm.apps.jobs.errors import JobError
from nanovllm.apps.jobs.files import Line
from nanovllm.apps.jobs.formats import Format, Request
from nanovllm.apps.jobs.journal import Journal, Result, Totals
from nanovllm.apps.jobs.worker import Outputs, Refused
from nanovllm.frontend.progress import Tokens, show_bar

# Waiting requests, as a multiple of the running ones: enough for the scheduling policy to choose
# from.
AHEAD = 8
MOST_AHEAD = 4096  # waiting requests: each takes 1-2 KB, and all are read before the first step
# Prompt tokens of unfinished requests, all in memory. Beyond this number no request is queued that
# cannot run at once.
MOST_PROMPT_TOKENS = 2**22
# Lines that are read together, so that one call of the tokenizer encodes all of their texts.
CHUNK = 32


class Engine(Protocol):
    """The interface of what serves requests; `worker.Worker` and `pool.Pool` implement it."""

    @property
    def num_unfinished(self) -> int: ...

    num_prompt_tokens: int  # prompt tokens of the unfinished requests
    # Tokens computed so far; a pool counts those of finished requests only.
    num_prefill_tokens: int
    num_decode_tokens: int

    def add(self, requests: list[Request]) -> Refused: ...

    def no_more(self) -> None: ...

    def step(self) -> Outputs: ...


def compute(
    lines: Iterator[Line],
    format: Format,
    engine: Engine,
    journal: Journal,
    progress: "Progress",
    *,
    num_running: int,
    strict: bool,
    stop: Callable[[], None],
) -> None:
    """Compute the result of every line, and store it in the journal.

    The loop keeps enough requests waiting that the scheduling policy can choose well. With overlap,
    the device runs the next step while this loop stores results and reads lines.

    Args:
        num_running: requests that the engine runs at the same time.
        strict: raise JobError for the first line that fails.
        stop: called between steps; an exception that it raises ends the loop.
    """
    with progress, journal:

        def keep(result: Result) -> None:
            if result.failed and strict:
                raise JobError(
                    f"{result.record['error']}\nThe job stops here because --strict is given. "
                    "Without --strict, the same command resumes the job, and the result of this "
                    "line is the error"
                )
            journal.add(result)
            progress.add(result)

        more = True
        while True:
            while more and room_for(engine, num_running):
                stop()
                chunk = list(islice(lines, CHUNK))
                for failed in add_lines(chunk, format, engine):
                    keep(failed)
                if not chunk:
                    engine.no_more()
                    more = False
            stop()
            if not engine.num_unfinished:
                return
            for request, output in engine.step():
                keep(as_result(format, request, output))
            progress.reach(engine.num_prefill_tokens, engine.num_decode_tokens)


def room_for(engine: Engine, num_running: int) -> bool:
    """Return whether another chunk of lines should be read now."""
    most = num_running
    if engine.num_prompt_tokens <= MOST_PROMPT_TOKENS:
        most += num_ahead(num_running)
    return most - engine.num_unfinished >= min(CHUNK, most)


def num_ahead(num_running: int) -> int:
    """Return how many requests should wait beside the running ones."""
    return min(AHEAD * num_running, MOST_AHEAD)


def add_lines(lines: list[Line], format: Format, engine: Engine) -> Iterator[Result]:
    """Queue the requests of the lines. Yields the results of lines that are not valid requests."""
    requests = []
    fields_of = {line.number: line.fields for line in lines}
    problems = []
    for line in lines:
        try:
            if line.problem is not None:
                raise ValueError(line.problem)
            requests.append(format.parse(line.number, line.fields))
        except (ValueError, TypeError, RecursionError) as error:
            problems.append((line.number, str(error)))
    problems += [(request.line, problem) for request, problem in engine.add(requests)]
    for number, problem in sorted(problems):
        yield failed_result(number, format.error(number, fields_of[number], problem))


def failed_result(line: int, record: dict[str, Any]) -> Result:
    """Make the result of a line that failed."""
    return Result(line, failed=True, prompt_tokens=0, output_tokens=0, record=record)


def as_result(format: Format, request: Request, output: dict[str, Any]) -> Result:
    """Make the result of a request from its output."""
    if "error" in output:
        return failed_result(request.line, format.failure(request, output["error"]))
    completions = output.get("completions", [output])
    return Result(
        request.line,
        failed=False,
        prompt_tokens=len(output["prompt_token_ids"]),
        output_tokens=sum([len(one["token_ids"]) for one in completions]),
        record=format.result(request, output),
    )


class Progress:
    """A progress bar of finished lines, with failed lines, computed tokens and their rate."""

    def __init__(self, name: str, num_lines: int, before: Totals, shown: bool) -> None:
        self._num_failed = before.failed
        self._tokens = Tokens()
        self._bar = show_bar(shown, total=num_lines, initial=before.done, desc=name, unit="line")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, result: Result) -> None:
        """Count a finished line."""
        self._num_failed += result.failed
        self._update(1)

    def reach(self, prefill_tokens: int, decode_tokens: int) -> None:
        """Set the numbers of tokens that have been computed so far."""
        self._tokens.reach(prefill_tokens, decode_tokens)
        self._update(0)

    def _update(self, num_lines: int) -> None:
        if self._bar is not None:
            text = f"{self._num_failed} failed, {self._tokens}"
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(num_lines)
