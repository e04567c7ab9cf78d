"""The outputs of calls, and the record of a step.

An output is a dict that also has vLLM's attributes: `output.outputs[0].text` is `output["text"]`.
A dict suits JSON, pickle, copies and comparisons. The attributes are made from the dict when they
are read, so they cost nothing otherwise.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from nanovllm.checks import no_attribute
from nanovllm.foreign_names import OF_OUTPUT

Texts = Mapping[int, str | None]  # token id -> the text of this token alone; None: no tokenizer
OF_PROMPT = ("id", "prompt_token_ids", "num_cached_tokens", "prompt_logprobs")


class Logprob(NamedTuple):
    """The log-probability of a token at one position."""

    logprob: float
    rank: int | None  # 1: the likeliest token; None: not among the likeliest that were requested
    decoded_token: str | None


def item(name: str) -> Any:
    """Make a property that reads an item of the dict, or None if the dict does not have it."""
    return property(lambda self: self.get(name))


class Output(dict[str, Any]):
    """A dict that may have log-probabilities."""

    _texts: Texts
    _counts: dict[str, int | None]  # item -> the number of likeliest tokens requested; None: none
    lora_request = None  # no adapter is ever used

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute(type(self).__name__, name, OF_OUTPUT)

    def _ranked(self, name: str) -> list[dict[int, Logprob] | None] | None:
        rows, count = self.get(name), self._counts[name] or 0
        if rows is None:
            return None
        # The first token of a prompt has no log-probabilities: its row is None.
        return [row and with_ranks(row, count, self._texts) for row in rows]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle: the texts of the tokens replace the tokenizer."""
        parts = [self, *self.get("completions", ())]
        rows = [row for part in parts for name in self._counts for row in part.get(name) or ()]
        tokens = {token for row in rows for token in row or ()}
        return vars(self) | {"_texts": {token: self._texts[token] for token in tokens}}


class CompletionOutput(Output):
    """One completion of a prompt.

    index: The index of this completion among the n of its prompt.
    logprobs: If requested, a dict {token id: Logprob} for each token.
    The other attributes read the dict's items, and are None if the dict does not have the item.
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

    def finished(self) -> bool:
        """Tell whether it has ended, as all have that a call returns."""
        return True


class RequestOutput(Output):
    """A request that has ended.

    request_id: A string, as in vLLM.
    prompt: The text of the prompt; for a conversation, the text that the chat template made; None
        if the prompt was token ids.
    outputs: The n completions.
    prompt_logprobs: If requested, a dict {token id: Logprob} for each token, None for the first.
    The other attributes read the dict's items.
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
        """Build an output from its dict.

        Args:
            values: The items of the dict.
            texts: The texts of tokens, for the attributes of log-probabilities.
            logprobs, prompt_logprobs: How many of the likeliest tokens the request asked for.
        """
        super().__init__(values)
        self.request_id = request_id
        self.prompt = prompt
        self._texts = texts
        self._counts = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The completions of the prompt."""
        own = {name: value for name, value in self.items() if name not in OF_PROMPT}
        completions = self.get("completions", [own])
        return [CompletionOutput(one, self, i) for i, one in enumerate(completions)]


def with_ranks(row: dict[int, float], count: int, texts: Texts) -> dict[int, Logprob]:
    """Add ranks and texts to the log-probabilities of one position: those of the token at this
    position, which comes first, and of the `count` likeliest tokens.
    """
    by_rank = sorted(row, key=row.__getitem__, reverse=True)
    ranks: dict[int, int | None] = {token: i for i, token in enumerate(by_rank, 1)}
    if len(row) > count:  # the first token is not among the likeliest
        ranks[next(iter(row))] = None
    return {token: Logprob(value, ranks[token], texts[token]) for token, value in row.items()}


class StepRecord(NamedTuple):
    """The figures of one step, for those that watch a run. The counts are those at its launch.

    With overlap, a step launches its own tokens and waits for the tokens of the step before:
    `seconds` and `finished` then include the end of that earlier step.
    """

    number: int  # the number of this step, from 0
    time: float  # the time at which the step began, in seconds of time.perf_counter
    prefill_tokens: int
    decode_tokens: int  # one for each decoding sequence
    running: int  # sequences that hold a batch slot
    waiting: int  # sequences that wait for a batch slot
    blocks_in_use: int  # KV blocks that sequences hold
    num_blocks: int  # all KV blocks
    preemptions: int  # sequences that this step preempted
    seconds: float = 0.0  # from the step's beginning to its end, on the host's clock
    finished: tuple[int, ...] = ()  # ids of the requests that ended with the step
