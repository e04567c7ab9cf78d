"""Kill jobs at random instants until they are done, in a process that has done nothing else: it can
be forked without risk, and a forked child starts a job in a tenth of a second.

    python job_killer.py FOLDER MODEL KILLS        prints what it saw, as JSON
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import jinja2  # noqa: F401  for a child to find it imported
import torch
import transformers.models.auto  # noqa: F401  likewise
from job_helpers import (
    WatchedWorker,
    arguments,
    journal_of,
    kept_lines,
    some_lines,
    write_lines,
)

import nanovllm.apps.jobs.command as command
from nanovllm.__main__ import main as command_line

NUM_LINES = 60


def main(folder: Path, model: Path, num_kills: int) -> None:
    torch.set_num_threads(1)
    r = random.Random(3)
    log = folder / "log"
    command.Worker = WatchedWorker
    source = write_lines(folder / "in.jsonl", some_lines(NUM_LINES, most_tokens=30))
    reference = folder / "reference.jsonl"
    sampling = ("--temperature", "0.8", "--seed", "5")
    WatchedWorker.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    begun = time.perf_counter()
    assert wait_for(forked_main(arguments(source, reference, model, *sampling))) == 0
    whole = time.perf_counter() - begun
    seen = {"kills": 0, "jobs": 0, "wrong": 0, "recomputed": 0, "lost": 0, "torn": 0, "midway": 0}
    while seen["kills"] < num_kills:
        output = folder / f"out-{seen['jobs']}.jsonl"
        argv = arguments(source, output, model, *sampling)
        kept: set[int] = set()
        status = None
        while status != 0:
            log.write_text("")
            child = forked_main(argv)
            if r.random() < 0.9:  # else it may end
                time.sleep(r.uniform(0, whole))
                os.kill(child, signal.SIGKILL)
            status = wait_for(child)
            assert status in (0, -signal.SIGKILL), status
            seen["kills"] += status != 0
            # One that is there is complete.
            seen["torn"] += output.exists() and output.read_bytes() != reference.read_bytes()
            seen["recomputed"] += len(kept & {int(line) for line in log.read_text().split()})
            if not output.exists():
                now = kept_lines(output)
                seen["lost"] += len(kept - now)
                kept = now
                seen["midway"] += 0 < len(kept) < NUM_LINES
        seen["wrong"] += output.read_bytes() != reference.read_bytes()
        seen["jobs"] += 1
        journal_of(output).unlink()
        output.unlink()
    seen["left"] = sorted(path.name for path in folder.iterdir() if "out" in path.name)
    print(json.dumps(seen))


def forked_main(argv: list[str]) -> int:
    """Fork a process that does what the command line does; returns its id."""
    if child := os.fork():
        return child
    status = 99
    try:
        status = command_line(argv)
    finally:
        os._exit(status)


def wait_for(child: int) -> int:
    """A child's exit code; of one that a signal killed, minus its number."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    said = StringIO()
    with redirect_stderr(said), redirect_stdout(sys.stdout):
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
