"""Checks of what a call asks for. All requests of a call are checked before any is queued.

Every error names the field, the value and the remedy. A value of a wrong type raises TypeError, any
other wrong value ValueError.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

from nanovllm.checks import (
    as_integer,
    as_list,
    check_vocabulary,
    refuse_unknown_names,
    short_repr,
    token_ids,
)
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.foreign_names import IN_PROMPT
from nanovllm.frontend.params import resolve_constraints
from nanovllm.frontend.tokenizer import Tokenizer, need_tokenizer
from nanovllm.sampling_params import SamplingParams


class CheckedInput(NamedTuple):
    """A prompt that the engine can serve with its sampling parameters."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None  # None: the user gave token ids


class TextPrompt(TypedDict):
    """A prompt of text, as in vLLM. Any dict of this form will do."""

    prompt: str


class _Text(TypedDict, total=False):
    prompt: str  # the text of the token ids, for `RequestOutput.prompt`


class TokensPrompt(_Text):
    """A prompt of token ids, with or without their text."""

    prompt_token_ids: list[int]


# A text of more characters than this many times the tokens that fit is likely to be too long.
CHARACTERS_PER_TOKEN = 16

PROMPT_KEYS: dict[str, Any] = {"prompt": str, "prompt_token_ids": (list, tuple)}


class Inputs:
    """The checks that turn what a user gives into inputs that the engine can serve."""

    def __init__(self, config: Config, engine: LLMEngine, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = engine.vocab_size
        self.max_model_len = engine.max_model_len
        self.num_blocks = engine.runner.info.num_blocks
        self.window = engine.window
        self.constraints = engine.constraints
        self.stop_ids = engine.stop_ids

    def from_prompts(self, prompts: Any, sampling_params: Any) -> list[CheckedInput]:
        """Check prompts, which are text or token ids, one prompt or a list.

        `sampling_params` is one SamplingParams for all prompts, or a list with one for each.
        """
        read = [_read(f"prompts[{i}]", one) for i, one in enumerate(_split_prompts(prompts))]
        texts, token_ids = [text for text, _ in read], [ids for _, ids in read]
        # Index -> text, of prompts that come without token ids.
        unread = {i: text for i, (text, ids) in enumerate(read) if text is not None and ids is None}
        if unread:
            # Encode all texts in one call, so that the tokenizer uses all cores. A prompt of token
            # ids stands in that call as an empty text, so that an error of the tokenizer has the
            # index among all prompts.
            encoded = self.encode_to_fit([unread.get(i, "") for i in range(len(read))])
            token_ids = [encoded[i] if i in unread else ids for i, ids in enumerate(token_ids)]
        return self.check_all("prompts", token_ids, sampling_params, texts)

    def encode_to_fit(self, texts: Any, name: str = "prompts") -> list[list[int]]:
        """Return the token ids of texts, each of which must fit into max_model_len.

        Raises ValueError, before any text is tokenized, for one that has too many bytes to fit.
        """
        return self.encode(texts, name, self.refuse_long)

    def refuse_long(self, name: str, texts: list[str]) -> None:
        """Raise ValueError for the first text that has too many bytes to fit into max_model_len."""
        most = self.max_model_len + 1  # the last token of a scored prompt needs no place
        for i, text in enumerate(texts):
            if len(text) > CHARACTERS_PER_TOKEN * most:
                assert self.tokenizer is not None, "its caller has found one"
                fewest = self.tokenizer.fewest_tokens(text)
                if fewest > most:
                    remedy = self._limit_and_remedy(generates=True)
                    raise ValueError(f"{name}[{i}] has at least {fewest} tokens, {remedy}")

    def encode(
        self,
        texts: Any,
        name: str = "prompts",
        check: Callable[[str, list[str]], None] | None = None,
    ) -> list[list[int]]:
        """Return the token ids of one text or several. Errors call the texts `name`.

        `check` is called with the name and the texts before they are tokenized.
        """
        texts = _split_prompts(texts)
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"{name}[{i}] is a {type(text).__name__}: give a str")
        tokenizer = need_tokenizer(self.tokenizer, f"{name} holds text", "give token ids")
        if check is not None:
            check(name, texts)
        return tokenizer.encode(name, texts)

    def check_all(
        self, name: str, prompts: list[Any], sampling_params: Any, texts: Sequence[str | None]
    ) -> list[CheckedInput]:
        """Check prompts of token ids, with parameters for all or for each.

        Errors call the prompts `name`. texts[i] is the text of prompts[i], or None.
        """
        checked = []
        resolved: dict[int, SamplingParams] = {}  # by the id() of the given object
        for i, params in enumerate(_spread(sampling_params, len(prompts))):
            if id(params) not in resolved:
                resolved[id(params)] = self.resolve_params(f"sampling_params[{i}]", params)
            one = self.check(f"{name}[{i}]", prompts[i], resolved[id(params)], texts[i])
            checked.append(one)
        return checked

    def check(
        self, name: str, prompt: Any, params: SamplingParams, text: str | None = None
    ) -> CheckedInput:
        """Check one prompt of token ids. Errors call the prompt `name`."""
        token_ids = _token_ids(name, prompt, self.vocab_size)
        self._check_length(name, len(token_ids), params)
        if params.max_tokens is None:
            room = self.max_model_len - len(token_ids)
            params = replace(params, max_tokens=max(room, params.min_tokens))
        self._check_room(name, len(token_ids), params)
        return CheckedInput(token_ids, params, text)

    def _check_length(self, name: str, length: int, params: SamplingParams) -> None:
        if length == 0:
            raise ValueError(f"{name} is empty: give at least one token")
        # A request that generates needs room for one output token. With max_tokens=0 the prompt's
        # last token is scored by the logits of the token before it, so it needs no KV slot itself.
        generates = params.max_tokens != 0
        if length > self.max_model_len + (-1 if generates else 1):
            raise ValueError(f"{name} has {length} tokens, {self._limit_and_remedy(generates)}")

    def _limit_and_remedy(self, generates: bool) -> str:
        """Return the end of the error for a prompt that is too long."""
        if not generates:
            return (
                f"max_model_len is {self.max_model_len} and takes one more, as none follows it: "
                "shorten it, or raise max_model_len if the model takes more"
            )
        asked = self.config.max_model_len
        if asked is None or self.max_model_len < asked:
            return (
                f"the model itself takes {self.max_model_len} of prompt and output together: "
                "shorten it to leave room for one"
            )
        return (
            f"max_model_len is {self.max_model_len}: "
            "shorten it to leave room for one, or raise max_model_len"
        )

    def resolve_params(self, name: str, params: SamplingParams) -> SamplingParams:
        """Return `params` with bad_words as token ids.

        Raises ValueError for parameters that this model or these options of LLM cannot serve.
        """
        stop_ids = params.stop_token_ids or ()
        check_vocabulary(f"{name}.stop_token_ids", stop_ids, self.vocab_size)
        if params.min_tokens and len(set(stop_ids)) == self.vocab_size:
            raise ValueError(
                f"{name}.stop_token_ids holds the whole vocabulary, and "
                f"min_tokens={params.min_tokens} bars all of it: "
                "leave a token out, or use min_tokens=0"
            )
        policy = self.config.scheduling_policy
        if params.priority and isinstance(policy, str) and policy != "priority":
            raise ValueError(
                f"{name}.priority is {params.priority}, which scheduling_policy={policy!r} "
                "ignores: leave it out, or make the LLM with scheduling_policy='priority'"
            )
        if params.stop:
            need_tokenizer(self.tokenizer, "stop needs text", "use stop_token_ids")
        if params.edits_logits:
            eos_ids = frozenset() if params.ignore_eos else self.stop_ids
            params = resolve_constraints(name, params, self.tokenizer, self.vocab_size, eos_ids)
        if params.structured_outputs is not None:
            assert self.constraints is not None, "build.py gives every engine constraints"
            try:
                self.constraints.check(params)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from error
        return params

    def _check_room(self, name: str, length: int, params: SamplingParams) -> None:
        """Check that the KV cache can hold the request at its longest.

        With a sliding window, room for the window and one more block is enough.
        """
        assert params.max_tokens is not None
        # The last token is never an input, so its K and V are never computed.
        needed = max(length, min(length + params.max_tokens, self.max_model_len)) - 1
        if self.window is not None:
            needed = min(needed, self.window + self.config.kvcache_block_size)
        there = self.num_blocks * self.config.kvcache_block_size
        if needed > there:
            raise ValueError(
                f"{name} needs {needed} tokens of KV cache ({length} of prompt and "
                f"max_tokens={params.max_tokens}), which holds {there}: "
                "lower max_tokens, shorten the prompt, "
                "or raise num_kvcache_blocks or gpu_memory_utilization"
            )


