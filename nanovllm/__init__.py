"""Offline LLM inference that one person can read in an afternoon.

from nanovllm import LLM, SamplingParams
"""

from pathlib import Path

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "TINY_MODEL", "SamplingParams"]
__version__ = "0.1.0"

TINY_MODEL = Path(__file__).parent / "assets" / "tiny-qwen3"  # a small model of Python code, for trying things out
