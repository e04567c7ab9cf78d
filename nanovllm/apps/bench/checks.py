"""Checks of the options of bench.py."""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

from nanovllm.apps.bench.engines import WITHOUT_OPTIONS
from nanovllm.apps.bench.policies import find_policy
from nanovllm.apps.bench.shapes import SHAPES
from nanovllm.apps.bench.workloads import WORKLOADS

EXAMPLE = '{"max_num_batched_tokens": 2048}'  # an example of --options
WITH_FLAGS = {"model", "max_model_len", "tensor_parallel_size", "trace", "load_format"}
PICTURES = (".png", ".pdf", ".svg")

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
        raise ValueError(f"--workload {unknown[0]!r}: use one of {', '.join(WORKLOADS)}")
    others = args.compare.split(",") if args.compare is not None else []
    if unknown := sorted(set(others) - PACKAGES.keys()):
        raise ValueError(f"--compare {unknown[0]!r}: use one or several of {', '.join(PACKAGES)}")
    if others and args.engine != "nanovllm":
        raise ValueError(
            "--compare measures nanovllm and the engines that it names: leave out --engine"
        )
    engines = {args.engine, *others}
    if "openvino" in engines and args.model in SHAPES:
        raise ValueError(
            f"--model {args.model}: openvino needs weights: name a folder, a hub id or tiny"
        )
    if "transformers" in engines and {"logprobs", "penalties"} & names:
        raise ValueError(
            "--workload: transformers cannot run the workloads logprobs and penalties: "
            "leave them out"
        )
    is_name = "/" not in args.model and not Path(args.model).exists()
    if is_name and args.model != "tiny" and args.model not in SHAPES:
        raise ValueError(
            f"--model {args.model!r}: use a folder, a hub id, tiny or one of {', '.join(SHAPES)}"
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
    if not isinstance(options, dict) or WITH_FLAGS & set(options):
        raise ValueError(
            f"--options {args.options}: use a JSON object of LLM's options. For model, "
            "max_model_len, tensor_parallel_size and trace, use the flags of these names; "
            "load_format follows from the model"
        )
    formats = args.quantization or args.kv_cache_dtype
    if args.engine in WITHOUT_OPTIONS and (options or formats or args.tensor_parallel_size != 1):
        raise ValueError(
            f"--engine {args.engine} runs a model as it is: leave out --options, --quantization, "
            "--kv-cache-dtype and --tensor-parallel-size"
        )
    if args.policy is not None:
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
    for path in (args.json, args.plot):  # LLM checks that of --trace before the engine runs, too
        if path:
            check_writable(Path(path))
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
        if args.plot.suffix not in PICTURES:
            raise ValueError(
                f"--plot {args.plot}: name a file that ends in {' or '.join(PICTURES)}"
            )
    for engine in engines & PACKAGES.keys():
        packages, command = PACKAGES[engine]
        if not all(map(find_spec, packages)):
            raise ValueError(f"{engine} is not installed: {command}, or choose another engine")


def check_writable(path: Path) -> None:
    """Raise ValueError if a file cannot be written, before a long measurement runs."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder of yours"
        ) from error
