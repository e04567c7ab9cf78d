"""The formats of a job: the request of an input line, and the record of an output line.

There are two formats: the library's own, in this file, and OpenAI's batch format, in
openai_batch.py.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nanovllm.checks import refuse_unknown_names, short_repr
from nanovllm.foreign_names import IN_LINE
from nanovllm.options import options_of
from nanovllm.sampling_params import SamplingParams

PROMPTS = ("prompt", "prompt_token_ids", "messages")
SAMPLING = tuple(options_of(SamplingParams))
# Parameters for which null is a value of its own: it does not mean that the field is absent.
NULLABLE = {name for name, one in options_of(SamplingParams).items() if one.takes_none}
# The fields that a result may have, in the library's own format and in Parquet.
RESULT = (
    *("line", "text", "token_ids", "finish_reason", "stop_reason", "logprobs"),
    *("cumulative_logprob", "num_prompt_tokens", "completions", "prompt_logprobs", "error"),
)
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot represent


@dataclass(frozen=True, slots=True)
class Request:
    """The request of one line."""

    line: int
    prompt: Any  # text, token ids, or the messages of a conversation
    params: SamplingParams
    is_chat: bool = False
    template_options: Any = None  # arguments for the chat template, a dict or None
    repeated: Any = None  # the part of the line that the format copies to the result
    wants_token_texts: bool = False  # whether outputs with logprobs need the texts of their tokens


@dataclass(frozen=True)
class Defaults:
    """The values that hold for every line that does not set its own."""

    params: SamplingParams
    seed: int  # the job's seed; the seed of a line is derived from this seed and the line's number
    template_options: dict[str, Any] | None = None
    trust_request_chat_template: bool = False  # whether lines may bring their own chat templates

    def params_of(self, line: int, given: dict[str, Any]) -> SamplingParams:
        """Return the sampling parameters of a line that sets those in `given`."""
        if given.get("seed") is None:
            given = {**given, "seed": seed_of(self.seed, line)}
        return replace(self.params, **given)

    def template_options_of(self, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Return the chat template's arguments for a line.

        Raises ValueError if the line brings a chat template and that is not allowed.
        """
        options = fields.get("chat_template_kwargs", self.template_options)
        if options is not None and not isinstance(options, dict):
            raise TypeError(f"chat_template_kwargs is {short_repr(options)}: use an object")
        if options is not self.template_options and "chat_template" in (options or {}):
            if not self.trust_request_chat_template:
                raise ValueError(
                    "chat_template_kwargs holds a chat_template, which is a program: leave it out; "
                    "or, if you trust the author of the input, allow it with "
                    "--trust-request-chat-template (trust_request_chat_template=True in Python)"
                )
        return options


class Format(Protocol):
    """The interface of a format."""

    def parse(self, line: int, fields: dict[str, Any]) -> Request:
        """Make the request of a line. Raises ValueError or TypeError for an invalid line."""

    def result(self, request: Request, output: dict[str, Any]) -> dict[str, Any]:
        """Make the record of a finished request from its output, as LLM.generate returns it."""

    def error(self, line: int, fields: dict[str, Any], problem: str) -> dict[str, Any]:
        """Make the record of a line that is not a valid request."""

    def failure(self, request: Request, problem: str) -> dict[str, Any]:
        """Make the record of a request that failed."""


def seed_of(seed: int, line: int) -> int:
    """Derive the seed of a line from the job's seed and the line's number alone.

    So the results do not depend on how often the job was stopped.
    """
    digest = hashlib.blake2b(f"{seed} {line}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def known_fields(keep: tuple[str, ...]) -> tuple[str, ...]:
    """Return the fields that a line of the library's own format may have."""
    return (*PROMPTS, "id", "chat_template_kwargs", *SAMPLING, *keep)


class NativeFormat:
    """The library's own format.

    A line is an object with exactly one of prompt, prompt_token_ids and messages. A line may also
    have an id (any JSON value), chat_template_kwargs, the fields of SamplingParams, and the fields
    in `keep`; id and the fields in `keep` are copied to the result. A field that is null counts as
    absent, except where None is a value of the parameter, as for max_tokens.

    The record of a finished request has line, id (if given), text, token_ids, finish_reason,
    stop_reason and num_prompt_tokens; and, if requested, logprobs, cumulative_logprob, completions
    and prompt_logprobs, as LLM.generate returns them. The record of a failed line has line, id and
    error.
    """

    def __init__(self, defaults: Defaults, keep: tuple[str, ...] = ()) -> None:
        self._defaults = defaults
        self._repeated_names = ("id", *keep)
        self._known = known_fields(keep)

    def parse(self, line: int, fields: dict[str, Any]) -> Request:
        fields = refuse_unknown_names("a line", "field", fields, self._known, IN_LINE)
        kinds = [name for name in PROMPTS if fields.get(name) is not None]
        if len(kinds) != 1:
            found = f"has {' and '.join(kinds)}" if kinds else "has no prompt"
            raise ValueError(f"the request {found}: give exactly one of {', '.join(PROMPTS)}")
        (kind,) = kinds
        prompt = fields[kind]
        wanted = str if kind == "prompt" else list
        if not isinstance(prompt, wanted):
            raise TypeError(f"{kind} is {short_repr(prompt)}: use a {wanted.__name__}")
        repeated = self._repeated(fields)
        try:
            json.dumps(repeated, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"a field cannot be copied to the result: {error}") from error
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
    """Return the fields of one completion, with values that JSON can represent."""
    fields = {name: output[name] for name in ("text", "token_ids", "finish_reason", "stop_reason")}
    if "logprobs" in output:
        fields["logprobs"] = [finite(one) for one in output["logprobs"]]
        fields["cumulative_logprob"] = max(output["cumulative_logprob"], LEAST_LOGPROB)
    return fields


def finite(logprobs: dict[int, float]) -> dict[int, float]:
    """Replace minus infinity by LEAST_LOGPROB."""
    return {token: max(value, LEAST_LOGPROB) for token, value in logprobs.items()}
