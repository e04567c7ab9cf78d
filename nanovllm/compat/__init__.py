"""For those who come from vLLM: its types, whose names annotations and imports may use."""

from nanovllm.compat.logprobs import Logprob
from nanovllm.compat.outputs import CompletionOutput, RequestOutput
from nanovllm.compat.prompts import TextPrompt, TokensPrompt

__all__ = ["CompletionOutput", "Logprob", "RequestOutput", "TextPrompt", "TokensPrompt"]
