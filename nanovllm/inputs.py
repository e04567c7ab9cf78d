"""Check what a call asks for, all of it before any of it is queued.

Every error names the place, the value and the remedy: TypeError for what is of a wrong type,
ValueError for the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nanovllm.checks import as_integer, check_vocabulary, refuse_unknown_names, shown
from nanovllm.config import Config
from nanovllm.constraint_checks import resolve_constraints
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import check_form_compiles

# A prompt's token ids, what is asked for, and the prompt's text if it has one.
Request = tuple[list[int], SamplingParams, str | None]
# A text of more characters than so many times the tokens that fit is likely to be too long.
CHARACTERS_PER_TOKEN = 16
PROMPT_KEYS: dict[str, Any] = {"prompt": str, "prompt_token_ids": (list, tuple)}


class Inputs:
    """Makes requests of what a user gives, if an engine can serve them."""

    def __init__(self, config: Config, engine: LLMEngine, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = engine.vocab_size
        self.max_model_len = engine.max_model_len
        self.num_blocks = engine.runner.info.num_blocks
        self.window = engine.window
        self.constraints = engine.constraints
        self.stop_ids = engine.stop_ids

    def from_prompts(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """Prompts of text or of token ids, one or several; parameters for all or for each."""
        read = [_read(f"prompts[{i}]", one) for i, one in enumerate(_split_prompts(prompts))]
        texts, token_ids = [text for text, _ in read], [ids for _, ids in read]
        # By index, the texts of prompts that come without token ids.
        unread = {i: text for i, (text, ids) in enumerate(read) if text is not None and ids is None}
        if unread:
            # One call of the tokenizer for all texts, so that it uses all cores. Prompts of token
            # ids are empty texts in it: its errors give the index among all prompts.
            encoded = self.encode_to_fit([unread.get(i, "") for i in range(len(read))])
            token_ids = [encoded[i] if i in unread else ids for i, ids in enumerate(token_ids)]
        return self.requests("prompts", token_ids, sampling_params, texts)

    def encode_to_fit(self, texts: Any, name: str = "prompts") -> list[list[int]]:
        """Encode texts that must fit into max_model_len. Raises ValueError for one that does not,
        however few tokens it has, before any is tokenized.
        """
        return self.encode(texts, name, self.refuse_long)

    def refuse_long(self, name: str, texts: list[str]) -> None:
        """Raise ValueError for the first text that has too many bytes to fit into max_model_len."""
        most = (
            self.max_model_len + 1
        )  # the last token of a prompt that is only scored needs no place
        for i, text in enumerate(texts):
            if len(text) > CHARACTERS_PER_TOKEN * most:
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
        """The token ids of one text or several, which errors call `name`. `check`: called with both
        before the texts are tokenized.
        """
        texts = _split_prompts(texts)
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"{name}[{i}] is a {type(text).__name__}: give a str")
        if self.tokenizer is None:
            raise ValueError(
                f"{name} holds text, but the model's folder has no tokenizer: "
                "give token ids, or add tokenizer.json"
            )
        if check is not None:
            check(name, texts)
        return self.tokenizer.encode(name, texts)

    def requests(
        self, name: str, prompts: list[Any], sampling_params: Any, texts: Sequence[str | None]
    ) -> list[Request]:
        """Prompts of token ids, which errors call `name`; parameters for all or for each."""
        requests = []
        resolved: dict[int, SamplingParams] = {}  # by the id of what was given
        for i, params in enumerate(_spread(sampling_params, len(prompts))):
            if id(params) not in resolved:
                resolved[id(params)] = self.resolve_params(f"sampling_params[{i}]", params)
            one = self.request(f"{name}[{i}]", prompts[i], resolved[id(params)], texts[i])
            requests.append(one)
        return requests

    def request(
        self, name: str, prompt: Any, params: SamplingParams, text: str | None = None
    ) -> Request:
        """One request of token ids, which errors call `name`; `text`: what they were made of."""
        token_ids = _token_ids(name, prompt, self.vocab_size)
        self._check_length(name, len(token_ids), params)
        if params.max_tokens is None:
            room = self.max_model_len - len(token_ids)
            params = replace(params, max_tokens=max(room, params.min_tokens))
        self._check_room(name, len(token_ids), params)
        if params.n > 1:
            self._check_completions(name, len(token_ids), params)
        return token_ids, params, text

    def _check_length(self, name: str, length: int, params: SamplingParams) -> None:
        if length == 0:
            raise ValueError(f"{name} is empty: give at least one token")
        # One place is left for an output. Where there is none, the prompt's last token is scored by
        # the logits of the one before it, and takes no place in the KV cache.
        generates = params.max_tokens != 0
        if length > self.max_model_len + (-1 if generates else 1):
            raise ValueError(f"{name} has {length} tokens, {self._limit_and_remedy(generates)}")

    def _limit_and_remedy(self, generates: bool) -> str:
        """What is said of a prompt that is too long."""
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
        """Returns params with bad_words as token ids. Raises ValueError for what this model cannot
        do, or this library without a room.
        """
        is_plain = params.is_plain and params.prompt_logprobs is None
        if self.constraints is None and not is_plain:
            raise ValueError(
                f"{name} asks for what needs nanovllm/sampling, which is not there: without it, "
                "temperature, seed, n, max_tokens and stops are all that can be asked for"
            )
        stop_ids = params.stop_token_ids or ()
        check_vocabulary(f"{name}.stop_token_ids", stop_ids, self.vocab_size)
        if params.min_tokens and len(set(stop_ids)) == self.vocab_size:
            raise ValueError(
                f"{name}.stop_token_ids holds the whole vocabulary, of which "
                f"min_tokens={params.min_tokens} lets none be sampled: "
                "leave a token out, or use min_tokens=0"
            )
        policy = self.config.scheduling_policy
        if params.priority and isinstance(policy, str) and policy != "priority":
            raise ValueError(
                f"{name}.priority is {params.priority}, of which scheduling_policy={policy!r} "
                "takes no notice: leave it out, or make the LLM with scheduling_policy='priority'"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError(
                "stop needs text, but the model's folder has no tokenizer: "
                "use stop_token_ids, or add tokenizer.json"
            )
        if params.edits_logits:
            eos_ids = frozenset() if params.ignore_eos else self.stop_ids
            params = resolve_constraints(name, params, self.tokenizer, self.vocab_size, eos_ids)
        if params.structured_outputs is not None:
            check_form_compiles(name, params, self.constraints)
        return params

    def _check_room(self, name: str, length: int, params: SamplingParams) -> None:
        """The KV cache must hold the request at its longest, or the window and a block more."""
        assert params.max_tokens is not None
        # K and V of the last token are never needed.
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

    def _check_completions(self, name: str, length: int, params: SamplingParams) -> None:
        """All n completions begin at once. They share the blocks that the prompt fills; of one that
        it fills in part, each has its own.
        """
        for option in ("max_num_seqs", "max_num_batched_tokens"):
            if params.n > getattr(self.config, option):
                raise ValueError(
                    f"n is {params.n} for {name}, {option} is {getattr(self.config, option)}: "
                    "lower the one or raise the other"
                )
        if params.max_tokens == 0:
            length = max(1, length - 1)  # the last token is not computed
        full, tail = divmod(length, self.config.kvcache_block_size)
        needed = full + (params.n if tail else 0)
        if needed > self.num_blocks:
            raise ValueError(
                f"n is {params.n} for {name}, which takes {needed} KV blocks to begin with, and "
                f"there are {self.num_blocks}: "
                "lower n, or raise num_kvcache_blocks or gpu_memory_utilization"
            )


def _split_prompts(prompts: Any) -> list[Any]:
    """One prompt or several -> a list of prompts."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(
            f"prompts is a {type(prompts).__name__}: give a str, a list of str, or lists of "
            "token ids, such as the input_ids that a tokenizer makes"
        )
    # A bool is an int, and no token id: it is refused as one.
    if prompts and (isinstance(prompts[0], int) or as_integer(prompts[0]) is not None):
        return [list(prompts)]
    return list(prompts)


