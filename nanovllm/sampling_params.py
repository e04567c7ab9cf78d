"""How one request's tokens are sampled and when it ends."""

import math
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from nanovllm.checks import (
    ABOVE_ZERO,
    Range,
    check_choice,
    keep,
    name_the_nearest,
    shown,
    token_ids,
)
from nanovllm.constraint_checks import check_constraints
from nanovllm.structured_outputs import StructuredOutputsParams, check_form

MAX_LOGPROBS = 20
INVALID_TOKEN = -1  # what is sampled from logits that are NaN or infinite
LogitsProcessor = Callable[[list[int], Any], Any]  # as SamplingParams describes it
# Below this, the noise of sampling is smaller than the rounding of any two logits: the likeliest
# token is sampled.
GREEDY_BELOW = 1e-8
NUM_LOGPROBS = Range(
    int, 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or None", none=True
)
LIMITS = {
    "temperature": Range(float, 0, 1e38, "0 (greedy) or a positive number, at most 1e38"),
    "top_k": Range(int, -1, math.inf, "an integer, 1 or more, or 0 or -1 for all tokens"),
    "top_p": Range(float, ABOVE_ZERO, 1, "a number above 0, at most 1"),
    "min_p": Range(float, 0, 1, "a number from 0 to 1"),
    "max_tokens": Range(
        int, 0, math.inf, "an integer, 1 or more, or None for as many as fit", none=True
    ),
    "min_tokens": Range(int, 0, 2**31 - 1, "an integer from 0 to 2**31 - 1"),
    "seed": Range(int, 0, 2**63 - 1, "an integer from 0 to 2**63 - 1, or None", none=True),
    "n": Range(int, 1, math.inf, "an integer, 1 or more"),
    "logprobs": NUM_LOGPROBS,
    "prompt_logprobs": NUM_LOGPROBS,
    "repetition_penalty": Range(
        float, ABOVE_ZERO, sys.float_info.max, "a number above 0; 1 changes nothing"
    ),
    "presence_penalty": Range(float, -2, 2, "a number from -2 to 2; 0 changes nothing"),
    "frequency_penalty": Range(float, -2, 2, "a number from -2 to 2; 0 changes nothing"),
    "priority": Range(int, -(2**63), 2**63 - 1, "an integer of 64 bits; lower ones go first"),
}


