"""The user's options: frozen, checked, each error with field, value and remedy.

Holds what the user asked for. What is found out later (the checkpoint's dtype, how many KV blocks
fit, the length that the model supports) is returned by whoever finds it out, and never written back
here.
"""

import re
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from nanovllm.checks import as_integer, as_number, refuse_unknown_names, shown

MAX_NUM_SEQS = 65536  # the running state has a row for each, whether it is used or not


@dataclass(frozen=True)
class Config:
    """Options of `LLM`. Sizes are counted in tokens unless the name says otherwise. Integers may be
    NumPy's.

    A value of a wrong type raises TypeError, one out of range ValueError.

    model: a folder in Hugging Face form, or a hub id such as "Qwen/Qwen3-0.6B".
    max_num_batched_tokens: tokens of one step; longer prompts are computed in chunks.
    max_num_seqs: sequences that run at the same time.
    max_model_len: prompt plus output of one request; the model's own limit applies if it is lower.
    gpu_memory_utilization: the part of the GPU's memory this LLM may use, weights and KV cache
        included.
    tensor_parallel_size: ranks the model is split over.
    enforce_eager: launch the operations of every step one by one; record none to replay them.
    kvcache_block_size: tokens of a KV block.
    num_kvcache_blocks: KV blocks; None: as many as fit into memory.
    dtype: "auto" (the checkpoint's on a GPU, float32 on a CPU), "float32", "float16" or "bfloat16".
    device: "auto" (cuda when there is one), "cuda", "cuda:1", ..., "cpu".
    load_format: "auto" reads the checkpoint; "dummy" makes random weights from config.json alone.
    enable_prefix_caching: keep finished KV blocks and share them with requests that begin alike.
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
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    kernels: str = "auto"
    overlap: bool | None = None
    seed: int | None = None
    symmetric_memory: bool = True
    start_timeout: float = 1800.0
    step_timeout: float = 60.0

    @classmethod
    def from_options(cls, model: str | PathLike, options: dict[str, Any]) -> "Config":
        """Build a config from keyword options; TypeError names the one nearest to an unknown."""
        refuse_unknown_names("LLM", "option", options, cls.__dataclass_fields__)
        return cls(fspath(model) if isinstance(model, PathLike) else model, **options)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise TypeError(
                f"model is {shown(self.model)}: give a folder or a hub id such as 'Qwen/Qwen3-0.6B'"
            )
        self._check_integer("max_num_batched_tokens", 1)
        self._check_integer("max_num_seqs", 1)
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}: use {MAX_NUM_SEQS} or less")
        self._check_integer("max_model_len", 1)
        self._check_integer("tensor_parallel_size", 1)
        self._check_integer("kvcache_block_size", 16)
        if self.kvcache_block_size % 16:
            raise ValueError(
                f"kvcache_block_size is {self.kvcache_block_size}: use a multiple of 16"
            )
        if self.num_kvcache_blocks is not None:
            self._check_integer("num_kvcache_blocks", 1)
        if self.seed is not None:
            self._check_integer("seed", 0)
        self._check_number(
            "gpu_memory_utilization", 1, "a number such as 0.9", "a fraction above 0, at most 1"
        )
        for name in ("start_timeout", "step_timeout"):
            self._check_number(
                name, 1e6, "a number of seconds", "a number of seconds above 0, at most 1e6"
            )
        for name in ("enforce_eager", "enable_prefix_caching", "symmetric_memory"):
            self._check_choice(name, (True, False), TypeError, "True or False")
        self._check_choice("overlap", (True, False, None), TypeError, "True or False")
        self._check_choice("dtype", ("auto", "float32", "float16", "bfloat16"))
        self._check_choice("load_format", ("auto", "dummy"))
        self._check_choice("kernels", ("auto", "plain", "compile"))
        self._check_choice("attention_backend", ("auto", "flash-attn", "triton", "torch"))
        if not isinstance(self.device, str) or not re.fullmatch(
            r"auto|cpu|cuda(:\d+)?", self.device
        ):
            raise ValueError(
                f"device is {shown(self.device)}: use 'auto', 'cuda', 'cuda:N' or 'cpu'"
            )

    def _check_integer(self, name: str, least: int) -> None:
        value = as_integer(getattr(self, name))
        if value is None:
            raise TypeError(f"{name} is {shown(getattr(self, name))}: use an integer")
        if not least <= value < 2**63:
            raise ValueError(f"{name} is {shown(value)}: use {least} or more, below 2**63")
        object.__setattr__(self, name, value)

    def _check_number(self, name: str, most: float, kind: str, remedy: str) -> None:
        value = as_number(getattr(self, name))
        if value is None:
            raise TypeError(f"{name} is {shown(getattr(self, name))}: use {kind}")
        if not 0 < value <= most:
            raise ValueError(f"{name} is {shown(value)}: use {remedy}")
        object.__setattr__(self, name, float(value))

    def _check_choice(
        self,
        name: str,
        choices: tuple[Any, ...],
        error: type[Exception] = ValueError,
        remedy: str = "",
    ) -> None:
        value = getattr(self, name)
        # By type first: 1 equals True, and an array compares with anything, item by item.
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            remedy = remedy or f"one of {', '.join(map(repr, choices))}"
            raise error(f"{name} is {shown(value)}: use {remedy}")
