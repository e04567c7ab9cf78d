"""Measure throughput and latency, and compare with vLLM, transformers or OpenVINO.

    python bench.py                                 the default workload for this machine
    python bench.py --model qwen3-8b --workload bench,latency
    python bench.py --compare vllm                  both engines in turn, each in its own process
    python bench.py --compare transformers,openvino    what others make of the same CPU
    python bench.py --model Qwen/Qwen3-0.6B --workload small    a real model on a laptop
    python bench.py --plot run.png                  a picture of the run, step by step
    python bench.py --policy fcfs,shortest-first    waiting times under two scheduling policies
    python bench.py --trace run.html                figures of a run, and a page that replays it
    python bench.py --workload conversations --requests 24    the first requests of a workload
    python bench.py --model qwen3-8b --quantization fp8    weights and products in FP8
    python bench.py --model qwen3-8b --kv-cache-dtype fp8    keys and values in FP8
    python bench.py --host                          host time per step, without a device

A model is a folder, a hub id, "tiny" (the trained model in the package), or a shape: qwen3-0.6b,
qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-32b, qwen3-30b-a3b, qwen3.5-0.8b, qwen3.5-9b,
qwen3.5-35b-a3b or gpt-oss-20b, whose experts are in MXFP4. A shape gets random weights and needs no
download. The reported times are the first and the best of --repeat runs. Options of the LLM that no
flag sets keep their defaults.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from nanovllm.apps.bench.checks import EXAMPLE, PACKAGES, check
from nanovllm.apps.bench.engines import (
    ENGINES,
    WITHOUT_OPTIONS,
    device_name,
    start,
    versions,
)
from nanovllm.apps.bench.host import host_cost
from nanovllm.apps.bench.policies import compare_policies
from nanovllm.apps.bench.report import (
    FORMATS,
    end_trace,
    options_of,
    plot_run,
    print_row,
    print_start,
    print_table,
)
from nanovllm.apps.bench.roofline import ceilings, roofline
from nanovllm.apps.bench.runs import check_lengths, run_once
from nanovllm.apps.bench.shapes import SHAPES
from nanovllm.apps.bench.workloads import WORKLOADS

LAPTOP = ("tiny", "laptop")  # the model and the workload for a machine without a GPU


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    names = "\n".join(f"  {name:<13} {one.description}" for name, one in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options]",
        epilog=f"workloads:\n{names}",
    )
    add = parser.add_argument
    add(
        "--engine", choices=ENGINES, default="nanovllm", help="engine to measure; default: nanovllm"
    )
    help = f"measure these engines too, separated by commas: {', '.join(PACKAGES)}"
    add("--compare", metavar="NAMES", help=help)
    add("--model", help="model to run; default: qwen3-0.6b on a GPU, tiny without one")
    help = "workloads, separated by commas; default: bench on a GPU, laptop without one"
    add("--workload", help=help)
    add("--requests", metavar="N", type=int, help="run only the first N requests of each workload")
    add(
        "--repeat",
        metavar="N",
        type=int,
        default=2,
        help="number of runs of each workload; default: 2",
    )
    help = "longest prompt plus output, in tokens; default: 4096"
    add("--max-model-len", metavar="N", type=int, default=4096, help=help)
    help = "number of GPUs, or of ranks on a CPU, to split the model over; default: 1"
    add("--tensor-parallel-size", metavar="N", type=int, default=1, help=help)
    help = (
        "format of the weights: fp8; int8 on a CPU; gptq or awq (INT4, groups of 128) of a shape; "
        "default: the model's"
    )
    add("--quantization", metavar="NAME", help=help)
    help = "format of the KV cache: fp8; default: the dtype of the model"
    add("--kv-cache-dtype", metavar="NAME", help=help)
    help = f"options of the LLM that replace its defaults, as JSON such as {EXAMPLE}"
    add("--options", metavar="JSON", default="{}", help=help)
    add("--json", metavar="FILE", help="write the measurements to this file")
    help = "draw the last run of each workload to this file; needs matplotlib"
    add("--plot", metavar="PNG", type=Path, help=help)
    help = (
        "compare these scheduling policies, given by name or as module:Class, separated by commas"
    )
    add("--policy", metavar="NAMES", help=help)
    help = (
        "write a trace of the last run to this file, as a page (.html) or as events (.jsonl), and "
    )
    help += "print its figures"
    add("--trace", metavar="HTML", type=Path, help=help)
    add("--host", action="store_true", help="measure only the host time per step")
    return parser


def main() -> None:
    """Run the measurements that the command line asks for."""
    parser = make_parser()
    args = parser.parse_args()
    try:
        if args.host:
            if args != parser.parse_args(["--host"]):
                raise ValueError("--host runs no model: leave out all other options")
            return host_cost()
        if args.model is None or args.workload is None:
            model, workload = ("qwen3-0.6b", "bench") if torch.cuda.is_available() else LAPTOP
            args.model = model if args.model is None else args.model
            args.workload = workload if args.workload is None else args.workload
        check(args)
        how = compare if args.compare else compare_policies if args.policy else measure
        rows = how(args)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))
    except (ValueError, TypeError, OSError) as error:  # an OSError may be a full disk
        parser.error(str(error))
    except KeyboardInterrupt:
        print("bench.py: interrupted", file=sys.stderr)
        sys.exit(130)  # as shells report a program that Ctrl-C ended


def measure(args: argparse.Namespace) -> list[dict]:
    """Run the workloads on one engine in this process, and print a row for each."""
    limits = ceilings() if args.model in SHAPES else None  # measured while the GPU is empty
    options = options_of(args)
    formats = {
        name: options[name] for name in (*FORMATS, "mamba_ssm_cache_dtype") if name in options
    }
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
    print_start(common)
    check_lengths(args, engine)
    rows: list[dict] = []
    steps: list = []  # the steps of the last run, for the picture
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
        limit = roofline(args.model, work, name, *rates, **formats) if rates else None
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
    """Measure nanovllm, then the other engines, and print one table.

    This script measures each engine in a process of its own, which prints rows as they come.
    """
    results: dict[str, dict[str, dict]] = {}
    for engine in ("nanovllm", *args.compare.split(",")):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            options = {"engine": engine, "json": file.name}
            for name in ("model", "workload", "repeat", "max_model_len"):
                options[name] = getattr(args, name)
            if args.requests:
                options["requests"] = args.requests
            if engine not in WITHOUT_OPTIONS:
                options["tensor_parallel_size"] = args.tensor_parallel_size
                options |= {name: value for name in FORMATS if (value := getattr(args, name))}
            if engine == "nanovllm":
                options["options"] = args.options
            command = [sys.executable, "-u", __file__]
            for name, value in options.items():
                command += [f"--{name.replace('_', '-')}", str(value)]
            if subprocess.run(command).returncode:
                sys.exit(f"bench.py: {engine} failed: see its error above")
            rows = json.loads(Path(file.name).read_text())
            results[engine] = {row["workload"]: row for row in rows}
    print_table(args, results)
    return [row for rows in results.values() for row in rows.values()]


if __name__ == "__main__":
    main()
