"""The options of an LLM: frozen and checked; each error names field, value and remedy.

A Config holds what the user asked for. Facts that are found out later (the dtype of the checkpoint,
the number of KV blocks that fit, the length that the model supports) are returned by the code that
finds them, and never written back into the Config.
"""

import re
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from nanovllm.checks import refuse_unknown_names, short_repr
from nanovllm.foreign_names import OPTIONS
from nanovllm.options import check_options, option, options_of
from nanovllm.sampling_params import OF_SAMPLING_PARAMS

SCHEDULING_POLICIES = ("throughput", "fcfs", "shortest-first", "longest-first", "priority")
MAX_COUNT = 2**63 - 1
SECONDS = "a number of seconds above 0, at most 1e6"
# vLLM also names its kernels; a format has one name here.
QUANTIZATIONS = {
    **{name: name for name in ("fp8", "int8", "compressed-tensors", "gptq", "awq", "mxfp4")},
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
}
KV_CACHE_DTYPES = ("auto", "fp8")
STATE_DTYPES = ("auto", "float32", "bfloat16")
OTHER_NAMES = {"half": "float16", "float": "float32"}  # PyTorch's own


def read_model(name: str, given: Any) -> str:
    """Return the path of a folder, or a hub id."""
    path = fspath(given) if isinstance(given, PathLike) else given
    if not isinstance(path, str) or not path:
        raise TypeError(
            f"{name} is {short_repr(given)}: give a folder or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    return path


def read_dtype(name: str, given: Any) -> Any:
    """Return the name of a dtype. A torch.dtype is recognised without importing torch."""
    dtype = str(given) if type(given).__name__ == "dtype" else given
    if not isinstance(dtype, str):
        return given
    dtype = dtype.removeprefix("torch.")
    return OTHER_NAMES.get(dtype, dtype)


def read_quantization(name: str, given: Any) -> Any:
    """Return the name of a format of weights, or None."""
    if given is None or given is False:
        return None
    known = ", ".join(map(repr, QUANTIZATIONS))
    if not isinstance(given, str) or given not in QUANTIZATIONS:
        raise ValueError(f"{name} is {short_repr(given)}: use None or one of {known}")
    return QUANTIZATIONS[given]


def read_kv_cache_dtype(name: str, given: Any) -> Any:
    """Return the format of the KV cache. vLLM's "fp8_e4m3" is "fp8"."""
    if not isinstance(given, str):
        return given
    if given == "fp8_e5m2":
        raise ValueError(f"{name} is {given!r}: use 'fp8', which is e4m3 and rounds less")
    return "fp8" if given == "fp8_e4m3" else given


def read_device(name: str, given: Any) -> str:
    """Return PyTorch's name of a device, or "auto"."""
    if not isinstance(given, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", given):
        raise ValueError(f"{name} is {short_repr(given)}: use 'auto', 'cuda', 'cuda:N' or 'cpu'")
    return given


def read_load_format(name: str, given: Any) -> Any:
    """Return the load format. vLLM's "safetensors" means "auto", which reads no other files."""
    return "auto" if isinstance(given, str) and given == "safetensors" else given


def read_policy(name: str, given: Any) -> Any:
    """Return the name of a policy, or an object, whose methods choose_policy checks."""
    if isinstance(given, str) and given not in SCHEDULING_POLICIES:
        raise ValueError(
            f"{name} is {short_repr(given)}: use one of "
            f"{', '.join(map(repr, SCHEDULING_POLICIES))}, or "
            "an object with the methods of SchedulingPolicy"
        )
    return given


def read_trace(name: str, given: Any) -> str | None:
    """Return the name of a file. Its ending says which kind of trace is written."""
    path = fspath(given) if isinstance(given, PathLike) else given
    if path is None:
        return None
    problem = f"{name} is {short_repr(path)}: give a file name that ends in .html or .jsonl"
    if not isinstance(path, str):
        raise TypeError(problem)
    if not path.endswith((".html", ".jsonl")):
        raise ValueError(problem)
    return path


@dataclass(frozen=True)
class Config:
    """The options of `LLM`.

    Sizes are counted in tokens unless the name says otherwise. Integers may be NumPy integers.
    Details that the declarations below do not say:

    dtype: A torch.dtype may be given instead of its name.
    scheduling_policy: The policy decides which sequence starts next, and which is preempted when
        the KV blocks run out. "throughput" lets all requests of a call end soonest.
        "shortest-first" and "longest-first" order by max_tokens, "priority" by the priority in
        SamplingParams. An object must have the methods of nanovllm.SchedulingPolicy.
    kernels: On a CPU with g++, "auto" uses C++ kernels, which the first start compiles.
    trace: The trace is written at `close` or when the process ends: a page that shows the run
        (.html), or its events, one per line (.jsonl).

    A value of a wrong type raises TypeError, and a value out of range raises ValueError.
    """

    model: str = option(
        help='a folder in Hugging Face form, or a hub id such as `"Qwen/Qwen3-0.6B"`',
        read=read_model,
    )
    max_num_batched_tokens: int = option(
        16384, "tokens of one step; longer prompts are computed in chunks", ge=1, le=MAX_COUNT
    )
    # The state on the device has a row for each of these sequences, used or not.
    max_num_seqs: int = option(512, "sequences that run at the same time", ge=1, le=65536)
    max_model_len: int | None = option(
        4096,
        "prompt plus output of one request; the model's own limit if that is lower, or for `None`",
        ge=1,
        le=MAX_COUNT,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "part of the GPU's memory to use, weights and KV cache included",
        gt=0,
        le=1,
        use="a number such as 0.9, a fraction above 0, at most 1",
    )
    tensor_parallel_size: int = option(1, "ranks that the model is split over", ge=1, le=MAX_COUNT)
    enforce_eager: bool = option(
        False, "launch the operations of a step one by one, without CUDA graphs"
    )
    kvcache_block_size: int = option(
        256, "tokens of a KV block, a multiple of 16", ge=16, le=MAX_COUNT, multiple_of=16
    )
    num_kvcache_blocks: int | None = option(
        None, "KV blocks; `None`: as many as fit into memory", ge=1, le=MAX_COUNT
    )
    state_snapshot_share: float = option(
        0.25,
        "for models with recurrent layers: part of the memory for KV blocks and states that keeps "
        "states for later prompts",
        ge=0,
        le=0.9,
    )
    dtype: str = option(
        "auto",
        '`"auto"`: the checkpoint\'s on a GPU, float32 on a CPU; or `"float32"`, `"float16"`, '
        '`"bfloat16"`',
        choices=("auto", "float32", "float16", "bfloat16"),
        read=read_dtype,
    )
    quantization: str | None = option(
        None,
        'format of the weights; `None`: the checkpoint\'s; `"fp8"` or, on a CPU, `"int8"`: '
        'quantise a checkpoint that is not quantised; `"mxfp4"`: keep gpt-oss packed on a CPU, '
        "too; or the "
        "`quant_method` of the checkpoint",
        read=read_quantization,
    )
    kv_cache_dtype: str = option(
        "auto",
        'format of the KV cache; `"auto"`: `dtype`; `"fp8"`: half the bytes, in e4m3, with the '
        "checkpoint's scales or 1",
        choices=KV_CACHE_DTYPES,
        read=read_kv_cache_dtype,
    )
    mamba_ssm_cache_dtype: str = option(
        "auto",
        'dtype of the states of Gated DeltaNet; `"auto"`: the `mamba_ssm_dtype` of config.json; or '
        '`"float32"`; or `"bfloat16"`, half the bytes, less precise',
        choices=STATE_DTYPES,
        read=read_dtype,
    )
    device: str = option(
        "auto",
        '`"auto"`: cuda where there is one; or `"cuda"`, `"cuda:1"`, ..., `"cpu"`',
        read=read_device,
    )
    load_format: str = option(
        "auto",
        '`"auto"`: read the checkpoint; `"dummy"`: make random weights from config.json alone',
        choices=("auto", "dummy"),
        read=read_load_format,
    )
    enable_prefix_caching: bool = option(True, "keep KV blocks for requests that begin alike")
    scheduling_policy: Any = option(
        "throughput",
        'who starts next: `"throughput"`, `"fcfs"`, `"shortest-first"`, `"longest-first"`, '
        '`"priority"`, or an object of a class of your own',
        read=read_policy,
    )
    attention_backend: str = option(
        "auto",
        '`"auto"`: Triton, and flash-attn for long prompts; `"triton"`: Triton alone; '
        '`"flash-attn"`: flash-attn for all; `"torch"`: plain PyTorch, slow',
        choices=("auto", "flash-attn", "triton", "torch"),
    )
    kernels: str = option(
        "auto",
        'what layers compute with; `"auto"`: kernels made by hand for the device; `"plain"`: '
        'PyTorch\'s; `"compile"`: those that torch.compile makes',
        choices=("auto", "plain", "compile"),
    )
    batch_invariant: bool = option(
        False,
        "give a request the same tokens and log-probabilities, to the bit, whatever runs beside "
        "it; on one or two Hopper GPUs, in bfloat16, for models without Gated DeltaNet",
    )
    overlap: bool | None = option(
        None, "launch a step before the last one's tokens are read; `None`: on a GPU alone"
    )
    seed: int | None = option(
        None,
        "seed for requests that bring none; `None`: a fresh one each run",
        ge=0,
        le=MAX_COUNT,
    )
    symmetric_memory: bool = option(
        True, "let ranks read each other's GPU memory where they can, so that they sum faster"
    )
    start_timeout: float = option(
        1800.0, "seconds for all ranks to load the model", gt=0, le=1e6, use=SECONDS
    )
    step_timeout: float = option(
        60.0, "seconds for the ranks to answer a step", gt=0, le=1e6, use=SECONDS
    )
    trace: str | PathLike | None = option(
        None, "a file for a trace of the run, `.html` or `.jsonl`", read=read_trace
    )
    trace_text: bool = option(True, "write the text of prompts and outputs into the trace")

    @classmethod
    def from_options(cls, model: str | PathLike, options: dict[str, Any]) -> "Config":
        """Build a config from keyword options.

        As in vLLM, None means the default if None is no value of the option. An unknown name raises
        TypeError with the nearest option or the remedy.
        """
        known = options_of(Config)
        foreign = OF_SAMPLING_PARAMS | OPTIONS
        given = refuse_unknown_names("LLM", "option", {"model": model, **options}, known, foreign)
        for name in [*options]:
            if given.get(name, "") is None and not known[name].takes_none:
                del given[name]
        return cls(**given)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def num_batch_slots(self) -> int:
        """The most sequences that can run, since each decoding sequence takes a token per step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)
