"""Checks of a request's constraints against the model's vocabulary and tokenizer."""

from dataclasses import replace
from typing import Any

from nanovllm.checks import check_vocabulary, short_repr
from nanovllm.frontend.tokenizer import Tokenizer, need_tokenizer
from nanovllm.sampling_params import SamplingParams


def resolve_constraints(
    name: str,
    params: Any,  # a SamplingParams, whose lists are tuples
    tokenizer: Tokenizer | None,
    vocab_size: int,
    stop_ids: frozenset[int],
) -> SamplingParams:
    """Replace texts in bad_words by token ids, and check the constraints of `params`.

    Errors call the parameters `name`. `stop_ids` are the ids of end-of-sequence. Raises ValueError
    for token ids outside the vocabulary, and where no token is left to sample.
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
            f"{name} bars every token by bad_words, by min_tokens={params.min_tokens} or by "
            "allowed_token_ids: allow one that does not end the output"
        )
    return params


def _sequences(name: str, words: Any, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word. A text gives two sequences: without and with a space
    before it.
    """
    if any(isinstance(word, str) for word in words):
        need_tokenizer(tokenizer, f"{name}.bad_words holds text", "give lists of token ids")
    sequences: dict[tuple[int, ...], None] = {}  # an ordered set
    for word in words:
        if not isinstance(word, str):
            sequences[word] = None
            continue
        assert tokenizer is not None, "need_tokenizer has checked it"
        bare = word.removeprefix(" ") or word
        both = tokenizer.encode(f"{name}.bad_words", [bare, f" {bare}"], special_tokens=False)
        if not any(both):
            raise ValueError(
                f"{name}.bad_words holds {short_repr(word)}, which the model's tokenizer "
                "encodes to no "
                "tokens: leave it out"
            )
        sequences |= dict.fromkeys([tuple(ids) for ids in both if ids])
    return tuple(sequences)