def _split_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts, whether the user gave one prompt or several."""
    prompts = as_list(prompts)
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        in_lists = ", or its tolist()" if hasattr(prompts, "tolist") else ""
        raise TypeError(
            f"prompts is a {type(prompts).__name__}: give a str, a list of str, or lists of "
            f"token ids, such as the input_ids that a tokenizer makes{in_lists}"
        )
    # A bool is an int too: such a list is one prompt, and `_token_ids` refuses its bools.
    if prompts and (isinstance(prompts[0], int) or as_integer(prompts[0]) is not None):
        return [list(prompts)]
    return list(prompts)


def _read(name: str, prompt: Any) -> tuple[str | None, Any]:
    """Return a prompt's text and token ids: None for the one that the user did not give."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, dict):
        return None, prompt
    known = refuse_unknown_names(name, "key", prompt, PROMPT_KEYS, IN_PROMPT)
    given = {key: as_list(value) for key, value in known.items() if value is not None}
    if not given or not all(isinstance(value, PROMPT_KEYS[key]) for key, value in given.items()):
        raise TypeError(
            f"{name} is {short_repr(prompt)}: give a str as 'prompt', or a list of token ids as "
            "'prompt_token_ids'"
        )
    return given.get("prompt"), given.get("prompt_token_ids")


def _spread(params: Any, count: int) -> list[SamplingParams]:
    """Return one SamplingParams for each prompt, whether `params` is one for all or a list."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, (list, tuple)):
        raise TypeError(
            f"sampling_params is a {type(params).__name__}: give a SamplingParams or a list of them"
        )
    if len(params) != count:
        raise ValueError(
            f"sampling_params has {len(params)} entries for {count} prompts: "
            "give one for all, or one for each prompt"
        )
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise TypeError(
                f"sampling_params[{i}] is a {type(one).__name__}: give a SamplingParams"
            )
    return list(params)


def _token_ids(name: str, ids: Any, vocab_size: int) -> list[int]:
    """Return token ids as a list of int, after checking that the vocabulary has them all."""
    ids = as_list(ids)
    if not isinstance(ids, (list, tuple)):
        raise TypeError(
            f"{name} is a {type(ids).__name__}: give a str, a list of token ids, or a dict with "
            "one of them as 'prompt' or 'prompt_token_ids'"
        )
    checked = token_ids(name, ids)
    check_vocabulary(name, checked, vocab_size)
    return list(checked)
