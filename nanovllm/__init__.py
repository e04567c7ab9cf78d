"""Offline LLM inference that one person can read in an afternoon.

    from nanovllm import LLM, SamplingParams
"""

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"
