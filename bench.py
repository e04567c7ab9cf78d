"""Measure throughput and latency, and compare with vLLM or transformers.

    python bench.py                                 the default workload for this machine
    python bench.py --model qwen3-8b --workload bench,latency
    python bench.py --compare vllm                  both engines in turn, in processes of their own
    python bench.py --compare transformers --workload laptop --model tiny
    python bench.py --model Qwen/Qwen3-0.6B --workload small    a real model on a laptop
    python bench.py --plot run.png                  a picture of the run, step by step
    python bench.py --policy fcfs,shortest-first    who waits how long under which scheduling policy
    python bench.py --trace run.html                its figures, and a page that replays every step
    python bench.py --workload conversations --requests 24    a part of a workload
    python bench.py --host                          what a step costs the host, without the device

Models: a folder, a hub id, "tiny" (the trained model in the package), or a shape with random
weights, so that nothing is downloaded: qwen3-0.6b, qwen3-1.7b, qwen3-8b, qwen3-32b, qwen3-30b-a3b.
Times are the first and the best of --repeat runs. The library's default options are measured, those
that every user gets, but for what --options says.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from nanovllm.apps.bench.checks import EXAMPLE, check
from nanovllm.apps.bench.engines import ENGINES, device_name, start, versions
from nanovllm.apps.bench.host import host_cost
from nanovllm.apps.bench.policies import compare_policies
from nanovllm.apps.bench.report import end_trace, plot_run, print_row, print_start, print_table
from nanovllm.apps.bench.roofline import ceilings, roofline
from nanovllm.apps.bench.runs import run_once
from nanovllm.apps.bench.shapes import SHAPES
from nanovllm.apps.bench.workloads import WORKLOADS


def make_parser() -> argparse.ArgumentParser:
    """Declare the options."""
    names = "\n".join(f"  {name:<13} {one.description}" for name, one in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"workloads:\n{names}",
    )
    add = parser.add_argument
    others = [name for name in ENGINES if name != "nanovllm"]
    add("--engine", choices=ENGINES, default="nanovllm", help="measure this one")
    add("--compare", choices=others, help="run this engine too")
    add("--model", help="default: qwen3-0.6b on a GPU, tiny without one")
    help = "one or several, separated by commas; default: bench on a GPU, laptop without one"
    add("--workload", help=help)
    add("--requests", metavar="N", type=int, help="run the first N requests of each workload alone")
    add("--repeat", metavar="N", type=int, default=2, help="runs of each workload; default: 2")
    help = "the longest prompt and output together; default: 4096"
    add("--max-model-len", metavar="N", type=int, default=4096, help=help)
    help = "GPUs, or ranks on a CPU, to split the model over; default: 1"
    add("--tensor-parallel-size", metavar="N", type=int, default=1, help=help)
    help = f"options of the engine's LLM instead of its defaults, as JSON such as {EXAMPLE}"
    add("--options", default="{}", help=help)
    add("--json", metavar="FILE", help="write the measurements there")
    help = "draw each workload's last run there; needs matplotlib"
    add("--plot", metavar="PNG", type=Path, help=help)
    help = "compare scheduling policies, by name or as module:Class, separated by commas"
    add("--policy", metavar="NAMES", help=help)
    help = "print and write what the last run did: a page (.html) or its events (.jsonl)"
    add("--trace", metavar="HTML", type=Path, help=help)
    add("--host", action="store_true", help="measure the host's cost of a step and nothing else")
    return parser


def main() -> None:
    """Do what the command line asks for."""
    parser = make_parser()
    args = parser.parse_args()
    if args.host:
        return host_cost()
    if args.model is None or args.workload is None:
        on_gpu = torch.cuda.is_available()
        args.model = args.model or ("qwen3-0.6b" if on_gpu else "tiny")
        args.workload = args.workload or ("bench" if on_gpu else "laptop")
    try:
        check(args)
        how = compare if args.compare else compare_policies if args.policy else measure
        rows = how(args)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))
    except (ValueError, TypeError, OSError) as error:  # such as a full disk's
        parser.error(str(error))


def measure(args: argparse.Namespace) -> list[dict]:
    """Run the workloads on one engine in this process, and print a row for each."""
    limits = ceilings() if args.model in SHAPES else None  # while the GPU is empty
    options = json.loads(args.options)
    engine, startup_seconds = start(
        args.engine,
        args.model,
        max_model_len=args.max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        **(options | dict(trace=str(args.trace)) if args.trace else options),
    )
    common = dict(
        engine=args.engine,
        model=args.model,
        startup_seconds=startup_seconds,
        device=device_name(),
        options=options,
        versions=versions(args.engine),
    )
    print_start(common, args)
    rows: list[dict] = []
    steps: list = []  # of the last run, for a picture
    if args.plot:
        engine.llm.on_step(steps.append)

    for name in args.workload.split(","):
        workload = WORKLOADS[name]
        work = workload.work(engine.vocab)[: args.requests]
        seconds = []
        for repeat in range(args.repeat):
            steps.clear()
            if args.trace:
                engine.llm.engine.listeners[-1].restart(bandwidth=limits[0] if limits else None)
            seconds.append(run_once(engine, work, name, repeat, args.repeat))
        best, tokens = min(seconds), workload.num_output_tokens(work)
        rates = [rate * args.tensor_parallel_size for rate in limits or ()]
        limit = roofline(args.model, work, name, *rates) if rates else None
        row = common | dict(
            workload=name,
            requests=len(work),
            seconds=best,
            first_seconds=seconds[0],
            runs=seconds,
            output_tokens=tokens,
            output_tokens_per_second=tokens / best,
            roofline_seconds=limit,
            roofline_fraction=limit / best if limit else None,
        )
        rows.append(row)
        print_row(row)
        if args.plot:
            plot_run(steps, name, common["device"], args)

    if args.trace:
        rows[-1]["trace"] = end_trace(engine.llm, args.trace)
    return rows


def compare(args: argparse.Namespace) -> list[dict]:
    """Measure nanovllm, then the other engine, and print one table.

    Each is measured by this script in a process of its own, which prints its rows as they come.
    """
    results: dict[str, dict[str, dict]] = {}
    for engine in ("nanovllm", args.compare):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            options = {"engine": engine, "json": file.name}
            for name in ("model", "workload", "repeat", "max_model_len", "tensor_parallel_size"):
                options[name] = getattr(args, name)
            if args.requests:
                options["requests"] = args.requests
            if engine == "nanovllm":
                options["options"] = args.options
            command = [sys.executable, "-u", __file__]
            for name, value in options.items():
                command += [f"--{name.replace('_', '-')}", str(value)]
            if subprocess.run(command).returncode:
                sys.exit(f"bench.py: {engine} failed (its error is above)")
            rows = json.loads(Path(file.name).read_text())
            results[engine] = {row["workload"]: row for row in rows}
    print_table(args, *results.values())
    return [row for rows in results.values() for row in rows.values()]


if __name__ == "__main__":
    main()
