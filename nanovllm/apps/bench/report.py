"""The output of a measurement: rows, a table, a picture, and the figures of a trace."""

import argparse
import json
from itertools import accumulate
from pathlib import Path

from nanovllm.apps.bench.workloads import WORKLOADS
from nanovllm.features.trace.summary import Summary

FORMATS = ("quantization", "kv_cache_dtype")  # options of the LLM that have flags of their names


def options_of(args: argparse.Namespace) -> dict:
    """Return the options of the LLM that the command line sets: --options and the formats."""
    given = {name: getattr(args, name) for name in FORMATS}
    return json.loads(args.options) | {name: value for name, value in given.items() if value}


def options_name(options: dict) -> str:
    """Return the name of the measured options."""
    return f"options {json.dumps(options)}" if options else "the library's default options"


def print_start(common: dict) -> None:
    """Print the engine, its device and options, and how long its start took."""
    start = f"ready after {common['startup_seconds']:.1f} s"
    about = ", ".join((common["device"], options_name(common["options"]), start))
    print(f"{common['engine']:>12}  on {about}", flush=True)


def print_row(row: dict) -> None:
    """Print the times of one workload."""
    fraction = (
        f", {row['roofline_fraction']:.0%} of the roofline" if row["roofline_fraction"] else ""
    )
    print(
        f"{row['engine']:>12}  {row['model']}  {row['workload']:<13} first "
        f"{row['first_seconds']:8.3f} s, best of {len(row['runs'])} {row['seconds']:8.3f} s  "
        f"{row['output_tokens_per_second']:>10,.0f} tok/s out{fraction}",
        flush=True,
    )


def print_table(args: argparse.Namespace, results: dict[str, dict[str, dict]]) -> None:
    """Print the rows of several engines as a Markdown table, one line per workload.

    `results` has the rows of each engine by workload, those of nanovllm first.
    """
    ours, *others = results.values()
    one = next(iter(ours.values()))
    setting = f"{args.model} on {one['device']}; seconds, the first run and the best"
    print(f"\n{setting} of {args.repeat}; nanovllm: {options_name(one['options'])}\n")
    titles = ["workload", *results]
    titles += [f"{name} / nanovllm" for name in list(results)[1:]]
    print(f"| {' | '.join(titles)} | nanovllm of roofline |")
    print("| --- " * (len(titles) + 1) + "|")
    for name, row in ours.items():
        fraction = f"{row['roofline_fraction']:.0%}" if row["roofline_fraction"] else "-"
        own, *pairs = [
            (rows[name]["first_seconds"], rows[name]["seconds"]) for rows in results.values()
        ]
        times = [f"{first:.3f}, {best:.3f}" for first, best in (own, *pairs)]
        ratios = [f"{first / own[0]:.2f}, {best / own[1]:.2f}" for first, best in pairs]
        print(f"| {name} | {' | '.join(times + ratios)} | {fraction} |")
    starts = [f"{next(iter(rows.values()))['startup_seconds']:.1f}" for rows in results.values()]
    print(f"| start to first token | {' | '.join(starts)} |{' |' * (len(others) + 1)}")


def plot_run(steps: list, name: str, device: str, args: argparse.Namespace) -> None:
    """Draw the run of a workload; each of several workloads gets its own file."""
    stem = args.plot.stem if args.workload == name else f"{args.plot.stem}-{name}"
    path = args.plot.with_stem(stem)
    setting = f"{device}, {options_name(options_of(args))}"
    plot(steps, path, f"{args.model}, {name}: {WORKLOADS[name].description}\n{setting}")
    print(f"              picture of the last run: {path}")


def plot(steps: list, path: Path, title: str) -> None:
    """Draw a run over time: sequences, tokens per step, tokens per second, and KV blocks."""
    from matplotlib.figure import Figure

    times = [step.time - steps[0].time for step in steps]
    figure = Figure(figsize=(11, 10), layout="constrained")
    sequences, tokens, rates, blocks = figure.subplots(4, 1, sharex=True)
    figure.suptitle(title)
    sequences.plot(times, [step.running for step in steps], label="running")
    sequences.plot(times, [step.waiting for step in steps], label="waiting")
    preempted = list(accumulate(step.preemptions for step in steps))
    sequences.plot(times, preempted, ":", label="preempted so far")
    sequences.set_ylabel("sequences")
    tokens.set_ylabel("tokens per step")
    rates.set_ylabel("tokens per second")
    for kind in ("prefill", "decode"):
        counts = [getattr(step, f"{kind}_tokens") for step in steps]
        dots = [(at, count) for at, count in zip(times, counts) if count]
        if dots:
            tokens.plot(*zip(*dots), ".", label=kind)
            rates.stairs(*tokens_a_second(times, counts), label=kind)
    # A step has from one token to a full token budget: only a log scale shows both.
    tokens.set_yscale("log")
    blocks.plot(times, [step.blocks_in_use for step in steps], label="in use")
    num_blocks = steps[0].num_blocks
    blocks.axhline(num_blocks, color="gray", linestyle="--", label=f"capacity: {num_blocks:,}")
    blocks.set_ylabel("KV blocks")
    blocks.set_xlabel("seconds")
    for axes in (sequences, tokens, rates, blocks):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def tokens_a_second(
    times: list[float], counts: list[int], num_spans: int = 60
) -> tuple[list[float], list[float]]:
    """Return tokens per second in equal spans of the run, and the edges of the spans."""
    span = max(times[-1], 1e-6) / num_spans
    totals = [0] * num_spans
    for at, count in zip(times, counts):
        totals[min(int(at / span), num_spans - 1)] += count
    return [total / span for total in totals], [i * span for i in range(num_spans + 1)]


def end_trace(llm, path: Path) -> dict:
    """Write the trace, print the figures of its run, and return them."""
    summary = Summary(llm.engine.listeners[-1].events)
    llm.close()
    print(f"              trace of the last run: {path}")
    for line in summary.lines():
        print(f"              {line}", flush=True)
    return summary.figures()