def _read(name: str, prompt: Any) -> tuple[str | None, Any]:
    """A prompt's text if it has one, and its token ids: None if they are to be made of the text."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, dict):
        return None, prompt
    known = refuse_unknown_names("prompt", "key", prompt, PROMPT_KEYS, name)
    given = {key: value for key, value in known.items() if value is not None}
    if not given or not all(isinstance(value, PROMPT_KEYS[key]) for key, value in given.items()):
        raise TypeError(
            f"{name} is {shown(prompt)}: give a str as 'prompt', or a list of token ids as "
            "'prompt_token_ids'"
        )
    return given.get("prompt"), given.get("prompt_token_ids")


def _spread(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for all prompts, or one for each -> one for each."""
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
    """The ids as a list of int, all of them in the vocabulary."""
    if not isinstance(ids, (list, tuple)):
        raise TypeError(
            f"{name} is a {type(ids).__name__}: give a str, a list of token ids, or a dict with "
            "one of them as 'prompt' or 'prompt_token_ids'"
        )
    if not set(map(type, ids)) <= {int}:
        given, ids = ids, [as_integer(token) for token in ids]
        if None in ids:
            wrong = given[ids.index(None)]
            is_chat = isinstance(wrong, dict)
            hint = "; a conversation goes to chat or stream_chat" if is_chat else ""
            raise TypeError(f"{name} holds {shown(wrong)}: token ids are integers{hint}")
    check_vocabulary(name, ids, vocab_size)
    return list(ids)
