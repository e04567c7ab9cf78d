"""Score texts: how likely the model takes given continuations to be after given contexts.

A pair of context and continuation is a request that generates nothing and asks for the
log-probabilities of the continuation alone. Of pairs with the same context one runs first; the
others follow once it has ended, and find the context in the prefix cache.
"""

import math
from collections import deque
from typing import Any, NamedTuple

from nanovllm.checks import shown
from nanovllm.engine.sequence import Sequence
from nanovllm.inputs import Inputs
from nanovllm.outputs import split_records
from nanovllm.progress import Shown, progress
from nanovllm.sampling_params import SamplingParams
from nanovllm.session import Session

PARAMS = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
Score = dict[str, Any]


class Pair(NamedTuple):
    """Both as token ids, one after the other."""

    token_ids: list[int]
    num_context: int

    @property
    def context(self) -> tuple[int, ...]:
        return tuple(self.token_ids[: self.num_context])

    def read(self, request: Sequence) -> Score:
        """What the request of this pair has come to."""
        continuation = self.token_ids[self.num_context :]
        assert request.scores is not None, "PARAMS ask for them"
        ids, values = split_records(request.scores.records, len(continuation))
        logprobs = values[:, 0].tolist()
        return {
            "token_ids": continuation,
            "logprobs": logprobs,
            "cumulative_logprob": math.fsum(logprobs),
            "is_greedy": (ids[:, 0] == ids[:, 1]).tolist(),
        }


def score(
    session: Session, inputs: Inputs, contexts: Any, continuations: Any, use_tqdm: Shown
) -> list[Score | list[Score]]:
    """What `LLM.score` returns."""
    inputs.resolve_params("score", PARAMS)
    rows = read_pairs(inputs, contexts, continuations)
    scores = iter(score_pairs(session, [pair for row in rows for pair in row], use_tqdm))
    scored = [[next(scores) for _ in row] for row in rows]
    return [row if is_list(given) else row[0] for row, given in zip(scored, continuations)]


def read_pairs(inputs: Inputs, contexts: Any, continuations: Any) -> list[list[Pair]]:
    """For each context its pairs: one, or as many as the list has that stands for it.

    All of them are checked.
    """
    for name, value in (("contexts", contexts), ("continuations", continuations)):
        if not isinstance(value, (list, tuple)):
            raise TypeError(
                f"{name} is {shown(value)}: give a list, with an entry for each context"
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
    """Whether this is a list of continuations; one alone is text, or a list of token ids."""
    if not isinstance(continuations, (list, tuple)):
        return False
    return any([isinstance(one, (str, list, tuple)) for one in continuations])


def _encode(inputs: Inputs, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The pairs, token ids in place of what is text, as evaluation harnesses make them.

    The context and the whole text are encoded, and what the whole has after as many tokens as the
    context has is the continuation. Many tokens begin with a space, so spaces at the context's end
    go to the continuation.
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
    """`given`: what the two are made of."""
    if isinstance(context, str) or isinstance(continuation, str):
        raise TypeError(f"{name}: one is text, the other is not: give both as text, or token ids")
    for what, part in (("context", context), ("continuation", continuation)):
        if not isinstance(part, (list, tuple)):
            raise TypeError(
                f"{name}: the {what} is {shown(part)}: give text or a list of token ids"
            )
        if not part:
            remedy = "give at least one token"
            if what == "context":
                remedy += ", such as the one with which texts begin"
            elif given[1]:
                remedy = "the tokenizer joins it to the context's, so give both as token ids"
            raise ValueError(f"{name}: the {what} has no tokens: {remedy}")
    token_ids, *_ = inputs.request(name, [*context, *continuation], PARAMS)
    return Pair(token_ids, len(context))


def score_pairs(session: Session, pairs: list[Pair], use_tqdm: Shown) -> list[Score]:
    """Run all pairs to their end; returns their scores in order."""
    scores: dict[int, Score] = {}  # by a pair's place
    waiting = deque(by_context(pairs))
    under_way: dict[int, tuple[int, list[int]]] = {}  # by request id: its pair, and who follows it
    with session.call() as engine, session.busy():
        blocks = engine.scheduler.blocks
        sizes = [-(-len(pair.token_ids) // blocks.block_size) for pair in pairs]
        # Those under way and those that follow them never need more than all blocks, so a context
        # is still cached when the others come.
        room = blocks.num_blocks

        def start(place: int, followers: list[int]) -> None:
            token_ids, num_context = pairs[place]
            request = engine.add(token_ids, PARAMS, score_from=num_context)
            under_way[request.id] = place, followers

        with progress(len(pairs), under_way, session.observe, use_tqdm):
            while waiting or under_way:
                while waiting and (not under_way or sum([sizes[i] for i in waiting[0]]) <= room):
                    first, *others = waiting.popleft()
                    room -= sum([sizes[i] for i in (first, *others)])
                    start(first, others)
                for request in session.step():
                    if request.id in under_way:
                        place, followers = under_way.pop(request.id)
                        scores[place] = pairs[place].read(request)
                        room += sizes[place]
                        for follower in followers:
                            start(follower, [])
    return [scores[i] for i in range(len(pairs))]


def by_context(pairs: list[Pair]) -> list[list[int]]:
    """The places of the pairs, those with the same context together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, pair in enumerate(pairs):
        groups.setdefault(pair.context, []).append(i)
    return list(groups.values())
