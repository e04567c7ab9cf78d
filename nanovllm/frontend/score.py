"""Scoring: the log-probabilities of given continuations after given contexts.

Each pair of context and continuation becomes a request that generates nothing and asks for the
log-probabilities of the continuation. If several pairs share a context, one of them runs first. The
others start when it has ended, and find the context in the prefix cache.
"""

import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from nanovllm.checks import as_list, short_repr
from nanovllm.engine.errors import check_any_succeeded
from nanovllm.engine.request import Request
from nanovllm.frontend.inputs import Inputs
from nanovllm.frontend.outputs import split_records
from nanovllm.frontend.progress import Shown, progress
from nanovllm.frontend.session import Session
from nanovllm.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
Score = dict[str, Any]


class Pair(NamedTuple):
    """A context and its continuation: their token ids, one after the other."""

    token_ids: list[int]
    num_context: int

    @property
    def context(self) -> tuple[int, ...]:
        return tuple(self.token_ids[: self.num_context])

    def read(self, request: Request) -> Score:
        """Return the score of this pair, whose request has ended."""
        continuation = self.token_ids[self.num_context :]
        assert request.scores is not None, "PARAMS asks for prompt_logprobs"
        ids, values = split_records(request.scores.records, len(continuation))
        logprobs = values[:, 0].tolist()
        score = {
            "token_ids": continuation,
            "logprobs": logprobs,
            "cumulative_logprob": math.fsum(logprobs),
            "is_greedy": (ids[:, 0] == ids[:, 1]).tolist(),
        }
        if request.first.error is not None:
            score["error"] = request.first.error
        return score


def score(
    session: Session, inputs: Inputs, contexts: Any, continuations: Any, use_tqdm: Shown
) -> list[Score | list[Score]]:
    """Score continuations after contexts, for `LLM.score`."""
    inputs.resolve_params("score", PARAMS)
    rows = read_pairs(inputs, contexts, continuations)
    scores = iter(score_pairs(session, [pair for row in rows for pair in row], use_tqdm))
    scored = [[next(scores) for _ in row] for row in rows]
    return [row if is_list(given) else row[0] for row, given in zip(scored, continuations)]


def read_pairs(inputs: Inputs, contexts: Any, continuations: Any) -> list[list[Pair]]:
    """Check all pairs of a call, and return each context's pairs.

    A context has one pair, or as many as its list of continuations is long.
    """
    for name, value in (("contexts", contexts), ("continuations", continuations)):
        if not isinstance(value, (list, tuple)):
            raise TypeError(
                f"{name} is {short_repr(value)}: give a list, with an entry for each context"
            )
    if len(contexts) != len(continuations):
        raise ValueError(
            f"contexts has {len(contexts)} entries, continuations has {len(continuations)}: "
            "give each context its continuation, or a list of them"
        )
    named = [
        (i, f"contexts[{i}] with continuations[{i}]" + (f"[{j}]" if is_list(row) else ""), one)
        for i, row in enumerate(continuations)
        for j, one in enumerate(row if is_list(row) else [row])
    ]
    given = [(contexts[i], continuation) for i, _, continuation in named]
    pairs: list[list[Pair]] = [[] for _ in contexts]
    for (i, name, _), texts, pair in zip(named, given, _encode(inputs, given)):
        pairs[i].append(_check(inputs, name, *pair, texts))
    return pairs


def is_list(continuations: Any) -> bool:
    """Return whether this is a list of continuations, and not text or a list of token ids."""
    if not isinstance(continuations, (list, tuple)):
        return False
    return any([isinstance(one, (str, list, tuple, np.ndarray)) for one in continuations])


def _encode(inputs: Inputs, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Replace texts in pairs by token ids, in the way of evaluation harnesses.

    The context is encoded, and so is the whole text. If the context has k tokens, the continuation
    is the whole text's tokens from the k-th on. Many tokens begin with a space, so spaces at the
    end of the context count as part of the continuation.
    """
    texts = [pair for pair in pairs if isinstance(pair[0], str) and isinstance(pair[1], str)]
    if not texts:
        return pairs
    wholes = inputs.encode_to_fit([context + more for context, more in texts], "pairs")
    contexts = inputs.encode([context.rstrip() for context, _ in texts], "pairs")
    encoded = iter(zip(contexts, wholes))
    made = []
    for context, continuation in pairs:
        if isinstance(context, str) and isinstance(continuation, str):
            context, whole = next(encoded)
            continuation = whole[len(context) :]
        made.append((context, continuation))
    return made


def _check(
    inputs: Inputs, name: str, context: Any, continuation: Any, given: tuple[Any, Any]
) -> Pair:
    """Check a pair of token ids and make a Pair. `given` is the pair as the user gave it."""
    context, continuation = as_list(context), as_list(continuation)
    for what, part in (("context", context), ("continuation", continuation)):
        if not isinstance(part, (str, list, tuple)):
            raise TypeError(
                f"{name}: the {what} is {short_repr(part)}: give text or a list of token ids"
            )
        if not part:
            remedy = "give at least one token"
            if what == "context":
                remedy += ", such as beginning-of-sequence"
            elif given[1]:
                remedy = "the tokenizer merges it into the context's last token, so give token ids"
            raise ValueError(f"{name}: the {what} has no tokens: {remedy}")
    if isinstance(context, str) or isinstance(continuation, str):
        raise TypeError(
            f"{name}: one is text, the other is not: give both as text, or both as token ids"
        )
    token_ids, *_ = inputs.check(name, [*context, *continuation], PARAMS)
    return Pair(token_ids, len(context))


def score_pairs(session: Session, pairs: list[Pair], use_tqdm: Shown) -> list[Score]:
    """Run all pairs, and return their scores in the order of the pairs."""
    scores: dict[int, Score] = {}  # index of a pair -> its score
    requests: list[Request] = []  # all that have started
    waiting = deque(by_context(pairs))
    # Request id -> (index of its pair, indices of the pairs that follow it).
    running: dict[int, tuple[int, list[int]]] = {}
    with session.call() as engine:
        blocks = engine.scheduler.blocks
        sizes = [-(-len(pair.token_ids) // blocks.block_size) for pair in pairs]
        # Pairs that run and pairs that follow them never need more than all blocks together. So a
        # context is still cached when its other pairs start.
        room = blocks.num_blocks

        def start(index: int, followers: list[int]) -> None:
            token_ids, num_context = pairs[index]
            request = engine.add(token_ids, PARAMS, score_from=num_context)
            running[request.id] = index, followers
            requests.append(request)

        with progress(len(pairs), running, session.observe, use_tqdm):
            while waiting or running:
                while waiting and (not running or sum([sizes[i] for i in waiting[0]]) <= room):
                    first, *others = waiting.popleft()
                    room -= sum([sizes[i] for i in (first, *others)])
                    start(first, others)
                for request in session.step():
                    if request.id in running:
                        index, followers = running.pop(request.id)
                        scores[index] = pairs[index].read(request)
                        room += sizes[index]
                        for follower in followers:
                            start(follower, [])
    check_any_succeeded(requests)
    return [scores[i] for i in range(len(pairs))]


def by_context(pairs: list[Pair]) -> list[list[int]]:
    """Group the indices of pairs by context."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, pair in enumerate(pairs):
        groups.setdefault(pair.context, []).append(i)
    return list(groups.values())
