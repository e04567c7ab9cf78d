"""What a model's vocabulary and tokenizer say to the constraints of a request."""

from dataclasses import replace
from typing import Any

from nanovllm.checks import check_vocabulary, shown
from nanovllm.frontend.tokenizer import Tokenizer, need_tokenizer
from nanovllm.sampling_params import SamplingParams


def resolve_constraints(
    name: str,
    params: Any,  # a SamplingParams, whose lists are tuples
    tokenizer: Tokenizer | None,
    vocab_size: int,
    stop_ids: frozenset[int],
) -> SamplingParams:
    """Put token ids in the place of the texts in bad_words.

    `name`: what errors call the parameters. `stop_ids`: end-of-sequence's. Raises ValueError for
    token ids that are not the vocabulary's, and where no token is left to be sampled.
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


def _sequences(name: str, words: Any, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word: of a text, those with and without a space before it."""
    if any(isinstance(word, str) for word in words):
        need_tokenizer(tokenizer, f"{name}.bad_words holds text", "give lists of token ids")
    sequences: dict[tuple[int, ...], None] = {}  # a set in order
    for word in words:
        if not isinstance(word, str):
            sequences[word] = None
            continue
        assert tokenizer is not None, "there is text"
        bare = word.removeprefix(" ") or word
        both = tokenizer.encode(f"{name}.bad_words", [bare, f" {bare}"], special_tokens=False)
        if not any(both):
            raise ValueError(
                f"{name}.bad_words holds {shown(word)}, of which the model's tokenizer makes no "
                "tokens: leave it out"
            )
        sequences |= dict.fromkeys([tuple(ids) for ids in both if ids])
    return tuple(sequences)
