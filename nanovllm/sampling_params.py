"""How one request's tokens are drawn and when it ends."""

import math
import sys
from dataclasses import KW_ONLY, dataclass

ABOVE_ZERO = math.ulp(0.0)
MAX_LOGPROBS = 20
INVALID_TOKEN = -1  # what is sampled from logits that are NaN or infinite


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names, meanings and order of application are vLLM's (the order is in layers/sampler.py).

    temperature: 0 is greedy.
    top_k: draw from the k likeliest tokens; 0 or -1: from all.
    top_p: draw from the likeliest tokens that together reach this probability, the one that crosses it included.
    min_p: draw from tokens at least this fraction as likely as the likeliest.
    max_tokens, min_tokens: the most and the fewest tokens to draw; nothing ends the output before min_tokens.
    ignore_eos: go on past end-of-sequence.
    stop: strings that end the output, which is cut before the first of them. token_ids keeps every token drawn.
    stop_token_ids: tokens that end the output, as end-of-sequence does.
    seed: the same tokens in any batch; completion i of n uses seed + i. None: the engine's own noise.
    n: completions of the prompt, which is computed once.
    logprobs: report, for each token, its log-probability and those of this many likeliest, by the model's own logits.
    repetition_penalty: above 1 disfavours tokens of prompt and output, below 1 favours them.
    presence_penalty, frequency_penalty: taken off a token's logit if it is in the output, and for each time it is.
    """

    temperature: float = 1.0
    _: KW_ONLY
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | tuple[str, ...] | None = ()  # kept as a tuple
    stop_token_ids: list[int] | tuple[int, ...] | None = ()  # likewise
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        self._check("temperature", float, 0, 1e38, "0 (greedy) or a positive number, at most 1e38")
        self._check("top_k", int, -1, math.inf, "an integer, 1 or more, or 0 or -1 for all tokens")
        self._check("top_p", float, ABOVE_ZERO, 1, "a number above 0, at most 1")
        self._check("min_p", float, 0, 1, "a number from 0 to 1")
        self._check("max_tokens", int, 1, math.inf, "an integer, 1 or more")
        self._check("min_tokens", int, 0, 2**31 - 1, "an integer from 0 to 2**31 - 1")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, max_tokens is {self.max_tokens}: lower the one or raise the other"
            )
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos is {self.ignore_eos!r}: use True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._keep_tuple("stop", stop, str, "a string or a list of strings")
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which would end every output at once: leave it out")
        self._keep_tuple("stop_token_ids", self.stop_token_ids, int, "a list of token ids")
        if self.seed is not None:
            self._check("seed", int, 0, 2**63 - 1, "an integer from 0 to 2**63 - 1, or None")
        self._check("n", int, 1, math.inf, "an integer, 1 or more")
        if self.logprobs is not None:
            self._check("logprobs", int, 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or None")
        self._check("repetition_penalty", float, ABOVE_ZERO, sys.float_info.max, "a number above 0; 1 changes nothing")
        self._check("presence_penalty", float, -2, 2, "a number from -2 to 2; 0 changes nothing")
        self._check("frequency_penalty", float, -2, 2, "a number from -2 to 2; 0 changes nothing")

    def _check(self, name: str, kind: type, least: float, most: float, remedy: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, kind)) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}: use {remedy}")
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}: use {remedy}")

    def _keep_tuple(self, name: str, values, kind: type, remedy: str) -> None:
        if values is None:
            values = ()
        if not isinstance(values, (list, tuple)) or not all(type(value) is kind for value in values):
            raise TypeError(f"{name} is {values!r}: use {remedy}")
        object.__setattr__(self, name, tuple(values))  # frozen, so the caller's list must not change it

    @property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_plain(self) -> bool:
        """Temperature and seed alone decide what is drawn, and nothing but the token is asked for."""
        no_filter = self.top_k <= 0 and self.top_p == 1 and self.min_p == 0
        no_filter = no_filter or self.temperature == 0  # the likeliest token passes them all
        return no_filter and self.min_tokens == 0 and self.logprobs is None and not self.penalizes


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What layers/sampler.py must know of a sequence whose parameters are not plain."""

    params: SamplingParams
    stop_ids: frozenset[int]  # not to be drawn before min_tokens
    num_prompt_tokens: int
    token_ids: list[int]  # what penalties count: all tokens before the first that is drawn
