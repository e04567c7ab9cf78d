"""Offline LLM inference: a plain PyTorch core to read, and fast kernels beside it.

from nanovllm import LLM, SamplingParams
"""

from time import perf_counter

_begin = perf_counter()

from pathlib import Path

from nanovllm.engine.errors import AsleepError, ClosedError, InvalidLogitsError, RankError
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.frontend.inputs import TextPrompt, TokensPrompt
from nanovllm.frontend.log import count_import
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StepRecord
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "TINY_MODEL",
    "AsleepError",
    "ClosedError",
    "CompletionOutput",
    "InvalidLogitsError",
    "Logprob",
    "RankError",
    "RequestOutput",
    "SamplingParams",
    "SchedulingPolicy",
    "StepRecord",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
__version__ = "0.1.0"

# A small model of Python code, for trying things out.
TINY_MODEL = Path(__file__).parent / "assets" / "tiny-qwen3"

count_import(perf_counter() - _begin)
