"""The recorded run of chapters 9, 10 and 12, which need a GPU.

`python -m nanovllm.apps.course.recording FOLDER` measures on a GPU, and writes figures.json and two
traces into FOLDER. The folder `recorded_h200` beside this file holds what an H200 wrote. The models
have the shapes of Qwen3-0.6B and Qwen3-8B, and random weights.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from nanovllm import LLM, SamplingParams
from nanovllm.apps.bench.engines import device_name, versions
from nanovllm.apps.bench.roofline import ceilings
from nanovllm.apps.bench.shapes import model_folder
from nanovllm.features.trace.events import Committed, Event, Launched
from nanovllm.features.trace.files import make_jsonl
from nanovllm.features.trace.recorder import Recorder

SMALL, LARGE = "qwen3-0.6b", "qwen3-8b"
# The ways to compute a step: name -> options of LLM.
FORMS: dict[str, dict[str, Any]] = {
    "plain": dict(kernels="plain"),
    "fused": dict(enforce_eager=True),
    "graph": dict(),
}
SHOWN_US = 400.0  # how much of a step the lanes of kernels show
NO_KERNELS = "Memcpy", "Memset", "Activity", "Context", "Event", "Stream"
NAME = 60  # characters of a kernel's name that are kept


class Measured:
    """An LLM whose events are recorded, and a source of prompts that no cache knows."""

    def __init__(self, llm: LLM) -> None:
        assert llm.engine is not None
        self.llm, self.engine = llm, llm.engine
        (self.recorder,) = [one for one in self.engine.listeners if isinstance(one, Recorder)]
        self.random = Random(0)

    def add(self, num_seqs: int, prompt: int, output: int) -> None:
        """Queue requests of `prompt` tokens in and `output` out."""
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        for _ in range(num_seqs):
            tokens = [self.random.randrange(self.engine.vocab_size) for _ in range(prompt)]
            self.llm.add_request(tokens, params)

    def finish(self) -> list[Event]:
        """Run until all requests have ended. Returns the events since the trace began."""
        while self.llm.has_unfinished():
            self.llm.step()
        return self.recorder.events.copy()

    def run(self, num_seqs: int, prompt: int, output: int) -> list[Event]:
        """Run requests as a trace of their own, after a short warmup. Returns the events."""
        self.add(num_seqs, prompt, 8)
        self.finish()
        self.restart()
        self.add(num_seqs, prompt, output)
        return self.finish()

    def restart(self, **facts: Any) -> None:
        """Forget all cached blocks, and begin a new trace. `facts` replace fields of its Run."""
        self.llm.reset_prefix_cache()
        self.recorder.restart(**facts)


@contextmanager
def measured(model: str, folder: Path, **options: Any):
    """Open an LLM of a known shape with random weights."""
    name, is_random = model_folder(model)
    options = {"max_model_len": 4096, "max_num_seqs": 256} | options
    path = folder / "trace.jsonl"
    with LLM(name, load_format="dummy" if is_random else "auto", trace=str(path), **options) as llm:
        yield Measured(llm)
    path.unlink(missing_ok=True)
    del llm
    gc.collect()


def decode_steps(events: list[Event], num_seqs: int) -> list[tuple[Launched, Committed, float]]:
    """List the steps that only decode all of `num_seqs` sequences, less the first and last few.

    Returns (launched, committed, seconds since the commit before) of each.
    """
    commits = {event.step: event for event in events if isinstance(event, Committed)}
    steps = [event for event in events if isinstance(event, Launched)]
    steps = [one for one in steps if one.decode_tokens == num_seqs and not one.prefills]
    steps = [one for one in steps if one.step in commits and one.step - 1 in commits][2:-2]
    return [
        (one, commits[one.step], commits[one.step].time - commits[one.step - 1].time)
        for one in steps
    ]


def host_figures(events: list[Event], num_seqs: int) -> dict[str, float]:
    """Return the medians of a decode step, in microseconds."""
    steps = decode_steps(events, num_seqs)
    found = {
        "step_us": [seconds for _, _, seconds in steps],
        "schedule_us": [launched.schedule_seconds for launched, _, _ in steps],
        "launch_us": [launched.launch_seconds for launched, _, _ in steps],
        "wait_us": [committed.wait_seconds for _, committed, _ in steps],
        "commit_us": [committed.commit_seconds for _, committed, _ in steps],
    }
    return {name: round(1e6 * median(values), 1) for name, values in found.items()}


def profile_steps(one: Measured, num_seqs: int, num_steps: int) -> tuple[list, list[Event], float]:
    """Profile decode steps of `num_seqs` sequences.

    Returns the kernels as (begin, microseconds, name) on the trace's clock, in microseconds, the
    trace's events, and the time at which the profiled steps begin.
    """
    one.restart()
    one.add(num_seqs, 128, num_steps + 24)
    for _ in range(12):
        one.llm.step()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiler:
        with record_function("mark"):
            mark = one.recorder.now()
        for _ in range(num_steps):
            one.llm.step()
        if on_gpu:
            torch.cuda.synchronize()
    events = one.finish()
    found = profiler.events()
    origin = next(event.time_range.start for event in found if event.name == "mark")
    kernels = [
        (1e6 * mark + event.time_range.start - origin, event.time_range.elapsed_us(), event.name)
        for event in found
        if event.device_type == DeviceType.CUDA and event.name != "mark"
    ]
    kernels = [kernel for kernel in kernels if not kernel[2].startswith(NO_KERNELS)]
    return sorted(kernels), events, mark


def one_sequence(one: Measured, folder: Path, name: str) -> dict[str, Any]:
    """Measure the decode of one sequence, and profile its kernels: chapter 10."""
    few = name == "plain"
    found: dict[str, Any] = host_figures(one.run(1, 128, 24 if few else 256), 1)
    if name == "graph":
        (folder / "10.jsonl").write_text(make_jsonl(one.run(1, 128, 24)))
    num_steps = 4 if few else 8
    kernels, _, _ = profile_steps(one, 1, num_steps)
    per_step = round(len(kernels) / num_steps)
    found["kernels"] = len(kernels) / num_steps
    if not kernels:
        return found
    first = per_step * (num_steps // 2)
    step = kernels[first : first + per_step]
    found["device_us"] = round(sum(elapsed for _, elapsed, _ in step), 1)
    found["span_us"] = round(step[-1][0] + step[-1][1] - step[0][0], 1)
    names = sorted({kernel[2][:NAME] for kernel in step})
    found["names"] = names
    found["lane"] = [
        [round(begin - step[0][0], 2), round(elapsed, 2), names.index(label[:NAME])]
        for begin, elapsed, label in step
        if begin - step[0][0] < SHOWN_US
    ]
    return found


def overlap_lanes(one: Measured, num_seqs: int = 64) -> dict[str, Any]:
    """Measure decode steps with and without overlap, and what host and device do: chapter 9."""
    found: dict[str, Any] = {"sequences": num_seqs}
    default = one.engine.overlap
    for name, overlap in (("without", False), ("with", True)):
        one.engine.overlap = overlap  # no step is in flight: all requests have ended
        found[name] = host_figures(one.run(num_seqs, 128, 128), num_seqs)
        kernels, events, mark = profile_steps(one, num_seqs, 8)
        # Kernels with gaps of less than 5 us in between are one time of work.
        busy: list[list[float]] = []
        for begin, elapsed, _ in kernels:
            if busy and begin - busy[-1][1] < 5:
                busy[-1][1] = begin + elapsed
            else:
                busy.append([begin, begin + elapsed])
        host: list[tuple[str, int, float, float]] = []
        for launched, committed, _ in decode_steps(events, num_seqs):
            if not mark < launched.time < mark + 1:
                continue
            at = launched.time
            spans = [("schedule", launched.schedule_seconds), ("launch", launched.launch_seconds)]
            for part, seconds in spans:
                host.append((part, launched.step, 1e6 * at, 1e6 * (at + seconds)))
                at += seconds
            at = committed.time
            host.append(("wait", committed.step, 1e6 * (at - committed.wait_seconds), 1e6 * at))
            host.append(("commit", committed.step, 1e6 * at, 1e6 * (at + committed.commit_seconds)))
        start = min([span[2] for span in host] + [span[0] for span in busy])
        end = start + 1e4  # 10 ms are more than a picture shows
        found[name]["host"] = [
            [part, step, round(begin - start, 1), round(stop - start, 1)]
            for part, step, begin, stop in host
            if begin < end
        ]
        found[name]["device"] = [
            [round(begin - start, 1), round(stop - start, 1)] for begin, stop in busy if begin < end
        ]
    one.engine.overlap = default
    return found


def decode_figures(one: Measured, counts: tuple[int, ...]) -> list[dict[str, float]]:
    """Measure decode steps of some numbers of sequences: chapter 12."""
    found = []
    for count in counts:
        events = one.run(count, 512, 96)
        steps = decode_steps(events, count)
        # Let each sequence be at its length in the middle of the measured steps.
        first = min(e.step for e in events if isinstance(e, Launched) and e.decode_tokens == count)
        context = 512 + 1 + mean(launched.step - first for launched, _, _ in steps)
        found.append(dict(sequences=count, context=round(context), **host_figures(events, count)))
    return found


def prefill_figures(one: Measured, num_seqs: int) -> dict[str, float]:
    """Measure how long prompts of 2,048 tokens take."""
    times = []
    for _ in range(2):
        one.add(num_seqs, 2048, 1)
        begin = perf_counter()
        one.finish()
        times.append(perf_counter() - begin)
    return dict(prompts=num_seqs, prompt_tokens=2048, seconds=round(min(times), 4))


def growing_batch(one: Measured, bandwidth: float | None) -> list[Event]:
    """Run 1, then 8, then 64 sequences of 16 tokens as one trace: chapter 12."""
    one.restart(bandwidth=bandwidth)
    for count in (1, 8, 64):
        one.add(count, 128, 16)
        one.finish()
    return one.recorder.events.copy()


def main(argv: list[str] | None = None) -> None:
    """Measure, and write the files after each part, so that an error loses only the rest."""
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.apps.course.recording",
        description="Measure on a GPU what chapters 9, 10 and 12 of the course show.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="for figures.json and traces")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    rates = ceilings()
    figures: dict[str, Any] = {
        "command": "python -m nanovllm.apps.course.recording FOLDER",
        "machine": device_name(),
        "versions": versions("nanovllm"),
        "date": time.strftime("%Y-%m-%d"),
    }
    if rates is not None:
        figures["bandwidth"], figures["flops"] = rates

    def keep(key: str, measure: Callable[[], Any]) -> None:
        begin = perf_counter()
        try:
            figures[key] = measure()
        except Exception as error:  # the other parts may succeed
            print(f"{key}: {type(error).__name__}: {error}", flush=True)
            return
        (folder / "figures.json").write_text(json.dumps(figures, separators=(",", ":")) + "\n")
        text = json.dumps({k: v for k, v in short(figures[key]).items()})
        print(f"{key} ({perf_counter() - begin:.1f} s): {text}", flush=True)

    def sizes(one: Measured) -> dict[str, Any]:
        run = one.recorder.events[0]
        return dict(weight_bytes=run.weight_bytes, kv_bytes_per_token=run.kv_bytes_per_token)  # type: ignore[union-attr]

    def everything(model: str, **options: Any) -> None:
        with measured(model, folder, **options) as one:
            keep(f"{model} sizes", lambda: sizes(one))
            keep(f"{model} decode", lambda: {"steps": decode_figures(one, (1, 8, 64, 256))})
            keep(f"{model} prefill", lambda: prefill_figures(one, 64 if model == SMALL else 16))
            if model == SMALL:
                keep("graph", lambda: one_sequence(one, folder, "graph"))
                keep("overlap", lambda: overlap_lanes(one))
                events = growing_batch(one, rates and rates[0])
                (folder / "12.jsonl").write_text(make_jsonl(events))

    def form(name: str) -> None:
        with measured(SMALL, folder, **FORMS[name]) as one:
            keep(name, lambda: one_sequence(one, folder, name))

    for part in (
        lambda: everything(SMALL),
        lambda: form("fused"),
        lambda: form("plain"),
        lambda: everything(LARGE),
    ):
        try:
            part()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)


def short(value: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is too long to print."""
    return {key: of for key, of in value.items() if key not in ("lane", "names", "host", "device")}


if __name__ == "__main__":
    main()
