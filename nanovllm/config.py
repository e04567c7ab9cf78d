"""The user's options: frozen, checked, each error with field, value and remedy.

Holds what the user asked for. What is found out later (the checkpoint's dtype, how many KV blocks
fit, the length that the model supports) is returned by whoever finds it out, and never written back
here.
"""

import re
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from nanovllm.checks import ABOVE_ZERO, Range, check_choice, keep, refuse_unknown_names, shown

SCHEDULING_POLICIES = ("throughput", "fcfs", "shortest-first", "longest-first", "priority")
MAX_NUM_SEQS = 65536  # the running state has a row for each, whether it is used or not
COUNT = Range(int, 1, 2**63 - 1, "an integer, 1 or more, below 2**63")
SECONDS = Range(float, ABOVE_ZERO, 1e6, "a number of seconds above 0, at most 1e6")
LIMITS = {
    "max_num_batched_tokens": COUNT,
    "max_num_seqs": Range(int, 1, MAX_NUM_SEQS, f"an integer from 1 to {MAX_NUM_SEQS}"),
    "max_model_len": Range(
        int, 1, 2**63 - 1, "an integer, 1 or more, below 2**63, or None", none=True
    ),
    "gpu_memory_utilization": Range(
        float, ABOVE_ZERO, 1, "a number such as 0.9, a fraction above 0, at most 1"
    ),
    "tensor_parallel_size": COUNT,
    "kvcache_block_size": Range(int, 16, 2**63 - 1, "a multiple of 16"),
    "num_kvcache_blocks": Range(int, 1, 2**63 - 1, "an integer, 1 or more, or None", none=True),
    "seed": Range(int, 0, 2**63 - 1, "an integer, 0 or more, below 2**63, or None", none=True),
    "start_timeout": SECONDS,
    "step_timeout": SECONDS,
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "enforce_eager": (True, False),
    "enable_prefix_caching": (True, False),
    "symmetric_memory": (True, False),
    "overlap": (True, False, None),
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "load_format": ("auto", "dummy"),
    "kernels": ("auto", "plain", "compile"),
    "attention_backend": ("auto", "flash-attn", "triton", "torch"),
}


@dataclass(frozen=True)
class Config:
    """Options of `LLM`. Sizes are counted in tokens unless the name says otherwise. Integers may be
    NumPy's.

    A value of a wrong type raises TypeError, one out of range ValueError.

    model: a folder in Hugging Face form, or a hub id such as "Qwen/Qwen3-0.6B".
    max_num_batched_tokens: tokens of one step; longer prompts are computed in chunks.
    max_num_seqs: the most sequences that run at the same time. On a CPU, scheduling_policy
        "throughput" runs fewer where more would make hardly more tokens a second.
    max_model_len: prompt plus output of one request; the model's own limit applies if it is lower,
        or if this is None.
    gpu_memory_utilization: the part of the GPU's memory this LLM may use, weights and KV cache
        included.
    tensor_parallel_size: ranks the model is split over.
    enforce_eager: launch the operations of every step one by one; record none to replay them.
    kvcache_block_size: tokens of a KV block.
    num_kvcache_blocks: KV blocks; None: as many as fit into memory.
    dtype: "auto" (the checkpoint's on a GPU, float32 on a CPU), "float32", "float16" or "bfloat16";
        a torch.dtype counts as its name.
    device: "auto" (cuda when there is one), "cuda", "cuda:1", ..., "cpu".
    load_format: "auto" reads the checkpoint; "dummy" makes random weights from config.json alone.
    enable_prefix_caching: keep what requests have in KV blocks, for others that begin alike.
    scheduling_policy: who starts next, and who gives way when KV blocks run out. "throughput": what
        lets all requests of a call end soonest; "fcfs": first come, first served; "shortest-first"
        and "longest-first", by max_tokens; "priority", by SamplingParams'; or an object with the
        methods of nanovllm.engine.policy.SchedulingPolicy.
    attention_backend: "auto", "flash-attn", "triton" or "torch".
    kernels: what the model's layers compute with. "auto": what is made by hand for the device (on
        a CPU and where g++ is, C++ that the first start compiles); "plain": PyTorch alone;
        "compile": torch.compile makes them of the plain layers.
    overlap: launch the next step before the last one's tokens are read; None: on a GPU yes, on a
        CPU no.
    seed: seed of the noise for requests that bring none; None: a fresh one each run.
    symmetric_memory: let ranks read each other's GPU memory, which makes their sums faster, where
        they can.
    start_timeout: seconds within which all ranks must have loaded the model.
    step_timeout: seconds within which the ranks must answer a step.
    trace: a file to write what the engine did to, at `close` or when the process ends: a page to
        watch it on (.html), or its events, one a line (.jsonl).
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    enable_prefix_caching: bool = True
    scheduling_policy: Any = "throughput"
    attention_backend: str = "auto"
    kernels: str = "auto"
    overlap: bool | None = None
    seed: int | None = None
    symmetric_memory: bool = True
    start_timeout: float = 1800.0
    step_timeout: float = 60.0
    trace: str | PathLike | None = None

    @classmethod
    def from_options(cls, model: str | PathLike, options: dict[str, Any]) -> "Config":
        """Build a config from keyword options; TypeError names the one nearest to an unknown."""
        given = {"model": model, **options}
        given = refuse_unknown_names("LLM", "option", given, cls.__dataclass_fields__)
        if isinstance(model, PathLike):
            given["model"] = fspath(model)
        return cls(**given)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise TypeError(
                f"model is {shown(self.model)}: give a folder or a hub id such as 'Qwen/Qwen3-0.6B'"
            )
        for name, limits in LIMITS.items():
            limits.check(self, name)
        if self.kvcache_block_size % 16:
            raise ValueError(
                f"kvcache_block_size is {self.kvcache_block_size}: use a multiple of 16"
            )
        self._name_dtype()
        for name, choices in CHOICES.items():
            check_choice(self, name, choices)
        if isinstance(self.scheduling_policy, str):
            other = ", or an object with the methods of SchedulingPolicy"
            check_choice(self, "scheduling_policy", SCHEDULING_POLICIES, other)
        if not isinstance(self.device, str) or not re.fullmatch(
            r"auto|cpu|cuda(:\d+)?", self.device
        ):
            raise ValueError(
                f"device is {shown(self.device)}: use 'auto', 'cuda', 'cuda:N' or 'cpu'"
            )
        if self.trace is not None:
            self._check_trace(
                fspath(self.trace) if isinstance(self.trace, PathLike) else self.trace
            )

    @property
    def num_batch_slots(self) -> int:
        """How many sequences can run: a decoding one takes a token of every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def _name_dtype(self) -> None:
        """Take a torch.dtype, too, without an import of torch, and PyTorch's shorter names."""
        given = str(self.dtype) if type(self.dtype).__name__ == "dtype" else self.dtype
        if isinstance(given, str):
            name = given.removeprefix("torch.")
            keep(self, "dtype", {"half": "float16", "float": "float32"}.get(name, name))

    def _check_trace(self, path: Any) -> None:
        remedy = "give a file name that ends in .html or .jsonl"
        if not isinstance(path, str):
            raise TypeError(f"trace is {shown(path)}: {remedy}")
        if not path.endswith((".html", ".jsonl")):
            raise ValueError(f"trace is {shown(path)}: {remedy}")
        keep(self, "trace", path)
