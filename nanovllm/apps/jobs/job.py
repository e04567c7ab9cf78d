"""One job, from its start or from the point where it was stopped, to its output.

The journal beside the output receives every result as soon as the result exists. When the last line
has its result, the output is written in one piece. So there is never a partial output, and the
journal alone holds the state of a job.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import Any

from nanovllm.apps.jobs.errors import JobError, RefusedError
from nanovllm.apps.jobs.files import JsonLines, Source, write_json_lines
from nanovllm.apps.jobs.formats import PROMPTS, Defaults, Format, NativeFormat, known_fields
from nanovllm.apps.jobs.journal import Journal, Totals, files_of
from nanovllm.apps.jobs.loop import Engine, Progress, compute
from nanovllm.apps.jobs.openai_batch import OpenAIFormat
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.hub import resolve_model_folder
from nanovllm.whole_files import draw_mark

PARQUET = ".parquet"  # files of other names are JSON Lines
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
# Options on which no result depends, such as those for the memory of a machine. They may differ
# when a job is resumed.
FREE = {
    "max_num_batched_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "num_kvcache_blocks",
    "start_timeout",
    "step_timeout",
    "trace",
    "trace_text",
}
SAMPLED_BYTES = 2**20  # at each end of a file of weights, which identify the file


MakeEngine = Callable[[], AbstractContextManager[Engine]]


@dataclass(frozen=True)
class Job:
    """The description of a job.

    trust_request_chat_template: allow lines to bring their own chat templates.
    strict: stop at the first line that fails.
    replicas: number of LLMs, each of which runs max_num_seqs requests at the same time.
    """

    input: Path
    output: Path
    config: Config
    params: SamplingParams = field(default_factory=SamplingParams)
    template_options: dict[str, Any] | None = None
    trust_request_chat_template: bool = False
    keep: tuple[str, ...] = ()
    strict: bool = False
    replicas: int = 1
    show_progress: bool = True

    @property
    def journal(self) -> Path:
        """The path of the journal."""
        return self.output.with_name(self.output.name + ".journal")

    def model_folder(self) -> Path:
        """Find the folder of the model. Raises RefusedError if there is none."""
        try:
            return resolve_model_folder(self.config.model)
        except ValueError as error:
            raise RefusedError(str(error)) from error

    def identity(self, source: Source) -> dict[str, Any]:
        """Return everything on which the results depend, by the names used in error messages."""
        options = {
            name: value
            for name, value in asdict(self.config).items()
            if name != "model" and name not in FREE
        }
        sampling = {name: value for name, value in asdict(self.params).items() if name != "seed"}
        flags = {
            f"--{name.replace('_', '-')}": value for name, value in (options | sampling).items()
        }
        described = {
            "the input": (
                f"{source.num_lines} lines, {source.seen.num_bytes} bytes, {source.seen.digest}"
            ),
            "the model": model_identity(self.model_folder()),
            **flags,
            "--chat-template-kwargs": self.template_options,
            "--keep": self.keep,
        }
        if self.trust_request_chat_template:
            described["--trust-request-chat-template"] = True
        return json.loads(
            json.dumps(described, default=str)
        )  # in the form in which the journal returns it


def model_identity(folder: Path) -> str:
    """Hash the JSON files and templates of a model folder, and both ends of each weights file."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".model", ".txt"):
            content = path.read_bytes()
        elif path.suffix == ".safetensors":
            with open(path, "rb") as file:
                content = file.read(SAMPLED_BYTES)
                file.seek(max(0, path.stat().st_size - SAMPLED_BYTES))
                content += file.read()
        else:
            continue
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + content)
    return digest.hexdigest()


def run_job(job: Job, make_engine: MakeEngine, stop: Callable[[], None]) -> str:
    """Run the job, or resume it. Returns a line of totals.

    Args:
        make_engine: returns a context manager of an Engine; called only if lines are left.
        stop: called often, between two steps; an exception that it raises ends the run.

    Raises:
        RefusedError: the job cannot be started or resumed with these options.
        JobError: the job cannot be completed.
    """
    check_paths(job)
    source = open_source(job)
    is_batch = is_openai_batch(source)
    if is_batch:
        check_batch(job)
    write = output_writer(job, source)
    identity = job.identity(source)
    with closing(Journal(job.journal)) as journal:
        is_left = take_up(job, journal, identity)
        line = journal.first_failed() if is_left else journal.state.get("first_failed")
        if job.strict and line is not None:
            raise JobError(
                f"line {line} failed in an earlier run, and --strict is given: run without "
                "--strict, or start over with another output"
            )
        if not is_left:
            return f"{job.output} is already complete: nothing was left to do"
        seconds, before = 0.0, journal.totals()
        if before.done < source.num_lines:
            with make_engine() as engine:
                begun = perf_counter()
                compute(
                    source.lines(journal.done()),
                    make_format(job, is_batch, journal.state),
                    engine,
                    journal,
                    Progress(job.output.name, source.num_lines, before, job.show_progress),
                    num_running=job.config.max_num_seqs * job.replicas,
                    strict=job.strict,
                    stop=stop,
                )
                seconds = perf_counter() - begun
        totals = journal.totals()
        assert totals.done == source.num_lines, "each line has a result"
        if job.input.exists():  # the input may be removed once all of it has been read
            source.seen.check()
        write(journal.state["mark"], interruptible(journal.records(), stop))
        journal.finish({"finished": True, "first_failed": journal.first_failed()})
    return say_totals(totals, before, seconds)


