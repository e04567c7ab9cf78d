"""The worker of a job, which serves requests with one LLM."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from nanovllm.apps.jobs.formats import Request
from nanovllm.engine.metrics import StepRecord
from nanovllm.llm import LLM

Refused = list[tuple[Request, str]]  # invalid requests, and what is wrong with them
# A request, and the output that LLM.step returned for it or {"error": problem}.
Outputs = list[tuple[Request, dict[str, Any]]]
AroundEncode = Callable[[], AbstractContextManager[None]]


class Worker:
    """An LLM that runs many requests at a time, in which an invalid request affects no other.

    Outputs come in the order in which requests finish.
    """

    def __init__(
        self, llm: LLM, policy: Any = None, around_encode: AroundEncode = nullcontext
    ) -> None:
        """Serve requests with `llm`.

        policy: the LLM's rolling policy, which is told when the last request has been added; None
            if the LLM has another policy.
        around_encode: makes the context in which chat templates and the tokenizer run.
        """
        self._llm = llm
        self._policy = policy
        self._around_encode = around_encode
        self._requests: dict[int, Request] = {}  # unfinished requests, by their ids in the LLM
        self.num_prompt_tokens = 0  # prompt tokens of the unfinished requests
        self.num_prefill_tokens = self.num_decode_tokens = 0  # tokens computed so far
        llm.on_step(self._count)

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished requests."""
        return len(self._requests)

    def _count(self, step: StepRecord) -> None:
        self.num_prefill_tokens += step.prefill_tokens
        self.num_decode_tokens += step.decode_tokens

    def add(self, requests: list[Request]) -> Refused:
        """Queue requests. Returns the invalid ones, which are not queued."""
        refused: Refused = []
        with self._around_encode():
            encoded = self._encode(requests)
        for request, tokens in zip(requests, encoded):
            try:
                if isinstance(tokens, Exception):
                    raise tokens
                if self._policy is not None and request.params.priority:
                    raise ValueError(
                        f"priority is {request.params.priority}, but this job's scheduling policy "
                        "ignores it: leave it out, or use --scheduling-policy priority"
                    )
                self._requests[self._llm.add_request(tokens, request.params)] = request
                self.num_prompt_tokens += len(tokens)
            except (ValueError, TypeError) as error:
                refused.append((request, str(error)))
        return refused

    def no_more(self) -> None:
        """Note that the last request has been added."""
        if self._policy is not None:
            self._policy.more_to_come = False

    def step(self) -> Outputs:
        """Run one step, and return the outputs of the requests that it has finished."""
        ended: Outputs = []
        for output in map(
            dict, self._llm.step()
        ):  # plain dicts: attributes of an output would be sent along
            request = self._requests.pop(output["id"])
            self.num_prompt_tokens -= len(output["prompt_token_ids"])
            if problem := problem_of(output):
                output = {"error": problem}
            elif request.wants_token_texts and request.params.logprobs is not None:
                output["token_texts"] = self._token_texts(output)
            ended.append((request, output))
        return ended

    def _encode(self, requests: list[Request]) -> list[Any]:
        """Return the token ids of each request, or the error that encoding it raises.

        One call of the tokenizer encodes all texts, and so uses all cores. One call also encodes
        all conversations that have the same arguments for the chat template.
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
        """Return the texts of all tokens that have log-probabilities in the output."""
        completions = output.get("completions", [output])
        tokens = {token for one in completions for values in one["logprobs"] for token in values}
        tokenizer = self._llm.tokenizer
        return {token: str(tokenizer.decode([token])) if tokenizer else "" for token in tokens}


def problem_of(output: dict[str, Any]) -> str | None:
    """Return the error of the first completion that has one; None if the request succeeded."""
    completions = output.get("completions", [output])
    for i, completion in enumerate(completions):
        if "error" in completion:
            which = f"completion {i} of {len(completions)}: " if len(completions) > 1 else ""
            return which + completion["error"]
    return None


def together_or_alone(encode: Callable[[list[Any]], list[Any]], items: list[Any]) -> list[Any]:
    """Encode all items in one call or, if that fails, each item alone.

    Returns the token ids of each item, or the error that it raises.
    """
    try:
        return encode(items) if items else []
    except (ValueError, TypeError) as error:
        if len(items) == 1:
            return [error]
    return [one for item in items for one in together_or_alone(encode, [item])]
