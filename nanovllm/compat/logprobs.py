"""Log-probabilities in vLLM's form, with ranks and texts; a call's dicts have the numbers alone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

Texts = Mapping[int, str | None]  # token id -> its text alone, None without a tokenizer


class Logprob(NamedTuple):
    """Of a token at some place."""

    logprob: float
    rank: int | None  # 1: the likeliest; None: beyond as many as were asked for
    decoded_token: str | None


class TokenTexts(dict[int, str | None]):
    """Texts as transformers decodes them, each made when it is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str | None:
        text = str(self._tokenizer.transformers.decode([token])) if self._tokenizer else None
        self[token] = text
        return text


def with_ranks(row: dict[int, float], count: int, texts: Texts) -> dict[int, Logprob]:
    """One place's log-probabilities: of the token that is there, which comes first, and of the
    `count` likeliest.
    """
    by_rank = sorted(row, key=row.__getitem__, reverse=True)
    ranks: dict[int, int | None] = {token: i for i, token in enumerate(by_rank, 1)}
    if len(row) > count:  # the first is not among the likeliest
        ranks[next(iter(row))] = None
    return {token: Logprob(value, ranks[token], texts[token]) for token, value in row.items()}
