"""Read tokenizer.json without transformers, where it says all that transformers would read.

The token ids must be those that transformers gives, so what is unusual is left to it.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

from nanovllm.weights.model_files import read_json

# Classes of transformers that add nothing to tokenizer.json but what the configuration says, and
# Qwen's, which cut a text as Qwen's files do whatever the file says.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# For these, transformers makes the class that tokenizer_config.json names; for another model_type,
# such as qwen2, it may make that type's own.
TYPES_WITHOUT_CLASS = (None, "qwen3", "qwen3_moe", "llama", "mistral")
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_plain(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """What tokenizer.json holds; None if it is not all that transformers reads."""
    if config.get("tokenizer_class") not in PLAIN_CLASSES + QWEN_CLASSES:
        return None
    try:
        plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if not _says_all(plain, folder, config):
            return None
    except BaseException as error:  # of whatever kind: transformers will say what is wrong
        if not is_failure(error):
            raise
        return None
    plain.no_truncation()
    plain.no_padding()
    return plain


def _says_all(plain: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> bool:
    changes_more = ("auto_map", "add_bos_token", "add_eos_token", "split_special_tokens")
    if "eos_token" not in config or any(config.get(name) for name in changes_more):
        return False
    model_type = read_if_there(folder / "config.json").get("model_type")
    takes_file = config["tokenizer_class"] in PLAIN_CLASSES and model_type in TYPES_WITHOUT_CLASS
    if not takes_file and (config.get("add_prefix_space") or not _cuts_like_qwen(plain)):
        return False
    added = plain.get_added_tokens_decoder()
    for i, wanted in config.get("added_tokens_decoder", {}).items():
        if int(i) not in added or any(
            getattr(added[int(i)], name, value) != value for name, value in wanted.items()
        ):
            return False
    if any(
        plain.token_to_id(token) != i
        for token, i in read_if_there(folder / "added_tokens.json").items()
    ):
        return False
    older = read_if_there(folder / "special_tokens_map.json")
    if any(
        content(older[name]) != content(config.get(name)) for name in NAMED_TOKENS if name in older
    ):
        return False
    named = [config.get(name) for name in NAMED_TOKENS]
    for values in (config, older):
        more = values.get("additional_special_tokens") or values.get("extra_special_tokens") or []
        named += more.values() if isinstance(more, dict) else more
    special = {token.content for token in added.values() if token.special} | {None}
    return {content(token) for token in named} <= special


def _cuts_like_qwen(plain: tokenizers.Tokenizer) -> bool:
    """Whether transformers' class for Qwen gives the same ids as the file itself.

    That class takes the vocabulary and the merges of a file, and has its own idea of the rest.
    """
    model = plain.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout or model.end_of_word_suffix:
        return False
    words = {
        "type": "Split",
        "pattern": {"Regex": QWEN_WORDS},
        "behavior": "Isolated",
        "invert": False,
    }
    parts = plain.normalizer, plain.pre_tokenizer, plain.decoder
    match [json.loads(part.__getstate__()) if part else {} for part in parts]:
        case [
            {"type": "NFC"},
            {
                "pretokenizers": [
                    split,
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ]
            },
            {"type": "ByteLevel"},
        ]:
            return split == words
    return False


def content(token: "str | dict[str, Any] | None") -> str | None:
    return token["content"] if isinstance(token, dict) else token


def read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def is_failure(error: BaseException) -> bool:
    """Whether `error` tells of a failure. Ctrl-C does not; a panic in the tokenizers package does.

    Neither of them is an Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
