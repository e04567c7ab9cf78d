"""Offline LLM inference: a plain PyTorch core to read, and what makes it fast beside it.

from nanovllm import LLM, SamplingParams
"""

from time import perf_counter

_begin = perf_counter()

from pathlib import Path  # noqa: E402

from nanovllm.llm import LLM  # noqa: E402
from nanovllm.log import count_import  # noqa: E402
from nanovllm.sampling_params import SamplingParams  # noqa: E402

__all__ = ["LLM", "TINY_MODEL", "SamplingParams"]
__version__ = "0.1.0"

TINY_MODEL = Path(__file__).parent / "assets" / "tiny-qwen3"  # a small model of Python code, for trying things out

count_import(perf_counter() - _begin)