@name_the_nearest("parameter")
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks for. Names and meanings are vLLM's; the order of application is in the
    sampler's file.

    temperature: divides the logits. 0 is greedy: the likeliest token, and so is any below 1e-8,
        which is kept as 0.
    top_k: sample from the k likeliest tokens; 0 or -1: from all.
    top_p: sample from the likeliest tokens that together reach this probability, the one that
        crosses it included.
    min_p: sample from tokens at least this fraction as likely as the likeliest.
    max_tokens: the most tokens of the output; None: as many as max_model_len leaves room for; 0,
        for who asks for prompt_logprobs alone: nothing is sampled.
    min_tokens: the fewest; nothing ends the output before.
    ignore_eos: go on past end-of-sequence.
    stop: a string or strings that end the output, whose text is cut before the first of them.
        token_ids keeps every token that was sampled.
    stop_token_ids: tokens that end the output, as end-of-sequence does. The token that ended it is
        in token_ids, and not in the text.
    seed: the same tokens in any batch; completion i of n uses seed + i. None: the LLM's own noise.
    n: completions of the prompt, which is computed once.
    logprobs: report, for each token, its log-probability and those of this many likeliest, by the
        model's own logits.
    prompt_logprobs: report the same for each token of the prompt but the first.
    repetition_penalty: above 1 disfavours tokens of prompt and output, below 1 favours them.
    presence_penalty: subtracted from a token's logit if it is in the output.
    frequency_penalty: subtracted from a token's logit for each time it is in the output.
    logit_bias: {token id: what is added to its logit}, each from -100 to 100. Kept as pairs.
    allowed_token_ids: the only tokens that are sampled. End-of-sequence is one only if it is here.
    bad_words: texts that must not be in the output, by their tokens with and without a space before
        them: the last of these tokens is not sampled right after the others. A list of token ids
        may stand for a text.
    logits_processors: functions (token ids of the output so far, logits [V] float32, a tensor) ->
        logits. They run in this process, one row after the other, and a step waits for them. The
        logits are on the model's device, or on the CPU if there are several ranks.
    structured_outputs: what form the text must have, such as JSON by a schema: a
        StructuredOutputsParams, or a dict of its parameters. The output ends with "stop" where the
        form is complete; "length" says that it is cut. Stop strings end it as ever.
    include_stop_str_in_output: keep what ended the output, a stop string or a token, in its text.
    skip_special_tokens: leave special tokens, such as end-of-sequence, out of the text.
    priority: where the LLM's scheduling_policy is "priority", requests with lower numbers go first.

    Integers may be NumPy's. A parameter that is unknown or of a wrong type raises TypeError, one
    out of range ValueError. The noise has 23 random bits for a token: one that is less likely than
    about 6e-8 is sampled more rarely than it should be, or never.
    """

    temperature: float = 1.0
    _: KW_ONLY
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | tuple[str, ...] | None = ()  # kept as a tuple
    stop_token_ids: list[int] | tuple[int, ...] | None = ()  # likewise
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | tuple[tuple[int, float], ...] | None = ()  # kept as pairs
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str | tuple[int, ...], ...] | None = ()  # kept as a tuple
    logits_processors: list[LogitsProcessor] | tuple[LogitsProcessor, ...] | None = ()  # likewise
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0

    def __post_init__(self) -> None:
        for name, limits in LIMITS.items():
            limits.check(self, name)
        if self.temperature < GREEDY_BELOW:
            keep(self, "temperature", 0.0)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens is 0: use 1 or more, or ask for prompt_logprobs")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, max_tokens is {self.max_tokens}: "
                "lower the one or raise the other"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_choice(self, name, (True, False))
        if any_given(self.stop, self.stop_token_ids):
            self._check_stops()
        edits = self.logit_bias, self.bad_words, self.logits_processors
        if any_given(*edits) or self.allowed_token_ids is not None:
            check_constraints(self)
        if self.structured_outputs is not None:
            check_form(self)

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = () if stop is None else stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
            raise TypeError(f"stop is {shown(self.stop)}: use a string or a list of strings")
        if "" in stop:
            raise ValueError(
                "stop holds an empty string, which would end every output at once: leave it out"
            )
        given = () if self.stop_token_ids is None else self.stop_token_ids
        ids = token_ids("stop_token_ids", given)
        # Frozen, so the caller's list must not change it.
        keep(self, "stop", tuple(stop))
        keep(self, "stop_token_ids", ids)

    @property
    def barred_sequences(self) -> list[tuple[int, ...]]:
        """The bad_words that are token ids, as all are once a request has been checked."""
        return [word for word in self.bad_words or () if isinstance(word, tuple)]

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed otherwise than by penalties."""
        edits = self.logit_bias or self.bad_words or self.logits_processors
        return bool(edits) or self.allowed_token_ids is not None

    @property
    def penalizes(self) -> bool:
        """Whether tokens that are there already become less or more likely."""
        additive = self.presence_penalty != 0 or self.frequency_penalty != 0
        return additive or self.repetition_penalty != 1

    @property
    def is_plain(self) -> bool:
        """Whether temperature and seed alone decide, and nothing but the token is asked for."""
        return self.logprobs is None and self.samples_plainly

    @property
    def samples_plainly(self) -> bool:
        """Whether temperature and seed alone decide which token is sampled."""
        no_filter = self.top_k <= 0 and self.top_p == 1 and self.min_p == 0
        no_filter = no_filter or self.temperature == 0  # the likeliest token passes them all
        free = not (self.min_tokens or self.penalizes or self.edits_logits)
        return no_filter and free and self.structured_outputs is None


def any_given(*lists: Any) -> bool:
    """Whether any list of a SamplingParams is another than the default, an empty tuple."""
    return any([not isinstance(one, tuple) or one for one in lists])


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What the sampler must know of a sequence whose parameters are not plain."""

    params: SamplingParams
    stop_ids: frozenset[int]  # not to be sampled before min_tokens
    num_prompt_tokens: int
    token_ids: list[int]  # what penalties count: all tokens before the first that is sampled
    # Which tokens may come next depends on the tokens before: the host says so, step by step.
    waits: bool = False

    @property
    def samples_plainly(self) -> bool:
        """Whether temperature and seed alone decide which token is sampled."""
        return self.params.samples_plainly and not self.waits
