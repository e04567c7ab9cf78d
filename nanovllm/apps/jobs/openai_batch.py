"""OpenAI's batch format: a line has custom_id, method, url and body; its record has a response.

The fields of bodies and responses follow OpenAI's API reference (batch, chat completions,
completions). A body may also have any field of SamplingParams.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from nanovllm.apps.jobs.formats import LEAST_LOGPROB, SAMPLING, Defaults, Request
from nanovllm.checks import as_integer, refuse_unknown_names, short_repr
from nanovllm.foreign_names import IN_LINE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOP_FIELDS = ("custom_id", "method", "url", "body")
# Parameters that are ignored: they say who asks, who pays and what is stored. --model names the
# model.
IGNORED = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
# Unsupported parameters, with the values that are accepted because they request nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "prompt_logprobs": (),
}
OWN = ("max_completion_tokens", "top_logprobs", "response_format", "chat_template_kwargs")


class OpenAIFormat:
    """OpenAI's batch format.

    The ids in a record are made of the line's number, so records do not depend on how often the job
    was stopped.
    """

    def __init__(self, defaults: Defaults, model: str, created: int) -> None:
        """Make the format.

        model: the model's name in responses.
        created: the time of creation in responses, in seconds since 1970.
        """
        self._defaults = defaults
        self._model = model
        self._created = created

    def parse(self, line: int, fields: dict[str, Any]) -> Request:
        refuse_unknown_names("a line", "field", fields, TOP_FIELDS, IN_LINE)
        for name, wanted in (("custom_id", str), ("url", str), ("body", dict)):
            if not isinstance(fields.get(name), wanted):
                raise TypeError(
                    f"{name} is {short_repr(fields.get(name))}: use a {wanted.__name__}"
                )
        if fields.get("method", "POST") != "POST":
            raise ValueError(f"method is {short_repr(fields['method'])}: use 'POST'")
        url = fields["url"]
        if url not in (CHAT, COMPLETIONS):
            raise ValueError(f"url is {short_repr(url)}: use {CHAT!r} or {COMPLETIONS!r}")
        # In the API, null means that a parameter is not given.
        given = {name: value for name, value in fields["body"].items() if value is not None}
        is_chat = url == CHAT
        kind = "messages" if is_chat else "prompt"
        known = (kind, *IGNORED, *NEUTRAL, *OWN, *SAMPLING)
        body = refuse_unknown_names("body", "field", given, known, IN_LINE)
        for name, allowed in NEUTRAL.items():
            if name in body and body[name] not in allowed:
                raise ValueError(
                    f"{name} is {short_repr(body[name])}, which is not supported: leave it out"
                )
        if kind not in body:
            raise ValueError(f"body has no {kind}: add it, as url is {url!r}")
        if is_chat and not isinstance(body[kind], list):
            raise TypeError(f"messages is {short_repr(body[kind])}: use a list")
        return Request(
            line,
            body[kind] if is_chat else _prompt(body[kind]),
            self._defaults.params_of(line, _sampling_fields(body, is_chat)),
            is_chat=is_chat,
            template_options=self._defaults.template_options_of(body),
            repeated=fields["custom_id"],
            wants_token_texts=True,
        )

    def result(self, request: Request, output: dict[str, Any]) -> dict[str, Any]:
        make_choice = _chat_choice if request.is_chat else _completion_choice
        completions = output.get("completions", [output])
        num_prompt = len(output["prompt_token_ids"])
        num_output = sum(len(one["token_ids"]) for one in completions)
        texts = output.get("token_texts", {}).__getitem__
        body = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{request.line}",
            "object": "chat.completion" if request.is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {"index": i} | make_choice(one, request.params.logprobs, texts)
                for i, one in enumerate(completions)
            ],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_output,
                "total_tokens": num_prompt + num_output,
            },
        }
        response = {"status_code": 200, "request_id": f"req-{request.line}", "body": body}
        return self._record(request.line, request.repeated, response, None)

    def error(self, line: int, fields: dict[str, Any], problem: str) -> dict[str, Any]:
        custom_id = fields.get("custom_id")
        error = {"code": "invalid_request", "message": f"line {line}: {problem}", "line": line}
        return self._record(line, custom_id if isinstance(custom_id, str) else None, None, error)

    def failure(self, request: Request, problem: str) -> dict[str, Any]:
        return self.error(request.line, {"custom_id": request.repeated}, problem)

    @staticmethod
    def _record(line: int, custom_id: Any, response: Any, error: Any) -> dict[str, Any]:
        return {
            "id": f"batch_req_{line}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }


def _sampling_fields(body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    """Return the fields of SamplingParams that a body sets."""
    given = {name: body[name] for name in SAMPLING if name in body}
    if "max_completion_tokens" in body:
        given["max_tokens"] = body["max_completion_tokens"]
    if as_integer(given.get("max_tokens")) == 0:
        raise ValueError(
            "max_tokens is 0, but responses in this format have no field about the prompt: use 1 "
            "or more; or, for prompt_logprobs, write the input in the library's own format"
        )
    if is_chat:  # here logprobs is a bool, and top_logprobs is the number
        wanted, count = body.get("logprobs", False), body.get("top_logprobs", 0)
        if not isinstance(wanted, bool):
            raise TypeError(f"logprobs is {short_repr(wanted)}: use true or false")
        if count and not wanted:
            raise ValueError(f"top_logprobs is {short_repr(count)}: set logprobs to true as well")
        given["logprobs"] = count if wanted else None
    if form := _form(body.get("response_format", {"type": "text"})):
        if "structured_outputs" in given:
            raise ValueError(
                "response_format and structured_outputs are both given: use one of them"
            )
        given["structured_outputs"] = form
    return given


def _form(response_format: Any) -> dict[str, Any] | None:
    """Convert a response_format to structured_outputs. Returns None for any text."""
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
    raise ValueError(
        f"response_format is {short_repr(response_format)}: use {{'type': 'text'}}, "
        "{'type': 'json_object'}, or {'type': 'json_schema', 'json_schema': {'schema': ...}}"
    )


def _prompt(prompt: Any) -> Any:
    """Return a prompt as text or token ids. Raises TypeError for a list of several prompts."""
    if isinstance(prompt, list) and any(isinstance(one, (str, list)) for one in prompt):
        raise TypeError(
            f"prompt is {short_repr(prompt)}: use one text or one list of token ids per line"
        )
    return prompt


def _chat_choice(
    completion: dict[str, Any], num_top: int | None, text_of: Callable[[int], str]
) -> dict[str, Any]:
    logprobs = None
    if num_top is not None:
        content = []
        for token, values in zip(completion["token_ids"], completion["logprobs"]):
            entry = _token_entry(token, values, text_of)
            entry["top_logprobs"] = [
                _token_entry(one, values, text_of) for one in _likeliest(values, num_top)
            ]
            content.append(entry)
        logprobs = {"content": content, "refusal": None}
    return {
        "message": {"role": "assistant", "content": completion["text"], "refusal": None},
        "logprobs": logprobs,
        "finish_reason": completion["finish_reason"],
    }


def _completion_choice(
    completion: dict[str, Any], num_top: int | None, text_of: Callable[[int], str]
) -> dict[str, Any]:
    logprobs = None
    if num_top is not None:
        tokens = [text_of(token) for token in completion["token_ids"]]
        given = list(zip(completion["token_ids"], completion["logprobs"]))
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [_finite(values[token]) for token, values in given],
            "top_logprobs": [
                {text_of(one): _finite(values[one]) for one in _likeliest(values, num_top)}
                for _, values in given
            ],
            "text_offset": [0, *accumulate(map(len, tokens[:-1]))],
        }
    return {
        "text": completion["text"],
        "logprobs": logprobs,
        "finish_reason": completion["finish_reason"],
    }


def _token_entry(
    token: int, values: dict[int, float], text_of: Callable[[int], str]
) -> dict[str, Any]:
    return {"token": text_of(token), "logprob": _finite(values[token]), "bytes": None}


def _likeliest(values: dict[int, float], count: int) -> list[int]:
    return sorted(values, key=lambda token: -values[token])[:count]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
