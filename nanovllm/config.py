"""The user's options: frozen, validated, each error naming field, value and remedy.

Holds what the user asked for. What the engine discovers (the checkpoint's dtype, the number of KV blocks that fit, the
length the model supports) is returned by whoever discovers it and never written back here.
"""

import difflib
import re
from dataclasses import dataclass, fields
from typing import Any


MAX_NUM_SEQS = 65536  # the running state has a row for each, whether it is used or not


@dataclass(frozen=True)
class Config:
    """Options of `LLM`. Sizes are counted in tokens unless the name says otherwise.

    model: a folder in Hugging Face form, or a hub id such as "Qwen/Qwen3-0.6B".
    max_num_batched_tokens: tokens of one step; longer prompts are computed in chunks.
    max_num_seqs: sequences that run at the same time.
    max_model_len: prompt plus output of one request; the model's own limit applies if it is lower.
    gpu_memory_utilization: the part of the GPU's memory this LLM may use, weights and KV cache included.
    tensor_parallel_size: ranks the model is split over.
    enforce_eager: run without CUDA graphs.
    kvcache_block_size: tokens of a KV block.
    num_kvcache_blocks: KV blocks; None: as many as fit into memory.
    dtype: "auto" (the checkpoint's on a GPU, float32 on a CPU), "float32", "float16" or "bfloat16".
    device: "auto" (cuda when there is one), "cuda", "cuda:1", ..., "cpu".
    load_format: "auto" reads the checkpoint; "dummy" makes random weights from config.json alone.
    enable_prefix_caching: keep finished KV blocks and share them with requests that begin alike.
    attention_backend: "auto", "flash-attn", "triton" or "torch".
    kernels: what the model's layers compute with. "auto": what is made by hand for the device; "plain": PyTorch alone;
        "compile": torch.compile makes them of the plain layers; "cpp": on a CPU, C++, compiled at the start by g++ or
        clang++, for float32.
    overlap: launch the next step before the last one's tokens are read; None: on a GPU yes, on a CPU no.
    seed: seed of the noise for requests that bring none; None: a fresh one each run.
    symmetric_memory: let ranks read each other's GPU memory, which makes their sums faster, where they can.
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
    def from_options(cls, model: str, options: dict[str, Any]) -> "Config":
        """Build a config from keyword options; an unknown one raises TypeError and names the nearest."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"
                raise TypeError(f"LLM has no option {name!r}: {hint}")
        return cls(model, **options)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise TypeError(f"model is {self.model!r}: give a folder or a hub id such as 'Qwen/Qwen3-0.6B'")
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "tensor_parallel_size"):
            self._check_int(name, 1)
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}: use {MAX_NUM_SEQS} or less")
        self._check_int("kvcache_block_size", 16)
        if self.kvcache_block_size % 16:
            raise ValueError(f"kvcache_block_size is {self.kvcache_block_size}: use a multiple of 16")
        if self.num_kvcache_blocks is not None:
            self._check_int("num_kvcache_blocks", 1)
        if self.seed is not None:
            self._check_int("seed", 0)
        if not isinstance(self.gpu_memory_utilization, (int, float)) or isinstance(self.gpu_memory_utilization, bool):
            raise TypeError(f"gpu_memory_utilization is {self.gpu_memory_utilization!r}: use a number such as 0.9")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}: use a fraction above 0, at most 1")
        self._check_seconds("start_timeout")
        self._check_seconds("step_timeout")
        for name in ("enforce_eager", "enable_prefix_caching", "symmetric_memory", "overlap"):
            if not isinstance(getattr(self, name), bool) and not (name == "overlap" and self.overlap is None):
                raise TypeError(f"{name} is {getattr(self, name)!r}: use True or False")
        self._check_choice("dtype", ("auto", "float32", "float16", "bfloat16"))
        self._check_choice("load_format", ("auto", "dummy"))
        self._check_choice("kernels", ("auto", "plain", "compile", "cpp"))
        self._check_choice("attention_backend", ("auto", "flash-attn", "triton", "torch"))
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device is {self.device!r}: use 'auto', 'cuda', 'cuda:N' or 'cpu'")

    def _check_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}: use an integer")
        if value < least:
            raise ValueError(f"{name} is {value}: use {least} or more")

    def _check_seconds(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}: use a number of seconds")
        if not 0 < value <= 1e6:
            raise ValueError(f"{name} is {value}: use a number of seconds above 0, at most 1e6")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        # An array, compared with a name, gives an array and no answer.
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name} is {value!r}: use one of {', '.join(map(repr, choices))}")
