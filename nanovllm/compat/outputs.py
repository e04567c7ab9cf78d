"""What calls return, with vLLM's attributes: `output.outputs[0].text` beside `output["text"]`.

Dicts they remain: for JSON, pickle, copies, comparisons, and for whoever knows of no attributes.
Attributes are made of the dict when they are read, so they cost nothing else.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from nanovllm.compat.logprobs import Logprob, Texts, TokenTexts, with_ranks
from nanovllm.engine.sequence import Sequence

OF_PROMPT = ("id", "prompt_token_ids", "num_cached_tokens", "prompt_logprobs")


def item(name: str) -> Any:
    """The dict's item as an attribute; None if it has none."""
    return property(lambda self: self.get(name))


class Output(dict[str, Any]):
    """A dict that may have log-probabilities."""

    _texts: Texts  # of tokens
    _counts: dict[str, int | None]  # item -> how many likeliest tokens it was asked for; None: none

    def _ranked(self, name: str) -> list[dict[int, Logprob] | None] | None:
        rows, count = self.get(name), self._counts[name] or 0
        if rows is None:
            return None
        # A prompt's first token has no row.
        return [row and with_ranks(row, count, self._texts) for row in rows]

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the tokenizer stays behind, so the texts of these tokens come along."""
        parts = [self, *self.get("completions", ())]
        rows = [row for part in parts for name in self._counts for row in part.get(name) or ()]
        tokens = {token for row in rows for token in row or ()}
        return vars(self) | {"_texts": {token: self._texts[token] for token in tokens}}


class CompletionOutput(Output):
    """One completion.

    index: its place among the n of its prompt.
    logprobs: if they were asked for, a dict {token id: Logprob} for each token.
    The others are what the dict has, None where it has none.
    """

    text = item("text")
    token_ids = item("token_ids")
    finish_reason = item("finish_reason")
    stop_reason = item("stop_reason")
    error = item("error")
    cumulative_logprob = item("cumulative_logprob")
    logprobs = property(lambda self: self._ranked("logprobs"))

    def __init__(self, values: dict[str, Any], request: "RequestOutput", index: int) -> None:
        super().__init__(values)
        self.index, self._texts, self._counts = index, request._texts, request._counts


class RequestOutput(Output):
    """A request that has ended.

    request_id: a string, as vLLM's are.
    prompt: its text, a conversation's as the chat template wrote it; None of token ids.
    outputs: its completions, as many as it asked for.
    prompt_logprobs: if they were asked for, a dict {token id: Logprob} for each token, or None.
    The others are what the dict has.
    """

    finished = True
    prompt_token_ids = item("prompt_token_ids")
    num_cached_tokens = item("num_cached_tokens")
    prompt_logprobs = property(lambda self: self._ranked("prompt_logprobs"))

    def __init__(self, values: dict[str, Any], request: Sequence, texts: Texts) -> None:
        super().__init__(values)
        self.request_id = str(request.id)
        self.prompt = request.prompt_text
        self._texts = texts
        counts = ("logprobs", "prompt_logprobs")
        self._counts = {name: getattr(request.params, name, None) for name in counts}

    @property
    def outputs(self) -> list[CompletionOutput]:
        own = {name: value for name, value in self.items() if name not in OF_PROMPT}
        completions = self.get("completions", [own])
        return [CompletionOutput(one, self, i) for i, one in enumerate(completions)]


def make_view(tokenizer: Any) -> Callable[[dict[str, Any], Sequence], RequestOutput]:
    """What makes a RequestOutput of a dict, and of the request that has ended with it."""
    return partial(RequestOutput, texts=TokenTexts(tokenizer))
