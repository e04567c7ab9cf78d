"""The command line of a job: flags, signals, messages and exit codes."""

import argparse
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from nanovllm.apps.jobs.errors import JobError, RefusedError
from nanovllm.apps.jobs.formats import RESULT
from nanovllm.apps.jobs.job import Job, run_job
from nanovllm.apps.jobs.loop import Engine, num_ahead
from nanovllm.apps.jobs.options import add_flags, given_flags, json_object
from nanovllm.apps.jobs.worker import AroundEncode, Worker
from nanovllm.config import Config
from nanovllm.features.policies.rolling import RollingPolicy
from nanovllm.llm import LLM
from nanovllm.options import options_of
from nanovllm.sampling_params import SamplingParams

INPUT_HELP = "file of requests: JSON Lines, or Parquet if its name ends in .parquet"
OUTPUT_HELP = "file of results: JSON Lines, or Parquet if its name ends in .parquet"
TRUST_CHAT_TEMPLATE = (
    "allow lines to bring their own chat templates in chat_template_kwargs. A chat template is a "
    "program: use this flag only if you trust the author of INPUT"
)
FAILED, REFUSED = 1, 2  # exit codes
DESCRIPTION = """\
Run a batch job. Each line of INPUT is a request. OUTPUT gets one result per line, in the order of
INPUT.

The job can be stopped at any time, even by kill -9 or a power failure. To resume it, run the same
command again: only the requests that were in progress are computed again, and after a power failure
those of the last second. While the job runs, its results are kept in OUTPUT.journal. When all lines
are done, OUTPUT is written in one piece, and the journal keeps only a description of the job.

A line of INPUT is a JSON object with exactly one of the fields "prompt" (text), "prompt_token_ids"
and "messages" (a conversation). A line may also have an "id", which is copied to its result,
"chat_template_kwargs", and any sampling parameter. The flags below set the sampling parameters that
a line leaves out. INPUT may instead be in OpenAI's batch format, in which a line has custom_id,
method, url and body; OUTPUT is then in that format too. An invalid line, such as an empty one, gets
a result that says what is wrong with it. In a Parquet file, each row is a line.
"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command `run` with all its flags."""
    parser = commands.add_parser(
        "run",
        help="run a batch job: a file of requests in, a file of results out",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s INPUT -o OUTPUT --model MODEL [options]",
        allow_abbrev=False,
    )
    parser.set_defaults(function=run)
    parser.add_argument("input", metavar="INPUT", type=Path, help=INPUT_HELP)
    parser.add_argument(
        "-o", "--output", metavar="OUTPUT", type=Path, required=True, help=OUTPUT_HELP
    )
    model = options_of(Config)["model"].help.replace("`", "")
    parser.add_argument("--model", required=True, help=model)
    parser.add_argument("--strict", action="store_true", help="stop at the first line that fails")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="FIELD",
        help="allow this additional field in lines, and copy it to the results; "
        "repeat the flag for several fields",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="arguments for the chat template, such as '{\"enable_thinking\": false}'",
    )
    parser.add_argument(
        "--trust-request-chat-template", action="store_true", help=TRUST_CHAT_TEMPLATE
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="number of LLMs that share the lines, each with its own GPUs; needs Ray (default: 1)",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of the Ray cluster on which the replicas run, or auto; without it, "
        "--replicas starts Ray on this machine",
    )
    parser.add_argument("--quiet", action="store_true", help="do not show a progress bar")
    llm = parser.add_argument_group("options of the LLM")
    add_flags(llm, Config, leave_out={"model"})
    sampling = parser.add_argument_group(
        "sampling",
        "Sampling parameters of the lines that do not set them. A line without a seed gets one "
        "that is derived from --seed and the number of the line.",
    )
    # --seed is among the options of the LLM, and no flag can give a function.
    add_flags(sampling, SamplingParams, leave_out={"seed", "logits_processors"})


