"""Offline LLM inference: a plain PyTorch core to read, and what makes it fast beside it.

from nanovllm import LLM, SamplingParams
"""

from time import perf_counter

_begin = perf_counter()

from pathlib import Path

from nanovllm.frontend.log import count_import
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputsParams

__all__ = ["LLM", "TINY_MODEL", "SamplingParams", "StructuredOutputsParams"]
__version__ = "0.1.0"

# A small model of Python code, for trying things out.
TINY_MODEL = Path(__file__).parent / "assets" / "tiny-qwen3"

count_import(perf_counter() - _begin)
