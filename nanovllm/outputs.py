"""What calls return: dicts, with vLLM's attributes: `output.outputs[0].text` beside
`output["text"]`; and what a step reports.

Dicts are for JSON, pickle, copies, comparisons, and for whoever knows of no attributes. Attributes
are made of the dict when they are read, so they cost nothing else.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

Texts = Mapping[int, str | None]  # token id -> its text alone, None without a tokenizer
OF_PROMPT = ("id", "prompt_token_ids", "num_cached_tokens", "prompt_logprobs")


class Logprob(NamedTuple):
    """The log-probability of a token at some place."""

    logprob: float
    rank: int | None  # 1: the likeliest; None: beyond as many as were asked for
    decoded_token: str | None


def item(name: str) -> Any:
    """Make an attribute of the dict's item; None if it has none."""
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

    def __init__(
        self,
        values: dict[str, Any],
        *,
        request_id: str,
        prompt: str | None,
        texts: Texts,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        """Args:
        values: The dict.
        texts: The texts of tokens, for the attributes of log-probabilities.
        logprobs, prompt_logprobs: How many likeliest tokens the request asked for.
        """
        super().__init__(values)
        self.request_id = request_id
        self.prompt = prompt
        self._texts = texts
        self._counts = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}

    @property
    def outputs(self) -> list[CompletionOutput]:
        own = {name: value for name, value in self.items() if name not in OF_PROMPT}
        completions = self.get("completions", [own])
        return [CompletionOutput(one, self, i) for i, one in enumerate(completions)]


def with_ranks(row: dict[int, float], count: int, texts: Texts) -> dict[int, Logprob]:
    """Add ranks and texts to one place's log-probabilities: of the token that is there, which comes
    first, and of the `count` likeliest.
    """
    by_rank = sorted(row, key=row.__getitem__, reverse=True)
    ranks: dict[int, int | None] = {token: i for i, token in enumerate(by_rank, 1)}
    if len(row) > count:  # the first is not among the likeliest
        ranks[next(iter(row))] = None
    return {token: Logprob(value, ranks[token], texts[token]) for token, value in row.items()}


class StepRecord(NamedTuple):
    """What one step did, for those who watch. What it counts is so at the step's launch.

    With overlap a step launches its own tokens and waits for those of the step before: `seconds`
    and `finished` then belong to these.
    """

    number: int  # of this step, from 0
    time: float  # at which it began, in seconds of time.perf_counter
    prefill_tokens: int
    decode_tokens: int  # one for each decoding sequence
    running: int  # sequences that hold a batch slot
    waiting: int  # sequences that wait for one
    blocks_in_use: int  # KV blocks that sequences hold
    num_blocks: int  # KV blocks there are
    preemptions: int  # sequences that this step preempted
    seconds: float = 0.0  # from its beginning to its end, on the host's clock
    finished: tuple[int, ...] = ()  # ids of the requests that ended with it
