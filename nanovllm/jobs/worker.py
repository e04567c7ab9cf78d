"""Serve a job's requests with an LLM: many at a time, and a wrong one harms no other."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from nanovllm.engine.errors import InvalidLogitsError
from nanovllm.jobs.formats import Request
from nanovllm.llm import LLM

Refused = list[tuple[Request, str]]  # requests that cannot be served, and why
# What LLM.step returned for a request; or why it could not be done, as {"error": ...}.
Outputs = list[tuple[Request, dict[str, Any]]]
AroundEncode = Callable[[], AbstractContextManager[None]]
INVALID = (
    "the model computes NaN or infinite logits for it: try another dtype, such as bfloat16 or "
    "float32, or check the checkpoint's weights; or what constrains its output bars every token"
)


class Worker:
    """Requests in, outputs out, in the order in which they end."""

    def __init__(
        self, llm: LLM, policy: Any = None, around_encode: AroundEncode = nullcontext
    ) -> None:
        """Serve requests with `llm`.

        `policy`: the LLM's, if it is to be told when the last request has come. `around_encode`:
        makes the context in which chat templates and the tokenizer run.
        """
        self._llm = llm
        self._policy = policy
        self._around_encode = around_encode
        self._requests: dict[int, Request] = {}  # unfinished, by the LLM's id
        self.num_prompt_tokens = 0  # of these

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def add(self, requests: list[Request]) -> Refused:
        """Queue requests; returns those that cannot be served."""
        refused: Refused = []
        with self._around_encode():
            encoded = self._encode(requests)
        for request, tokens in zip(requests, encoded):
            try:
                if isinstance(tokens, Exception):
                    raise tokens
                if self._policy is not None and request.params.priority:
                    raise ValueError(
                        f"priority is {request.params.priority}, of which nothing takes notice: "
                        "leave it out, or run the job with --scheduling-policy priority"
                    )
                self._requests[self._llm.add_request(tokens, request.params)] = request
                self.num_prompt_tokens += len(tokens)
            except (ValueError, TypeError) as error:
                refused.append((request, str(error)))
        return refused

    def no_more(self) -> None:
        """The last request was added."""
        if self._policy is not None:
            self._policy.more_to_come = False

    def step(self) -> Outputs:
        """Run one step; returns what has ended with it."""
        ended: Outputs = []
        try:
            outputs = self._llm.step()
        except InvalidLogitsError as error:
            return self._go_on_without(error.request_ids)
        for output in map(dict, outputs):  # what else outputs carry would travel with them
            request = self._requests.pop(output["id"])
            self.num_prompt_tokens -= len(output["prompt_token_ids"])
            if request.wants_token_texts and request.params.logprobs is not None:
                output["token_texts"] = self._token_texts(output)
            ended.append((request, output))
        return ended

    def _go_on_without(self, request_ids: set[int]) -> Outputs:
        """The error has emptied the LLM: queue the others anew, for the same tokens."""
        unfinished, self._requests, self.num_prompt_tokens = self._requests, {}, 0
        failed = [unfinished.pop(request_id) for request_id in request_ids]
        refused = self.add(list(unfinished.values()))
        problems = [(request, INVALID) for request in failed] + refused
        return [(request, {"error": problem}) for request, problem in problems]

    def _encode(self, requests: list[Request]) -> list[Any]:
        """The token ids of each request, or the error that it raises.

        All texts go to the tokenizer together, which uses all cores then; so do all conversations
        with the same options for the chat template.
        """
        encoded = [request.prompt for request in requests]  # token ids are left as they are
        groups: dict[tuple[bool, str], list[int]] = {}
        for i, request in enumerate(requests):
            if request.is_chat or isinstance(request.prompt, str):
                key = request.is_chat, repr(request.template_options)
                groups.setdefault(key, []).append(i)
        for (is_chat, _), places in groups.items():
            options = requests[places[0]].template_options
            encode = partial(self._llm.encode, check_length=True)
            if is_chat:
                encode = partial(
                    self._llm.encode_chat, chat_template_kwargs=options, check_length=True
                )
            prompts = [requests[i].prompt for i in places]
            for i, tokens in zip(places, together_or_alone(encode, prompts)):
                encoded[i] = tokens
        return encoded

    def _token_texts(self, output: dict[str, Any]) -> dict[int, str]:
        completions = output.get("completions", [output])
        tokens = {token for one in completions for values in one["logprobs"] for token in values}
        tokenizer = self._llm.tokenizer
        return {token: str(tokenizer.decode([token])) if tokenizer else "" for token in tokens}


def together_or_alone(encode: Callable[[list[Any]], list[Any]], items: list[Any]) -> list[Any]:
    """Encode all in one call; if one of them is wrong, each by itself, errors in their places."""
    try:
        return encode(items) if items else []
    except (ValueError, TypeError) as error:
        if len(items) == 1:
            return [error]
    return [one for item in items for one in together_or_alone(encode, [item])]
