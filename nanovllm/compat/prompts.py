"""vLLM's types of prompts: plain dicts, which `LLM.generate` takes whoever makes them."""

from typing import TypedDict


class TextPrompt(TypedDict):
    prompt: str


class _Text(TypedDict, total=False):
    prompt: str  # what the ids were made of, for `RequestOutput.prompt`


class TokensPrompt(_Text):
    prompt_token_ids: list[int]
