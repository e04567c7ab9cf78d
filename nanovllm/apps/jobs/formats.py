"""What a line of the input asks for, and what its line in the output says.

Two formats: the library's own, and in `openai_batch.py` that of OpenAI's batches.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nanovllm.checks import refuse_unknown_names, shown
from nanovllm.foreign_names import IN_LINE
from nanovllm.options import options_of
from nanovllm.sampling_params import SamplingParams

PROMPTS = ("prompt", "prompt_token_ids", "messages")
SAMPLING = tuple(options_of(SamplingParams))
# Where null says something else than that a field is not there.
NULLABLE = {name for name, one in options_of(SamplingParams).items() if one.takes_none}
# What a result may have, in the library's own format and in Parquet.
RESULT = (
    *("line", "text", "token_ids", "finish_reason", "stop_reason", "logprobs"),
    *("cumulative_logprob", "num_prompt_tokens", "completions", "prompt_logprobs", "error"),
)
LEAST_LOGPROB = -9999.0  # what JSON has no number for


@dataclass(frozen=True, slots=True)
class Request:
    """What one line asks for."""

    line: int
    prompt: Any  # text, token ids, or a conversation's messages
    params: SamplingParams
    is_chat: bool = False
    template_options: Any = None  # of the chat template, a dict or None
    repeated: Any = None  # what the format will say of the request in its result
    wants_token_texts: bool = False  # the texts of tokens whose log-probabilities are asked for


@dataclass(frozen=True)
class Defaults:
    """What holds for all lines, where they say nothing else."""

    params: SamplingParams
    seed: int  # of the job; each line draws by a seed of its own, made of this and its number
    template_options: dict[str, Any] | None = None
    trust_request_chat_template: bool = False  # then lines may bring chat templates of their own

    def params_of(self, line: int, given: dict[str, Any]) -> SamplingParams:
        if given.get("seed") is None:
            given = {**given, "seed": seed_of(self.seed, line)}
        return replace(self.params, **given)

    def template_options_of(self, fields: dict[str, Any]) -> dict[str, Any] | None:
        options = fields.get("chat_template_kwargs", self.template_options)
        if options is not None and not isinstance(options, dict):
            raise TypeError(f"chat_template_kwargs is {shown(options)}: use an object")
        if options is not self.template_options and "chat_template" in (options or {}):
            if not self.trust_request_chat_template:
                raise ValueError(
                    "chat_template_kwargs holds a chat_template, which is a program: leave it out; "
                    "or allow it, if you trust who wrote the input, with "
                    "--trust-request-chat-template (trust_request_chat_template=True in Python)"
                )
        return options


class Format(Protocol):
    def parse(self, line: int, fields: dict[str, Any]) -> Request:
        """Raises ValueError or TypeError for a line that asks for what is not there."""

    def result(self, request: Request, output: dict[str, Any]) -> dict[str, Any]:
        """The record of a request that is done; `output` is as LLM.generate returns it."""

    def error(self, line: int, fields: dict[str, Any], problem: str) -> dict[str, Any]:
        """The record of a line that cannot be done."""

    def failure(self, request: Request, problem: str) -> dict[str, Any]:
        """The record of a request that could not be done."""


def seed_of(seed: int, line: int) -> int:
    """A seed that depends on both, and on nothing else: not on how often the job was stopped."""
    digest = hashlib.blake2b(f"{seed} {line}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def known_fields(keep: tuple[str, ...]) -> tuple[str, ...]:
    """What a line of the library's own format may have."""
    return (*PROMPTS, "id", "chat_template_kwargs", *SAMPLING, *keep)


class NativeFormat:
    """An object with one of prompt, prompt_token_ids and messages.

    Further fields: id, any JSON value, which the result repeats; chat_template_kwargs; those of
    SamplingParams. And those in `keep`, which the result repeats. One that is null is not there, or
    None where that says something, such as of max_tokens.

    A result: line, id if one was given, text, token_ids, finish_reason, stop_reason,
    num_prompt_tokens, and if they were asked for logprobs, cumulative_logprob, completions and
    prompt_logprobs, as LLM.generate returns them. An error: line, id, error.
    """

    def __init__(self, defaults: Defaults, keep: tuple[str, ...] = ()) -> None:
        self._defaults = defaults
        self._repeated_names = ("id", *keep)
        self._known = known_fields(keep)

    def parse(self, line: int, fields: dict[str, Any]) -> Request:
        fields = refuse_unknown_names("a line", "field", fields, self._known, IN_LINE)
        kinds = [name for name in PROMPTS if fields.get(name) is not None]
        if len(kinds) != 1:
            said = f"has {' and '.join(kinds)}" if kinds else "has no prompt"
            raise ValueError(f"it {said}: give one of {', '.join(PROMPTS)}")
        (kind,) = kinds
        prompt = fields[kind]
        wanted = str if kind == "prompt" else list
        if not isinstance(prompt, wanted):
            raise TypeError(f"{kind} is {shown(prompt)}: use a {wanted.__name__}")
        repeated = self._repeated(fields)
        try:
            json.dumps(repeated, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"a field that is to be repeated cannot be: {error}") from error
        given = {
            name: fields[name]
            for name in SAMPLING
            if name in fields and (fields[name] is not None or name in NULLABLE)
        }
        return Request(
            line,
            prompt,
            self._defaults.params_of(line, given),
            is_chat=kind == "messages",
            template_options=self._defaults.template_options_of(fields),
            repeated=repeated,
        )

    def result(self, request: Request, output: dict[str, Any]) -> dict[str, Any]:
        record = {"line": request.line, **request.repeated}
        record |= completion(output)
        record["num_prompt_tokens"] = len(output["prompt_token_ids"])
        if "completions" in output:
            record["completions"] = [completion(one) for one in output["completions"]]
        if "prompt_logprobs" in output:
            first, *others = output["prompt_logprobs"]
            record["prompt_logprobs"] = [first, *map(finite, others)]
        return record

    def error(self, line: int, fields: dict[str, Any], problem: str) -> dict[str, Any]:
        repeated = self._repeated(fields)
        try:
            json.dumps(repeated, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            repeated = {}
        return {"line": line, **repeated, "error": f"line {line}: {problem}"}

    def failure(self, request: Request, problem: str) -> dict[str, Any]:
        return self.error(request.line, request.repeated, problem)

    def _repeated(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: fields[name] for name in self._repeated_names if name in fields}


def completion(output: dict[str, Any]) -> dict[str, Any]:
    """One completion, as JSON can say it."""
    said = {name: output[name] for name in ("text", "token_ids", "finish_reason", "stop_reason")}
    if "logprobs" in output:
        said["logprobs"] = [finite(one) for one in output["logprobs"]]
        said["cumulative_logprob"] = max(output["cumulative_logprob"], LEAST_LOGPROB)
    return said


def finite(logprobs: dict[int, float]) -> dict[int, float]:
    return {token: max(value, LEAST_LOGPROB) for token, value in logprobs.items()}
