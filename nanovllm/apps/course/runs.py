"""The runs of the course's chapters: `python -m nanovllm.apps.course.runs 4`.

Each run has the library generate with the tiny model on the CPU, prints the figures that its
chapter speaks of, and writes a trace: a page that replays the run in a browser. The drawings of the
chapters show the same runs. Chapters 9, 10 and 12 also show what a GPU recorded.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from nanovllm import LLM, TINY_MODEL, SamplingParams
from nanovllm.apps.course import recorded as measured
from nanovllm.apps.course.solution.roofline import (
    QWEN3_0_6B,
    QWEN3_8B,
    Device,
    seconds_of_step,
)
from nanovllm.features.trace.events import Committed, Event, Launched, Preempted, Run, Started
from nanovllm.features.trace.files import read_jsonl, write
from nanovllm.features.trace.replay import Replay

STACK = "class Stack:\n    def push(self, item):\n"
TEXTS = [STACK, "import os", "def read_lines(path):", "for name in sorted(names):\n    print(name)"]
HEADER = "class Tree:\n" + "".join(
    f"    def {name}(self, key):\n        return self.root.{name}(key)\n\n"
    for name in ("find", "insert", "remove", "count", "depth", "first")
)


class Result(NamedTuple):
    """The outcome of a chapter's run."""

    lines: list[str]  # the figures that the chapter speaks of
    traces: list[list[Event]]  # one for each LLM


class Cell(NamedTuple):
    """The part of a step that computes one sequence."""

    step: int
    seq: int
    slot: int
    tokens: int
    is_prefill: bool


