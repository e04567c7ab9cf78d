"""Jobs in tests: their files, and the command line called in this process or in a forked one."""

import json
import os
import random
import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from nanovllm.apps.jobs.job import Job, run_job
from nanovllm.apps.jobs.worker import Worker
from nanovllm.config import Config

# What a model made by call_helpers.make_folder takes.
SIZES = ["--kvcache-block-size", "16", "--num-kvcache-blocks", "128", "--max-model-len", "256"]
SIZES += ["--max-num-seqs", "8", "--device", "cpu", "--quiet"]


def write_lines(path: Path, lines: list) -> Path:
    """Texts as they are, all else as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def some_lines(count: int, most_tokens: int = 12) -> list[dict]:
    """Prompts of all three kinds and of several lengths, and bad lines among them."""
    r = random.Random(count)
    lines: list[dict] = []
    for i in range(count):
        text = "".join(r.choice("the in ") for _ in range(r.randint(1, 30)))
        kinds = [
            {"prompt": text},
            {"prompt_token_ids": [r.randrange(256) for _ in range(r.randint(1, 30))]},
            {"messages": [{"role": "user", "content": text}]},
        ]
        line = r.choice(kinds) | {"id": i, "max_tokens": r.randint(1, most_tokens)}
        lines.append({"prompt": 7} if i % 23 == 11 else line)
    return lines


def arguments(source: Path, output: Path, model: Path, *more: str) -> list[str]:
    return ["run", str(source), "-o", str(output), "--model", str(model), *SIZES, *more]


def journal_of(output: Path) -> Path:
    return output.with_name(output.name + ".journal")


def kept_lines(output: Path) -> set[int]:
    """The lines with results in a journal that nobody has open."""
    if not journal_of(output).exists():
        return set()
    with closing(sqlite3.connect(journal_of(output))) as db:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")  # else it makes a file, where there is room
        names = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        if "results" not in names:
            return set()
        return {line for (line,) in db.execute("SELECT line FROM results")}


class WatchedWorker(Worker):
    """Says of each result, in a file, that it was computed; `hook` is called after each step."""

    log: int  # descriptor of a file that is appended to
    hook = staticmethod(lambda: None)

    def step(self):
        ended = super().step()
        for request, _ in ended:
            os.write(self.log, f"{request.line}\n".encode())
        self.hook()
        return ended


def watch(monkeypatch_setattr, log: Path, hook=None) -> None:
    """Let jobs of this process use a WatchedWorker."""
    WatchedWorker.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    WatchedWorker.hook = staticmethod(hook or (lambda: None))
    monkeypatch_setattr("nanovllm.apps.jobs.command.Worker", WatchedWorker)


class StubEngine:
    """Serves every request at once, without a model."""

    num_prompt_tokens = num_prefill_tokens = num_decode_tokens = 0

    def __init__(self, at_once: int = 8) -> None:
        self.at_once = at_once
        self.waiting: list = []
        self.more_to_come = True

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting)

    def add(self, requests):
        self.waiting += requests
        return []

    def no_more(self) -> None:
        self.more_to_come = False

    def step(self):
        ended, self.waiting = self.waiting[: self.at_once], self.waiting[self.at_once :]
        return [(request, self.answer(request)) for request in ended]

    @staticmethod
    def answer(request) -> dict:
        said = {"text": f"answer to {request.prompt}", "token_ids": [1, 2, 3]}
        return said | {"finish_reason": "stop", "stop_reason": None, "prompt_token_ids": [5]}

    def made(self):
        """What run_job wants: a function that makes a context of the engine."""
        return lambda: nullcontext(self)


def as_job(source: Path, output: Path, model: Path, **more) -> Job:
    config = Config(str(model), max_num_seqs=8)
    return Job(source, output, config, show_progress=False, **more)


def run_stub(job: Job, engine: StubEngine | None = None, stop=lambda: None) -> str:
    return run_job(job, (engine or StubEngine()).made(), stop)


class Stopped(BaseException):
    pass


def stop_after(job: Job, steps: int) -> None:
    """Let a stub do a part of a job."""
    left = iter(range(steps))

    def stop() -> None:
        if next(left, None) is None:
            raise Stopped

    with pytest.raises(Stopped):
        run_stub(job, stop=stop)
