"""The command line of a job: its flags, its signals, its messages and its exit codes."""

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

FILES = "JSON Lines; or Parquet, if it is called .parquet"
TRUST_CHAT_TEMPLATE = (
    "let lines bring chat templates of their own, in chat_template_kwargs. These are programs: "
    "give this flag only if you trust who wrote INPUT"
)
FAILED, REFUSED = 1, 2  # exit codes
DESCRIPTION = """\
Do a job: each line of INPUT is a request, and each line of OUTPUT its result, in the same order.

Stop it as you like, by Ctrl-C, kill -9 or the loss of power, and run the same command again: it
goes on, and computes nothing twice but what it was just at. Until it is done, all results are in
OUTPUT.journal; then OUTPUT appears, complete, and the journal keeps only what the job was.

A line of INPUT is a JSON object with one of "prompt" (text), "prompt_token_ids" and "messages" (a
conversation). It may have an "id", which is copied, "chat_template_kwargs", and any sampling
field; the flags below say what holds for lines that do not. Or it is a line of OpenAI's batch
format, with custom_id, method, url and body; then OUTPUT is in that format too. A line that cannot
be done, such as an empty one, gets a result that says why. Of a Parquet file, each row is a line.
"""


def add_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "run",
        help="do a job: a file of requests in, a file of results out",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(function=run)
    parser.add_argument("input", metavar="INPUT", type=Path, help=FILES)
    parser.add_argument("-o", "--output", metavar="OUTPUT", type=Path, required=True, help=FILES)
    model = options_of(Config)["model"].help.replace("`", "")
    parser.add_argument("--model", required=True, help=model)
    parser.add_argument("--strict", action="store_true", help="stop at a line that cannot be done")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="FIELD",
        help="let lines have this field too, and copy it to the result; repeat it for several",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="for the chat template, such as '{\"enable_thinking\": false}'",
    )
    parser.add_argument(
        "--trust-request-chat-template", action="store_true", help=TRUST_CHAT_TEMPLATE
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="share the lines out to so many LLMs, each on GPUs of its own; needs Ray",
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of the Ray cluster that they run on, or auto"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    llm = parser.add_argument_group("options of the LLM")
    add_flags(llm, Config, leave_out={"model"})
    sampling = parser.add_argument_group(
        "sampling",
        "where a line does not say it. A line without a seed draws by one that is made of --seed "
        "and the line's number.",
    )
    # No flag can say a function.
    add_flags(sampling, SamplingParams, leave_out={"seed", "logits_processors"})


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    try:
        with interrupts() as stop:
            job = make_job(args)
            print(run_job(job, lambda: make_engine(job, args.address, stop.at_once), stop))
    except Interrupted as interrupt:
        say(f"{interrupt}: what is done is kept. The same command goes on from there.")
        return 128 + interrupt.number
    except RefusedError as error:
        say(str(error))
        return REFUSED
    except (JobError, OSError) as error:
        say(str(error))
        return FAILED
    except Exception as error:  # of the engine: whoever puts it right needs all of it
        traceback.print_exc()
        say(f"{type(error).__name__}: {error}. What is done is kept: the same command goes on.")
        return FAILED
    return 0


def make_job(args: argparse.Namespace) -> Job:
    with refusing():
        config = Config.from_options(args.model, given_flags(args, Config))
        params = SamplingParams(**given_flags(args, SamplingParams))
    if args.replicas < 1:
        raise RefusedError(f"--replicas is {args.replicas}: use 1 or more")
    for name in args.keep:
        if name in RESULT:
            raise RefusedError(f"--keep is {name}, which is a field of the results: rename it")
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
    if job.replicas == 1 and address is None:
        return local_engine(job.config, around_encode)
    from nanovllm.apps.ray_replicas import replicas_engine

    return replicas_engine(job.config, job.replicas, address)


@contextmanager
def local_engine(config: Config, around_encode: AroundEncode = nullcontext) -> Iterator[Worker]:
    with refusing():
        llm, policy = make_llm(config)
    with llm:
        yield Worker(llm, policy, around_encode)


def make_llm(config: Config) -> tuple[LLM, Any]:
    """An LLM for requests that keep coming; and its policy, if that is to be told of the last."""
    options: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(Config)}
    policy = None
    if config.scheduling_policy == "throughput":
        policy = RollingPolicy(num_ahead(config.max_num_seqs))
        options["scheduling_policy"] = policy
    return LLM(options.pop("model"), **options), policy


@contextmanager
def refusing() -> Iterator[None]:
    """What the library refuses inside, the job refuses in the same words."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise RefusedError(str(error)) from error


class Interrupted(BaseException):
    """A signal asks the job to end. No `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Stop:
    """What ends a job when a signal has asked for it: a function to call between two steps, when
    nothing is half done.

    Until its first call a signal ends the job at once. After that the next call does, or a second
    signal.
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
        """Let a signal end the job inside, too: for work that may be lost, and may take long."""
        self()
        self._is_patient = False
        try:
            yield
        finally:
            self._is_patient = True

    def handle(self, number: int, _: object) -> None:
        """Take a signal."""
        self._asked.append(number)
        if len(self._asked) > 1 or not self._is_patient:
            raise Interrupted(number)


@contextmanager
def interrupts() -> Iterator[Stop]:
    """Let Ctrl-C and SIGTERM end what runs inside."""
    stop = Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop.handle) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def say(message: str) -> None:
    print(f"nanovllm run: {message}", file=sys.stderr)