@contextmanager
def recorded(events: list[Event], **options: Any):
    """Open an LLM with the tiny model, and put the events of its trace into `events` at the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        options = {
            "device": "cpu",
            "kernels": "plain",
            "overlap": False,
            "scheduling_policy": "fcfs",
            "kvcache_block_size": 16,
            "num_kvcache_blocks": 64,
            "max_model_len": 1024,
        } | options
        with LLM(TINY_MODEL, trace=str(path), **options) as llm:
            yield llm
        events += read_jsonl(path)


def generate(llm: LLM, prompts: list[Any], max_tokens: list[int], **params: Any) -> list[list[int]]:
    """Generate exactly `max_tokens` tokens for each prompt."""
    params = {"temperature": 0.0, "ignore_eos": True} | params
    each = [SamplingParams(max_tokens=count, **params) for count in max_tokens]
    return [output["token_ids"] for output in llm.generate(prompts, each, use_tqdm=False)]


def run_of(events: list[Event]) -> Run:
    """Return the first event of a trace, which describes the engine."""
    assert isinstance(events[0], Run)
    return events[0]


def launches(events: list[Event]) -> list[Launched]:
    """Return the steps of a trace."""
    return [event for event in events if isinstance(event, Launched)]


def tokens_of(step: Launched) -> int:
    """Count the tokens that a step computes."""
    return step.decode_tokens + sum(end - start for _, start, end in step.prefills)


def cells(events: list[Event]) -> list[Cell]:
    """List which sequences each step computes, and in which batch slots."""
    replay, slots, found = Replay(run_of(events)), {}, []
    for event in events[1:]:
        replay.apply(event)
        if isinstance(event, Started):
            slots[event.seq] = event.slot
        if isinstance(event, Launched):
            for seq in sorted(replay.decoding):
                found.append(Cell(event.step, seq, slots[seq], 1, False))
            for seq, start, end in event.prefills:
                found.append(Cell(event.step, seq, slots[seq], end - start, True))
    return found


def seconds(events: list[Event]) -> list[float]:
    """Return how long each step of a trace took, from its schedule to its tokens."""
    ends = {event.step: event.time for event in events if isinstance(event, Committed)}
    return [ends[step.step] - step.time for step in launches(events)]


def median_ms(times: list[float]) -> float:
    return 1000 * median(times)


@cache
def one_token_by_hand() -> Result:
    """Generate 120 tokens, each by a request of its own that computes all tokens before it."""
    events: list[Event] = []
    with recorded(events, enable_prefix_caching=False) as llm:
        (prompt,) = llm.encode([STACK])
        output: list[int] = []
        while len(output) < 120:
            output += generate(llm, [prompt + output], [1])[0]
    return Result(lines_of_one_output(prompt, output, events), [events])


@cache
def kv_cache() -> Result:
    """Generate the same 120 tokens in one request, which keeps keys and values."""
    events: list[Event] = []
    with recorded(events) as llm:
        (prompt,) = llm.encode([STACK])
        (output,) = generate(llm, [prompt], [120])
    size = f"keys and values of a token: {run_of(events).kv_bytes_per_token:,.0f} bytes"
    return Result([*lines_of_one_output(prompt, output, events), size], [events])


def lines_of_one_output(prompt: list[int], output: list[int], events: list[Event]) -> list[str]:
    """Say how many tokens the model computed for one output, and how long these took."""
    times, computed = seconds(events), [tokens_of(step) for step in launches(events)]
    return [
        f"prompt: {len(prompt)} tokens; output: {len(output)} tokens",
        f"tokens that the model computed: {sum(computed):,}",
        f"first tokens of the output: {median_ms(times[2:12]):.1f} ms each",
        f"last tokens of the output:  {median_ms(times[-10:]):.1f} ms each",
    ]


@cache
def paged_attention() -> Result:
    """Serve nine requests of different lengths, four at a time, and look at the fullest step."""
    events: list[Event] = []
    with recorded(
        events, num_kvcache_blocks=24, max_num_seqs=4, enable_prefix_caching=False
    ) as llm:
        prompts = llm.encode((TEXTS * 3)[:9])
        generate(llm, prompts, [30, 70, 20, 45, 60, 25, 50, 35, 40])
    replay, most = Replay(run_of(events)), (0, 0, 0)
    for event in events[1:]:
        replay.apply(event)
        used = sum(count > 0 for count in replay.ref_counts)
        if isinstance(event, Launched):
            most = max(most, (used, sum(replay.lengths.values()), len(replay.tables)))
    used, stored, num_seqs = most
    lines = [
        f"sequences at the fullest step: {num_seqs}, which hold {stored} tokens",
        f"slots of the {used} blocks in use: {used * 16}, of which {used * 16 - stored} are empty",
        f"slots if each sequence had room for 1,024 tokens: {num_seqs * 1024:,}",
    ]
    return Result(lines, [events])


STATIC = [4, 24, 8, 12, 20, 6, 10, 16, 14]  # tokens of the nine outputs of chapter 4


@cache
def continuous_batching() -> Result:
    """Serve nine requests in three slots: first in batches of three, then continuously."""
    events: list[Event] = []
    with recorded(events, max_num_seqs=3, enable_prefix_caching=False) as llm:
        prompts = llm.encode([TEXTS[1]] * len(STATIC))
        for i in range(0, len(prompts), 3):
            generate(llm, prompts[i : i + 3], STATIC[i : i + 3])
        generate(llm, prompts, STATIC)
    steps = launches(events)
    num_static = min(cell.step for cell in cells(events) if cell.seq == len(STATIC))
    lines = [
        f"tokens of all outputs: {sum(STATIC)}; slots: 3",
        f"in batches of three: {num_static} steps, "
        f"{100 * sum(STATIC) / 3 / num_static:.0f} % of the slots' steps sample a token",
        f"continuously: {len(steps) - num_static} steps, "
        f"{100 * sum(STATIC) / 3 / (len(steps) - num_static):.0f} %",
    ]
    return Result(lines, [events])


@cache
def chunked_prefill() -> Result:
    """Let a long prompt come while three sequences decode: with a large and a small budget."""
    lines, traces = [], []
    for budget in (1024, 64):
        events: list[Event] = []
        with recorded(events, max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
            (long_prompt,) = llm.encode([HEADER * 4])
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            for text in TEXTS[:3]:
                llm.add_request(text, params)
            for _ in range(5):
                llm.step()
            llm.add_request(long_prompt, SamplingParams(temperature=0.0, max_tokens=8))
            while llm.has_unfinished():
                llm.step()
        steps, times = launches(events), seconds(events)
        prefilling = [step for step in steps[5:] if step.prefills]
        lines.append(
            f"budget {budget:>4}: the prompt of {len(long_prompt)} tokens takes {len(prefilling)} "
            f"steps; the largest step computes {max(map(tokens_of, steps))} tokens and takes "
            f"{1000 * max(times[5:]):.0f} ms"
        )
        traces.append(events)
    return Result(lines, traces[::-1])


@cache
def prefix_cache() -> Result:
    """Serve four requests that begin alike: without and with the prefix cache."""
    lines, traces = [], []
    for cached in (False, True):
        events: list[Event] = []
        with recorded(events, enable_prefix_caching=cached) as llm:
            prompts = llm.encode([f"{HEADER}    def {name}" for name in ("last", "walk", "size")])
            generate(llm, prompts[:1], [4])
            generate(llm, prompts, [12] * 3)
        computed = sum(map(tokens_of, launches(events)))
        word = "with" if cached else "without"
        lines.append(f"{word:>7} the prefix cache: {computed} tokens computed")
        traces.append(events)
    lengths = ", ".join(str(len(prompt)) for prompt in [prompts[0], *prompts])
    lines.insert(0, f"prompts of {lengths} tokens; outputs of 4, 12, 12 and 12")
    return Result(lines, traces[::-1])


@cache
def preemption() -> Result:
    """Serve four requests that need 24 blocks where there are 14."""
    events: list[Event] = []
    with recorded(events, num_kvcache_blocks=14) as llm:
        prompts = llm.encode(TEXTS)
        few = generate(llm, prompts, [80] * 4)
    with recorded([], num_kvcache_blocks=64) as llm:
        many = generate(llm, prompts, [80] * 4)
    needed = sum(-(-(len(prompt) + 80) // 16) for prompt in prompts)
    computed = sum(map(tokens_of, launches(events)))
    once = sum(len(prompt) + 79 for prompt in prompts)
    num_preempted = sum(isinstance(event, Preempted) for event in events)
    lines = [
        f"blocks that the four sequences need: {needed}; blocks that there are: 14",
        f"preemptions: {num_preempted}; tokens computed: {computed}, of which "
        f"{computed - once} again",
        f"outputs are the same as with 64 blocks: {few == many}",
    ]
    return Result(lines, [events])


@cache
def sampling() -> Result:
    """Sample with a seed: alone, among others, and where sequences are preempted."""
    events: list[Event] = []
    params = dict(temperature=0.8, top_p=0.95)
    with recorded([]) as llm:
        (alone,) = generate(llm, [STACK], [40], seed=7, **params)
    with recorded(events, num_kvcache_blocks=10, max_num_batched_tokens=16, max_num_seqs=8) as llm:
        prompts = llm.encode([*TEXTS[1:], STACK])
        beside = generate(llm, prompts, [40] * 4, seed=7, **params)[-1]
        (other,) = generate(llm, [STACK], [40], seed=8, **params)
    num_preempted = sum(isinstance(event, Preempted) for event in events)
    lines = [
        f"alone, and among three others in chunks with {num_preempted} preemptions: "
        f"the same tokens: {alone == beside}",
        f"with another seed, the same tokens: {alone == other}",
    ]
    return Result(lines, [events])


MATRIX = [[1, 0, 2, 1], [0, 3, 1, 0], [2, 1, 0, 1], [1, 1, 1, 2]]  # of chapter 11
VECTOR = [1, 2, 3, 4]


@cache
def tensor_parallelism() -> Result:
    """Multiply a 4 x 4 matrix on two ranks, then run the model on one and on two ranks."""
    weight, x = torch.tensor(MATRIX), torch.tensor(VECTOR)
    columns = [(rows @ x).tolist() for rows in weight.chunk(2)]
    summands = [(part @ half).tolist() for part, half in zip(weight.chunk(2, dim=1), x.chunk(2))]
    outputs, traces = [], []
    for size in (1, 2):
        events: list[Event] = []
        with recorded(events, tensor_parallel_size=size) as llm:
            outputs.append(generate(llm, llm.encode(TEXTS), [24] * 4))
        traces.append(events)
    lines = [
        f"the product: {(weight @ x).tolist()}",
        f"split by outputs: rank 0 computes {columns[0]}, rank 1 {columns[1]}",
        f"split by inputs: rank 0 computes {summands[0]}, rank 1 {summands[1]}, and they add",
        f"outputs of the model on 1 and on 2 ranks are the same: {outputs[0] == outputs[1]}",
    ]
    return Result(lines, traces[::-1])


@cache
def overlap() -> Result:
    """Serve four requests of which three end by a surprise: without and with overlap."""
    lines, outputs, traces = [], [], []
    for overlapped in (False, True):
        events: list[Event] = []
        with recorded(events, overlap=overlapped, enable_prefix_caching=False) as llm:
            prompts = llm.encode(TEXTS)
            # Tokens that these outputs hold early.
            outputs.append(generate(llm, prompts, [24] * 4, stop_token_ids=[282, 14, 258]))
        computed = sum(map(tokens_of, launches(events)))
        taken = sum(event.tokens for event in events if isinstance(event, Committed))
        dropped = computed - sum(map(len, prompts)) + len(prompts) - taken
        word = "with" if overlapped else "without"
        lines.append(f"{word:>7} overlap: {taken} tokens taken, {dropped} sampled and dropped")
        traces.append(events)
    steps = launches(traces[0])
    commits = [event for event in traces[0] if isinstance(event, Committed)]
    host = [a.schedule_seconds + b.commit_seconds for a, b in zip(steps, commits)]
    step_us = {word: measured.figures()["overlap"][word]["step_us"] for word in WORDS}
    lines += [
        f"outputs are the same: {outputs[0] == outputs[1]}",
        f"to schedule and commit a step took the host {median_ms(host):.3f} ms",
        f"an H200, {measured.figures()['overlap']['sequences']} sequences: a step takes "
        f"{step_us['without'] / 1000:.2f} ms without overlap, {step_us['with'] / 1000:.2f} ms with",
    ]
    return Result(lines, traces[::-1])


WORDS = "without", "with"  # overlap
FORMS = {  # of a step, as recording.py calls them
    "plain": "PyTorch's kernels",
    "fused": "kernels made by hand",
    "graph": "the same as a graph",
}


@cache
def cuda_graphs() -> Result:
    """Time additions of few and of many numbers, and show what an H200 recorded."""
    lines = []
    for size in (100, 10_000, 1_000_000):
        x, y = torch.ones(size), torch.ones(size)
        seconds = [timed(lambda x=x, y=y: x.add_(y)) for _ in range(300)]  # type: ignore[misc]
        lines.append(f"adding {size:>9,} numbers: {median_ms(seconds):.4f} ms")
    for form, label in FORMS.items():
        found = measured.figures()[form]
        # Kernels of a graph overlap, and should count once: they run without a gap.
        running = min(found["device_us"], found["span_us"])
        lines.append(
            f"an H200, {label + ':':<21} {found['kernels']:5,.0f} run for "
            f"{running / 1000:.2f} ms, a token takes {found['step_us'] / 1000:5.2f} ms"
        )
    return Result(lines, [measured.trace(10)])


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = perf_counter()
    work()
    return perf_counter() - begin


SHAPES = {"qwen3-0.6b": QWEN3_0_6B, "qwen3-8b": QWEN3_8B}
NAMES = {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-8b": "Qwen3-8B"}


def bound_of(model: str, chunks: list[tuple[int, int]]) -> float:
    """Compute the roofline of a step on the GPU that was measured, in seconds."""
    device = Device(measured.figures()["bandwidth"], measured.figures()["flops"])
    return seconds_of_step(SHAPES[model], device, chunks)


def beside_bound(seconds: float, bound: float) -> str:
    share = 100 * bound / seconds
    return f"{1000 * seconds:6.2f} ms, the roofline {1000 * bound:6.2f} ms ({share:.0f} %)"


@cache
def roofline() -> Result:
    """Compare steps with their roofline: the tiny model's here, larger ones' on an H200."""
    events: list[Event] = []
    with recorded(events) as llm:
        generate(llm, llm.encode([STACK]), [60])
    weights = run_of(events).weight_bytes or 0
    numbers = torch.ones(2**26)  # 256 MiB: more than caches hold
    reading = median([timed(numbers.sum) for _ in range(5)]) * weights / numbers.nbytes
    found = measured.figures()
    lines = [
        f"the tiny model's weights: {weights / 1e6:.1f} MB, which this machine reads in "
        f"{1000 * reading:.2f} ms",
        f"a decode step of one sequence: {median_ms(seconds(events)[2:]):.2f} ms",
        f"an H200 reads {found['bandwidth'] / 1e12:.2f} TB a second, and computes "
        f"{found['flops'] / 1e12:.0f} T operations: {found['flops'] / found['bandwidth']:.0f} "
        "for each byte",
    ]
    for model, name in NAMES.items():
        for step in measured.decode_times(model):
            times = beside_bound(step.seconds, bound_of(model, step.chunks))
            lines.append(f"{name + ',':<11} a batch of {step.sequences:>3}: {times}")
        prefill = found[f"{model} prefill"]
        chunks = [(0, prefill["prompt_tokens"])] * prefill["prompts"]
        times = beside_bound(prefill["seconds"], bound_of(model, chunks))
        lines.append(f"{name + ',':<11} {prefill['prompts']} prompts:     {times}")
    return Result(lines, [measured.trace(12)])


RUNS: dict[int, Callable[[], Result]] = {
    1: one_token_by_hand,
    2: kv_cache,
    3: paged_attention,
    4: continuous_batching,
    5: chunked_prefill,
    6: prefix_cache,
    7: preemption,
    8: sampling,
    9: overlap,
    10: cuda_graphs,
    11: tensor_parallelism,
    12: roofline,
}


def main(argv: list[str] | None = None) -> None:
    """Run a chapter's run, print its figures, and write its trace."""
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.apps.course.runs", description="Run what a chapter speaks of."
    )
    parser.add_argument("chapter", type=int, choices=RUNS)
    parser.add_argument("--trace", type=Path, help="file of the trace (chapter-N.html)")
    args = parser.parse_args(argv)
    result = RUNS[args.chapter]()
    trace = args.trace or Path(f"chapter-{args.chapter}.html")
    write(result.traces[0], trace)
    print(*result.lines, f"trace: {trace}", sep="\n")


if __name__ == "__main__":
    main()
