"""The checks of bench.py's options."""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

from nanovllm.apps.bench.policies import find_policy
from nanovllm.apps.bench.workloads import WORKLOADS

EXAMPLE = '{"max_num_batched_tokens": 2048}'  # of --options


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if the options do not fit each other, or name what does not exist."""
    names = set(args.workload.split(","))
    if unknown := sorted(names - WORKLOADS.keys()):
        raise ValueError(f"--workload {unknown[0]}: the workloads are {', '.join(WORKLOADS)}")
    if "transformers" in (args.engine, args.compare) and {"logprobs", "penalties"} & names:
        raise ValueError("--workload: transformers has no logprobs and no presence_penalty")
    for option in ("repeat", "requests"):
        if (count := getattr(args, option)) is not None and count < 1:
            raise ValueError(f"--{option} is {count}: use 1 or more")
    try:
        options = json.loads(args.options)
    except ValueError as error:
        raise ValueError(
            f"--options {args.options}: use JSON such as {EXAMPLE} ({error})"
        ) from error
    if not isinstance(options, dict) or {"max_model_len", "tensor_parallel_size"} & set(options):
        raise ValueError(
            f"--options {args.options}: use an object of LLM's options, but for those that have "
            "their own here"
        )
    if args.policy:
        if args.compare or args.engine != "nanovllm" or args.plot or args.trace:
            raise ValueError(
                "--policy compares nanovllm with itself: leave --compare, --engine, --plot and "
                "--trace out"
            )
        for name in args.policy.split(","):
            find_policy(name)
    for path in (args.json, args.plot, args.trace):
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path} is in no folder that exists")
        if path and Path(path).is_dir():
            raise ValueError(f"{path} is a folder: name a file in it")
    if args.trace and "," in args.workload:
        raise ValueError(f"--trace is of one workload, and --workload is {args.workload}: name one")
    if args.plot or args.trace:
        if args.compare or args.engine != "nanovllm":
            raise ValueError(
                "--plot and --trace show nanovllm's own steps: leave --compare and --engine out"
            )
    if args.plot:
        if not find_spec("matplotlib"):
            raise ValueError("--plot needs matplotlib: pip install matplotlib, or nanovllm[plot]")
    for engine in filter(None, (args.engine, args.compare)):
        if not find_spec(engine):
            raise ValueError(f"{engine} is not installed: install it first, or leave it out")
