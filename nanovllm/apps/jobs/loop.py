"""The loop of a job: lines to requests, requests to an engine, results to the journal."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

from nanovllm.apps.jobs.errors import JobError
from nanovllm.apps.jobs.files import Line
from nanovllm.apps.jobs.formats import Format, Request
from nanovllm.apps.jobs.journal import Journal, Result, Totals
from nanovllm.apps.jobs.worker import Outputs, Refused
from nanovllm.frontend.progress import Tokens, show_bar

# Requests that wait, as a multiple of those that can run: enough to choose from.
AHEAD = 8
MOST_AHEAD = 4096  # of these: each takes a kilobyte or two, and all are read before the first step
# Tokens of their prompts, beyond which no more are queued than can run: they lie in memory.
MOST_PROMPT_TOKENS = 2**22
# Lines that are read at once, so that their texts go to the tokenizer together.
CHUNK = 32


class Engine(Protocol):
    """What serves requests, as `worker.Worker` does."""

    @property
    def num_unfinished(self) -> int: ...

    num_prompt_tokens: int  # of the unfinished
    # Computed so far, as far as is known.
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
    """Give each of the lines its result in the journal.

    `num_running`: requests that the engine runs at the same time. `strict`: raise JobError for a
    line that cannot be done. `stop`: called between steps; what it raises ends the loop.

    The engine is kept full: as many requests are queued as help it to choose well. With overlap,
    the device works on the next step while results are taken and lines are read here.
    """
    with progress, journal:

        def keep(result: Result) -> None:
            if result.failed and strict:
                raise JobError(
                    f"{result.record['error']}\nThe job is --strict, so it stops here. Without "
                    "--strict, the same command goes on and leaves an error in this line's place"
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
    """Whether another chunk of lines should be read now."""
    most = num_running
    if engine.num_prompt_tokens <= MOST_PROMPT_TOKENS:
        most += num_ahead(num_running)
    return most - engine.num_unfinished >= min(CHUNK, most)


def num_ahead(num_running: int) -> int:
    """How many requests wait beside those that run."""
    return min(AHEAD * num_running, MOST_AHEAD)


def add_lines(lines: list[Line], format: Format, engine: Engine) -> Iterator[Result]:
    """Queue what the lines ask for. Yields the results of those that cannot be done."""
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
        yield Result(number, True, 0, 0, format.error(number, fields_of[number], problem))


def as_result(format: Format, request: Request, output: dict[str, Any]) -> Result:
    if "error" in output:
        return Result(request.line, True, 0, 0, format.failure(request, output["error"]))
    completions = output.get("completions", [output])
    return Result(
        request.line,
        failed=False,
        prompt_tokens=len(output["prompt_token_ids"]),
        output_tokens=sum([len(one["token_ids"]) for one in completions]),
        record=format.result(request, output),
    )


class Progress:
    """A bar of lines that are done, with those that failed, the tokens that were computed, and how
    many a second lately.
    """

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
        self._num_failed += result.failed
        self._update(1)

    def reach(self, prefill_tokens: int, decode_tokens: int) -> None:
        """Take how many tokens were computed so far."""
        self._tokens.reach(prefill_tokens, decode_tokens)
        self._update(0)

    def _update(self, num_lines: int) -> None:
        if self._bar is not None:
            said = f"{self._num_failed} failed, {self._tokens}"
            self._bar.set_postfix_str(said, refresh=False)
            self._bar.update(num_lines)