def check_paths(job: Job) -> None:
    """Raise RefusedError if the job cannot use its files, or would overwrite others."""
    if job.output.is_dir():
        raise RefusedError(f"the output is {job.output}, which is a folder: name a file in it")
    if job.input == Path("-"):
        raise RefusedError("the input is -: name a file, because the input is read more than once")
    if job.output == Path("-"):
        raise RefusedError(
            "the output is -: name a file, because results are not written to stdout"
        )
    if job.output.suffix.lower() in COMPRESSED:
        raise RefusedError(
            f"the output is {job.output}, but a job writes no compressed files: leave out the "
            f"{job.output.suffix}, and compress the file when the job is done"
        )
    if job.output.exists() and job.input.exists() and job.output.samefile(job.input):
        raise RefusedError(f"{job.input} is both the input and the output: choose another output")
    for path in files_of(job.journal):
        if job.input.exists() and path.exists() and path.samefile(job.input):
            raise RefusedError(
                f"the input is {path}, which is the name of this job's journal: rename the input, "
                "or choose another output"
            )
        if path.is_symlink():
            raise RefusedError(
                f"{path} is a symbolic link, but a job writes only to its own files: "
                "remove the link"
            )
    if job.output.exists() and not job.journal.exists():
        raise RefusedError(
            f"{job.output} already exists, and there is no {job.journal.name} beside it to show "
            "that it comes from this job: move it away, or choose another output"
        )


def open_source(job: Job) -> Source:
    """Open the input in the format that its name says."""
    if job.input.suffix == PARQUET:
        return parquet().ParquetRows(job.input, known_fields(job.keep))
    return JsonLines(job.input)


def is_openai_batch(source: Source) -> bool:
    """Return whether the first line that has fields is in OpenAI's batch format."""
    first = next((line.fields for line in source.lines([]) if line.fields), {})
    return "body" in first or "custom_id" in first and not {*PROMPTS} & {*first}


def check_batch(job: Job) -> None:
    """Raise RefusedError for options that OpenAI's batch format does not support."""
    if job.output.suffix == PARQUET:
        raise RefusedError(
            f"the output is {job.output}, but results in OpenAI's batch format are JSON Lines: "
            "name a .jsonl file"
        )
    for name, value in (("prompt-logprobs", job.params.prompt_logprobs), ("keep", job.keep)):
        if value not in (None, ()):
            raise RefusedError(
                f"--{name} is given, but results in OpenAI's batch format have no field for it: "
                "leave it out, or write the input in the library's own format"
            )


def output_writer(job: Job, source: Source) -> Callable[[str, Iterator[bytes]], None]:
    """Return the function that writes the output.

    Its arguments are the mark in the name of the incomplete file, and all records.
    """
    if job.output.suffix != PARQUET:
        return partial(write_json_lines, job.output)
    schema = parquet().output_schema(("id", *job.keep), source)
    return partial(parquet().write_parquet, job.output, schema=schema)


def parquet() -> Any:
    """Import the module for Parquet. Raises RefusedError if pyarrow is not installed."""
    try:
        from nanovllm.apps.jobs import parquet
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"Parquet needs the package {error.name}: pip install 'nanovllm[parquet]'"
        ) from error
    return parquet


def make_format(job: Job, is_batch: bool, state: dict[str, Any]) -> Format:
    """Make the format of the job's input and output."""
    defaults = Defaults(
        job.params, state["seed"], job.template_options, job.trust_request_chat_template
    )
    if is_batch:
        return OpenAIFormat(defaults, job.model_folder().name, state["created"])
    return NativeFormat(defaults, job.keep)


def take_up(job: Job, journal: Journal, identity: dict[str, Any]) -> bool:
    """Start the job, or check that the journal belongs to it. Returns whether work is left.

    Raises RefusedError if the job was started with another input, model or options.
    """
    state = journal.state
    is_finished = bool(state.get("finished")) and job.output.exists()
    if not is_finished and journal.totals().done == 0:
        # The job is new, was stopped before its first result, or has lost its output.
        seed = job.config.seed
        journal.begin(
            {
                "identity": identity,
                "seed": random.SystemRandom().getrandbits(63) if seed is None else seed,
                "created": int(time()),
                "mark": draw_mark(),  # the mark in the name of the incomplete output
                "finished": False,
            }
        )
    elif changes := say_changes(state["identity"], identity):
        remove = f"{job.journal.name} and the output" if is_finished else job.journal.name
        raise RefusedError(
            f"{job.output} was started differently: {'; '.join(changes)}. Run the job as it was "
            f"started; or, to start over, choose another output or remove {remove}"
        )
    elif "mark" not in state:  # the job was started by an earlier version of this library
        journal.begin({"mark": draw_mark()})
    return not is_finished


def say_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List what has changed: options with their values, the input and the model by name."""
    changes = []
    for name in before | now:
        old, new = before.get(name), now.get(name)
        if old != new:
            said = f" was {old} and is {new}" if name.startswith("--") else " has changed"
            changes.append(name + said)
    return changes


def interruptible(records: Iterator[bytes], stop: Callable[[], None]) -> Iterator[bytes]:
    """Yield the records, and call `stop` before each."""
    for record in records:
        stop()
        yield record


def say_totals(totals: Totals, before: Totals, seconds: float) -> str:
    """Write the line of totals."""
    tokens = totals.output_tokens - before.output_tokens
    earlier = f", {before.done:,} of them in earlier runs" if before.done else ""
    return (
        f"{totals.done:,} lines done{earlier}: {totals.failed:,} failed, "
        f"{totals.prompt_tokens:,} prompt tokens, {totals.output_tokens:,} output tokens; "
        f"{seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} output tokens/s"
    )
