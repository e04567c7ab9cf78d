"""The most text that one token can stand for.

With this bound, a text is known to be too long before it is tokenized. Some tokenizers drop parts
of a text, or put any number of characters into one token: for those there is no bound.
"""

import json
from typing import Any

import tokenizers

# Unicode's composed form of a text has at least a quarter of its bytes. An iota with two accents,
# for example, goes from seven bytes to two.
COMPOSED = 4
KEEPING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")


def most_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """Return the most bytes of text that one token of a tokenizer stands for; None: unknown."""
    normalizer, pre_tokenizer = state(backend.normalizer), state(backend.pre_tokenizer)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    vocabulary = backend.get_vocab(with_added_tokens=False)
    model = backend.model
    shrinks = most_shrinking(normalizer)
    if not isinstance(model, tokenizers.models.BPE) or shrinks is None or drops(pre_tokenizer):
        return None
    steps = [step["type"] for step in parts(pre_tokenizer, "pretokenizers")]
    if "ByteLevel" in steps:
        # Each character of a token is a byte.
        is_whole = {*tokenizers.pre_tokenizers.ByteLevel.alphabet()} <= vocabulary.keys()
        sizes = [len(token) for token in vocabulary]
    else:
        is_whole = model.byte_fallback and all(f"<0x{i:02X}>" in vocabulary for i in range(256))
        sizes = [len(token.encode()) for token in vocabulary]
    if not is_whole:  # what it does not know is dropped, or becomes one token
        return None
    return shrinks * max([*sizes, *[len(token.encode()) for token in added]])


def takes_blanks(backend: tokenizers.Tokenizer) -> bool:
    """Tell whether a token takes all blanks beside it, however many they are."""
    added = backend.get_added_tokens_decoder().values()
    return any(token.lstrip or token.rstrip for token in added)


def state(part: Any) -> dict[str, Any]:
    return json.loads(part.__getstate__()) if part else {}


def parts(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer."""
    return part.get(name, []) if part.get("type") == "Sequence" else [part] if part else []


def most_shrinking(normalizer: dict[str, Any]) -> int | None:
    """Return how many times shorter a text may become, in bytes; None: nobody knows."""
    factor = 1
    for step in parts(normalizer, "normalizers"):
        if step["type"] == "NFC":
            factor *= COMPOSED
        elif step["type"] == "Replace":
            old = step["pattern"].get("String")
            if old is None or len(step["content"].encode()) < len(old.encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor


def drops(pre_tokenizer: dict[str, Any]) -> bool:
    """Tell whether a pre-tokenizer may drop parts of a text."""
    return any(
        step["type"] not in KEEPING or step.get("behavior") == "Removed"
        for step in parts(pre_tokenizer, "pretokenizers")
    )
