"""Check what constrains which tokens are sampled: logit_bias, allowed_token_ids, bad_words and
logits_processors of SamplingParams.

Knows what can be said without a model, and what the model's vocabulary and tokenizer say to it.
"""

import inspect
from dataclasses import replace
from typing import Any

from nanovllm.checks import as_integer, as_number, check_vocabulary, keep, shown, token_ids

MAX_BIAS = 100


def check_constraints(params: Any) -> None:
    """Put checked values, as tuples, in the place of what was given to SamplingParams.

    Raises TypeError or ValueError with field, value and remedy.
    """
    keep(params, "logit_bias", _pairs(params.logit_bias))
    if params.allowed_token_ids is not None:
        allowed = token_ids("allowed_token_ids", params.allowed_token_ids)
        if not allowed:
            raise ValueError(
                "allowed_token_ids is empty, so nothing could be sampled: name a token, or use "
                "None for all"
            )
        keep(params, "allowed_token_ids", allowed)
    words = () if params.bad_words is None else params.bad_words
    if not isinstance(words, (list, tuple)):
        raise TypeError(f"bad_words is {shown(words)}: use a list of strings")
    words = [word if isinstance(word, str) else token_ids("bad_words", word) for word in words]
    if not all(words):
        raise ValueError("bad_words holds an empty one, which bars nothing: leave it out")
    keep(params, "bad_words", tuple(words))
    functions = () if params.logits_processors is None else params.logits_processors
    if not isinstance(functions, (list, tuple)) or not all(map(callable, functions)):
        raise TypeError(
            f"logits_processors is {shown(functions)}: use a list of functions of token ids and "
            "logits"
        )
    for function in functions:
        _check_arguments(function)
    keep(params, "logits_processors", tuple(functions))


def _check_arguments(function: Any) -> None:
    """Refuse a function that cannot be called with two arguments, as far as Python can say."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # it is not Python's
        return
    try:
        signature.bind([], None)
    except TypeError as error:
        raise TypeError(
            f"logits_processors holds {shown(function)}, which takes other arguments ({error}): "
            "it is called with the token ids of the output so far, and the logits"
        ) from None


def _pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """logit_bias as pairs. JSON has no integers for keys: strings that spell them are taken."""
    try:
        bias = dict(() if given is None else given)
    except (TypeError, ValueError):
        raise TypeError(f"logit_bias is {shown(given)}: use a dict of token ids") from None
    pairs = []
    for key, value in bias.items():
        spelt = isinstance(key, str) and key.isdecimal()
        token, number = as_integer(int(key) if spelt else key), as_number(value)
        if token is None:
            raise TypeError(f"logit_bias holds {shown(key)}: token ids are integers")
        if number is None:
            raise TypeError(f"logit_bias[{token}] is {shown(value)}: use a number")
        if not -MAX_BIAS <= number <= MAX_BIAS:
            raise ValueError(
                f"logit_bias[{token}] is {shown(value)}: use a number from -100 to 100, or "
                "bad_words or allowed_token_ids to bar a token"
            )
        pairs.append((token, float(number)))
    return tuple(pairs)


def resolve_constraints(
    name: str, params: Any, tokenizer: Any, vocab_size: int, stop_ids: frozenset[int]
) -> Any:
    """The same SamplingParams, which errors call `name`, with token ids for the texts in bad_words.

    `stop_ids`: end-of-sequence's. Raises ValueError for token ids that are not the vocabulary's,
    and where no token is left to be sampled.
    """
    params = replace(params, bad_words=_sequences(name, params.bad_words, tokenizer))
    allowed, sequences = params.allowed_token_ids, params.bad_words
    of_field = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": allowed or (),
        "bad_words": [token for sequence in sequences for token in sequence],
    }
    for field, ids in of_field.items():
        check_vocabulary(f"{name}.{field}", ids, vocab_size)
    barred = {sequence[0] for sequence in sequences if len(sequence) == 1}
    if params.min_tokens:
        barred |= stop_ids.union(params.stop_token_ids)
    if barred.issuperset(range(vocab_size) if allowed is None else allowed):
        raise ValueError(
            f"{name} bars every token by bad_words, by min_tokens={params.min_tokens} or by what "
            "allowed_token_ids leaves out: allow one that ends no output"
        )
    return params


def _sequences(name: str, words: Any, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word: of a text, those with and those without a space before it."""
    if tokenizer is None and any(isinstance(word, str) for word in words):
        raise ValueError(
            f"{name}.bad_words holds text, but the model's folder has no tokenizer: give lists of "
            "token ids, or add tokenizer.json"
        )
    sequences: dict[tuple[int, ...], None] = {}  # a set in order
    for word in words:
        if not isinstance(word, str):
            sequences[word] = None
            continue
        bare = word.removeprefix(" ") or word
        both = tokenizer.encode(f"{name}.bad_words", [bare, f" {bare}"], special_tokens=False)
        if not any(both):
            raise ValueError(
                f"{name}.bad_words holds {shown(word)}, of which the model's tokenizer makes no "
                "tokens: leave it out"
            )
        sequences |= dict.fromkeys([tuple(ids) for ids in both if ids])
    return tuple(sequences)
