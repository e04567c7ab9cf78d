"""Checks of the options of bench.py."""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

from nanovllm.apps.bench.engines import ENGINES
from nanovllm.apps.bench.policies import find_policy
from nanovllm.apps.bench.shapes import SHAPES
from nanovllm.apps.bench.workloads import WORKLOADS

EXAMPLE = '{"max_num_batched_tokens": 2048}'  # an example of --options

# The packages of each other engine, and how to install them.
PACKAGES = {
    "vllm": (["vllm"], "pip install vllm"),
    "transformers": (["transformers"], "pip install transformers"),
    "openvino": (
        ["openvino_genai", "optimum"],
        'pip install "optimum-intel[openvino]" openvino-genai',
    ),
}


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that contradict each other or name something unknown."""
    names = set(args.workload.split(","))
    if unknown := sorted(names - WORKLOADS.keys()):
        raise ValueError(f"--workload {unknown[0]}: use one of {', '.join(WORKLOADS)}")
    engines = {args.engine, *args.compare.split(",")} if args.compare else {args.engine}
    if unknown := sorted(engines - ENGINES.keys()):
        raise ValueError(f"--compare {unknown[0]}: use one or several of {', '.join(PACKAGES)}")
    if "openvino" in engines and args.model in SHAPES:
        raise ValueError(
            f"--model {args.model}: openvino needs weights: name a folder, a hub id or tiny"
        )
    if "transformers" in engines and {"logprobs", "penalties"} & names:
        raise ValueError(
            "--workload: transformers cannot run the workloads logprobs and penalties: "
            "leave them out"
        )
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
            f"--options {args.options}: use a JSON object of LLM's options. For max_model_len and "
            "tensor_parallel_size, use the flags of these names"
        )
    if args.policy:
        if args.compare or args.engine != "nanovllm" or args.plot or args.trace:
            raise ValueError(
                "--policy compares policies of nanovllm alone: leave out --compare, --engine, "
                "--plot and --trace"
            )
        for name in args.policy.split(","):
            find_policy(name)
    for path in (args.json, args.plot, args.trace):
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(
                f"the folder of {path} does not exist: create it, or name another file"
            )
        if path and Path(path).is_dir():
            raise ValueError(f"{path} is a folder: name a file in it")
    if args.trace and "," in args.workload:
        raise ValueError(
            f"--trace records one workload, but --workload is {args.workload}: name one workload"
        )
    if args.plot or args.trace:
        if args.compare or args.engine != "nanovllm":
            raise ValueError(
                "--plot and --trace show the steps of nanovllm: leave out --compare and --engine"
            )
    if args.plot:
        if not find_spec("matplotlib"):
            raise ValueError("--plot needs matplotlib: pip install 'nanovllm[plot]'")
    for engine in engines & PACKAGES.keys():
        packages, command = PACKAGES[engine]
        if not all(map(find_spec, packages)):
            raise ValueError(f"{engine} is not installed: {command}, or choose another engine")
