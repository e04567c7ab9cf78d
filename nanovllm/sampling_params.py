"""The parameters of one request: how tokens are sampled, the output's form, and when it ends."""

import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from nanovllm.checks import (
    name_the_nearest,
    read_allowed_ids,
    read_bad_words,
    read_biases,
    read_choices,
    read_processors,
    read_schema,
    read_stop_ids,
    read_stop_strings,
    short_repr,
)
from nanovllm.foreign_names import IN_FORM, PARAMETERS, Foreign
from nanovllm.options import check_options, keep, option, options_of

MAX_LOGPROBS = 20
INVALID_TOKEN = -1  # stands for the sampled token if logits are NaN or infinite, or all are barred
LogitsProcessor = Callable[[list[int], Any], Any]  # as SamplingParams describes it
# At a lower temperature, the noise of sampling is smaller than the rounding of the logits, so the
# likeliest token is sampled.
GREEDY_BELOW = 1e-8
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@name_the_nearest("parameter", IN_FORM)
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form that the whole text of an output must have.

    Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` is given. Names and
    meanings are vLLM's.

    json: a pydantic class stands for the schema that its model_json_schema() returns. The schema is
        kept as text. Properties come in its order. A format checks the shape alone: a date may be
        February 31. A keyword that cannot be enforced is refused, unless the schema has
        "x-guidance": {"lenient": true}.
    regex: without look-around, back-references and inner anchors.
    grammar: begins with `start` in Lark's notation, with `root` in GBNF (`root ::= ...`).
    disable_any_whitespace, whitespace_pattern: for json and json_object alone. By default at most
        one line break and 20 blanks stand between two parts.
    disable_additional_properties: where a schema says nothing of additionalProperties.

    Whether a form can be enforced is checked when a request asks for it. A wrong type raises
    TypeError, and a wrong value raises ValueError.
    """

    json: str | dict[str, Any] | type | None = option(
        None,
        "JSON that a schema describes: a dict, its text, or a class of pydantic's",
        read=read_schema,
    )
    regex: str | None = option(None, "what a regular expression matches as a whole")
    choice: list[str] | tuple[str, ...] | None = option(
        None, "one of these strings", read=read_choices
    )
    grammar: str | None = option(None, "what a grammar derives, in Lark's notation or GBNF's")
    json_object: bool | None = option(None, "`True`: a JSON object, whatever is in it")
    _: KW_ONLY
    disable_any_whitespace: bool = option(False, "no whitespace between the parts of the JSON")
    whitespace_pattern: str | None = option(
        None, "a regular expression of the whitespace between the parts of the JSON"
    )
    disable_additional_properties: bool = option(
        False, "no properties of an object but those that its schema lists"
    )

    @classmethod
    def of(cls, name: str, given: Any) -> "StructuredOutputsParams | None":
        """Return the value of the parameter `name`, which may be given as a dict."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            raise TypeError(
                f"{name} is {short_repr(given)}: "
                "use a StructuredOutputsParams, or a dict of its parameters"
            )
        try:
            return cls(**{str(key): value for key, value in given.items()})
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None

    def __post_init__(self) -> None:
        check_options(self)
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'nothing'} is given: use exactly one of "
                f"{', '.join(KINDS)}"
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                f"whitespace_pattern is {short_repr(self.whitespace_pattern)}, "
                "but disable_any_whitespace is True: use one of them"
            )

    @property
    def kind(self) -> str:
        """The name of the form that is given, one of KINDS."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


@name_the_nearest("parameter", PARAMETERS)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request.

    Names and meanings are vLLM's; the sampler's file says in which order they apply. Details that
    the declarations below do not say:

    temperature: a value below 1e-8 is kept as 0.
    max_tokens: 0 is for requests that want prompt_logprobs alone: nothing is sampled.
    min_tokens: nothing ends the output before it has so many tokens, unless its form is complete.
    stop: token_ids keeps every token that was sampled.
    n: the prompt is computed once. Completions that cannot start together wait, and find the
        prompt in the prefix cache.
    logprobs, prompt_logprobs: computed from the model's own logits, and reported for the token
        itself too. The first token of a prompt has none.
    logit_bias, bad_words, logits_processors, stop, stop_token_ids: kept as tuples, because the
        class is frozen; a dict as pairs. JSON's strings may stand for token ids in logit_bias.
    allowed_token_ids: end-of-sequence is sampled only if it is in this list.
    bad_words: a text is barred by its tokens, with and without a space before them: the last of
        these tokens is not sampled right after the others. A list of token ids may replace a text.
    logits_processors: functions (token ids of the output so far, logits [V] float32, a tensor) ->
        logits. They run in this process, one row after the other, and a step waits for them. The
        logits are on the model's device, or on the CPU if there are several ranks.
    structured_outputs: the output ends with finish_reason "stop" when the form is complete; with
        "length", it is cut short. Stop strings end the output as usual.

    Integers may be NumPy integers. A parameter that is unknown or of a wrong type raises TypeError,
    and a value out of range raises ValueError. The noise has 23 random bits per token, so a token
    that is less likely than about 6e-8 is sampled more rarely than it should be, or never.
    """

    temperature: float = option(
        1.0,
        "divides the logits; 0: always the likeliest token (greedy)",
        ge=0,
        le=1e38,
        use="0 (greedy) or a positive number, at most 1e38",
    )
    _: KW_ONLY
    top_k: int = option(
        0,
        "sample from the k likeliest tokens; 0 or -1: from all",
        ge=-1,
        use="an integer, 1 or more, or 0 or -1 for all tokens",
    )
    top_p: float = option(
        1.0, "sample from the likeliest tokens that together reach this probability", gt=0, le=1
    )
    min_p: float = option(
        0.0, "sample from tokens at least this fraction as likely as the likeliest", ge=0, le=1
    )
    max_tokens: int | None = option(
        64,
        "the most tokens of the output; `None`: as many as `max_model_len` leaves room for",
        ge=0,
        use="an integer, 1 or more, or None for as many as fit",
    )
    min_tokens: int = option(0, "the fewest tokens of the output", ge=0, le=2**31 - 1)
    ignore_eos: bool = option(False, "go on past end-of-sequence")
    stop: str | list[str] | tuple[str, ...] | None = option(
        (),
        "strings that end the output; `text` is cut before the first of them",
        read=read_stop_strings,
    )
    stop_token_ids: list[int] | tuple[int, ...] | None = option(
        (), "tokens that end the output; `text` leaves them out", read=read_stop_ids
    )
    seed: int | None = option(
        None,
        "seed of the noise, for the same tokens in any batch; completion i of n uses seed + i",
        ge=0,
        le=2**63 - 1,
    )
    n: int = option(
        1, "completions of the prompt; those beyond `max_num_seqs` wait; `stream` takes one", ge=1
    )
    logprobs: int | None = option(
        None,
        "report each token's log-probability, and those of so many likeliest, before filters",
        ge=0,
        le=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = option(
        None,
        "report log-probabilities of the prompt's tokens, and those of so many likeliest",
        ge=0,
        le=MAX_LOGPROBS,
    )
    repetition_penalty: float = option(
        1.0,
        "above 1 disfavours tokens of prompt and output, below 1 favours them",
        gt=0,
        le=sys.float_info.max,
        use="a number above 0; 1 changes nothing",
    )
    presence_penalty: float = option(
        0.0,
        "subtracted from a token's logit if it is in the output",
        ge=-2,
        le=2,
        use="a number from -2 to 2; 0 changes nothing",
    )
    frequency_penalty: float = option(
        0.0,
        "subtracted from a token's logit for each time it is in the output",
        ge=-2,
        le=2,
        use="a number from -2 to 2; 0 changes nothing",
    )
    logit_bias: dict[int, float] | tuple[tuple[int, float], ...] | None = option(
        (), "a dict of token ids and what is added to their logits, -100 to 100", read=read_biases
    )
    allowed_token_ids: list[int] | tuple[int, ...] | None = option(
        None, "the only tokens that are sampled", read=read_allowed_ids
    )
    bad_words: list[str] | tuple[str | tuple[int, ...], ...] | None = option(
        (), "texts that must not be in the output", read=read_bad_words
    )
    logits_processors: list[LogitsProcessor] | tuple[LogitsProcessor, ...] | None = option(
        (), "functions of the output so far and the next token's logits", read=read_processors
    )
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = option(
        None,
        "the form that the text must have, such as JSON by a schema",
        read=StructuredOutputsParams.of,
    )
    include_stop_str_in_output: bool = option(
        False, "keep what ended the output, a stop string or a token, in `text`"
    )
    skip_special_tokens: bool = option(
        True, "leave special tokens, such as end-of-sequence, out of `text`"
    )
    priority: int = option(
        0,
        'requests with lower numbers start first, if `scheduling_policy` is `"priority"`',
        ge=-(2**63),
        le=2**63 - 1,
        use="an integer of 64 bits; lower ones go first",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.temperature < GREEDY_BELOW:
            keep(self, "temperature", 0.0)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens is 0: use 1 or more, or ask for prompt_logprobs")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, max_tokens is {self.max_tokens}: "
                "lower the one or raise the other"
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError(
                "ignore_eos is True beside structured_outputs, which says where an output ends: "
                "leave one of them out"
            )

    def clone(self) -> "SamplingParams":
        """Return this object, since nothing changes it. `dataclasses.replace` makes another one."""
        return self

    @property
    def barred_sequences(self) -> list[tuple[int, ...]]:
        """The bad_words that are token ids. In a checked request, all are."""
        return [word for word in self.bad_words or () if isinstance(word, tuple)]

    @property
    def edits_logits(self) -> bool:
        """Whether anything but penalties changes the logits."""
        edits = self.logit_bias or self.bad_words or self.logits_processors
        return bool(edits) or self.allowed_token_ids is not None

    @property
    def penalizes(self) -> bool:
        """Whether tokens that have occurred become less or more likely."""
        additive = self.presence_penalty != 0 or self.frequency_penalty != 0
        return additive or self.repetition_penalty != 1

    @property
    def is_plain(self) -> bool:
        """Whether temperature and seed alone decide the token, and no log-probability is wanted."""
        return self.logprobs is None and self.samples_plainly

    @property
    def samples_plainly(self) -> bool:
        """Whether temperature and seed alone decide which token is sampled."""
        no_filter = self.top_k <= 0 and self.top_p == 1 and self.min_p == 0
        no_filter = no_filter or self.temperature == 0  # the likeliest token passes all filters
        free = not (self.min_tokens or self.penalizes or self.edits_logits)
        return no_filter and free and self.structured_outputs is None


# Remedies for parameters that are given to an LLM or a call instead of a SamplingParams.
OF_SAMPLING_PARAMS = {
    name: Foreign(f"give SamplingParams({name}=...)", ()) for name in options_of(SamplingParams)
}


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The facts about a sequence that the sampler needs if its parameters are not plain."""

    params: SamplingParams
    stop_ids: frozenset[int]  # tokens that must not be sampled before min_tokens
    num_prompt_tokens: int
    token_ids: list[int]  # the tokens that penalties count, up to the first sampled token
    # Whether the tokens so far decide which tokens may come next. The host then edits the logits of
    # each step before the step's token is sampled: see LogitsEdits.
    is_constrained: bool = False

    @property
    def samples_plainly(self) -> bool:
        """Whether temperature and seed alone decide which token is sampled."""
        return self.params.samples_plainly and not self.is_constrained