def run(args: argparse.Namespace) -> int:
    """Run the job that the flags describe, and return the exit code."""
    try:
        with interrupts() as stop:
            job = make_job(args)
            print(run_job(job, lambda: make_engine(job, args.address, stop.at_once), stop))
    except Interrupted as interrupt:
        say(f"{interrupt}: all finished results are kept. Run the same command again to resume")
        return 128 + interrupt.number
    except RefusedError as error:
        say(str(error))
        return REFUSED
    except (JobError, OSError) as error:
        say(str(error))
        return FAILED
    except Exception as error:  # an error of the engine: its traceback is needed to find the cause
        traceback.print_exc()
        say(
            f"{type(error).__name__}: {error}. All finished results are kept: run the same command "
            "again to resume"
        )
        return FAILED
    return 0


def make_job(args: argparse.Namespace) -> Job:
    """Make the job that the flags describe. Raises RefusedError for a wrong value."""
    with refusing():
        config = Config.from_options(args.model, given_flags(args, Config))
        params = SamplingParams(**given_flags(args, SamplingParams))
    if args.replicas < 1:
        raise RefusedError(f"--replicas is {args.replicas}: use 1 or more")
    for name in args.keep:
        if name in RESULT:
            raise RefusedError(
                f"--keep is {name}, which is a field of every result: rename the field"
            )
    return Job(
        input=args.input,
        output=args.output,
        config=config,
        params=params,
        template_options=args.chat_template_kwargs,
        trust_request_chat_template=args.trust_request_chat_template,
        keep=tuple([name for name in dict.fromkeys(args.keep) if name != "id"]),  # always kept
        strict=args.strict,
        replicas=args.replicas,
        show_progress=not args.quiet,
    )


def make_engine(
    job: Job, address: str | None, around_encode: AroundEncode = nullcontext
) -> AbstractContextManager[Engine]:
    """Return a context manager of the engine: one LLM in this process, or replicas on Ray."""
    if job.replicas == 1 and address is None:
        return local_engine(job.config, around_encode)
    from nanovllm.apps.ray_replicas import replicas_engine

    return replicas_engine(job.config, job.replicas, address)


@contextmanager
def local_engine(config: Config, around_encode: AroundEncode = nullcontext) -> Iterator[Worker]:
    """Yield an engine with one LLM in this process, and close the LLM afterwards."""
    with refusing():
        llm, policy = make_llm(config)
    with llm:
        yield Worker(llm, policy, around_encode)


def make_llm(config: Config) -> tuple[LLM, Any]:
    """Make an LLM for requests that arrive while others run.

    Returns the LLM and, if the LLM uses one, the rolling policy, which must be told when the last
    request has been added.
    """
    options: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(Config)}
    policy = None
    if config.scheduling_policy == "throughput":
        policy = RollingPolicy(num_ahead(config.max_num_seqs))
        options["scheduling_policy"] = policy
    return LLM(options.pop("model"), **options), policy


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a ValueError or TypeError raised inside the block into a RefusedError."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise RefusedError(str(error)) from error


class Interrupted(BaseException):
    """An exception for a signal that ends the job. `except Exception` does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Stop:
    """A callable that ends the job if a signal has arrived. Call it between two steps.

    Before the first call, a signal ends the job at once. After the first call, a signal takes
    effect at the next call; a second signal ends the job at once.
    """

    def __init__(self) -> None:
        self._is_patient = False
        self._asked: list[int] = []

    def __call__(self) -> None:
        self._is_patient = True
        if self._asked:
            raise Interrupted(self._asked[0])

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal end the job at once inside the block, for long work that may be lost."""
        self()
        self._is_patient = False
        try:
            yield
        finally:
            self._is_patient = True

    def handle(self, number: int, _: object) -> None:
        """Handle a signal: end the job now, or remember the signal for the next call."""
        self._asked.append(number)
        if len(self._asked) > 1 or not self._is_patient:
            raise Interrupted(number)


@contextmanager
def interrupts() -> Iterator[Stop]:
    """Yield a Stop that handles Ctrl-C and SIGTERM; restore the previous handlers afterwards."""
    stop = Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop.handle) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def say(message: str) -> None:
    """Print a message to stderr."""
    print(f"nanovllm run: {message}", file=sys.stderr)
