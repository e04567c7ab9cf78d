"""A reader of tokenizer.json that does without transformers.

The token ids must be those of transformers. So this reader takes a folder only if tokenizer.json
alone decides them, and leaves all unusual folders to transformers.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

from nanovllm.weights.model_files import read_json

# PLAIN_CLASSES of transformers follow tokenizer.json and tokenizer_config.json in everything.
# QWEN_CLASSES split a text into words as Qwen's files do, whatever tokenizer.json says.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# For these values of model_type, transformers uses the class that tokenizer_config.json names. For
# others, such as qwen2, it may use the model type's own class.
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
    """Read the folder's tokenizer.json, or return None if transformers might read it differently.

    `config` is the content of tokenizer_config.json.
    """
    if config.get("tokenizer_class") not in PLAIN_CLASSES + QWEN_CLASSES:
        return None
    try:
        plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if not _decides_all(plain, folder, config):
            return None
    except BaseException as error:  # of any type: transformers will say what is wrong
        if not is_failure(error):
            raise
        return None
    plain.no_truncation()
    plain.no_padding()
    return plain


def _decides_all(plain: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> bool:
    """Return whether `plain`, which was read from tokenizer.json, gives the ids of transformers.

    The folder's other files must ask for nothing that `plain` does not do.
    """
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
    """Return whether transformers' class for Qwen gives the same ids as the file itself.

    That class takes vocabulary and merges from the file. Normalizer, pre-tokenizer and decoder are
    its own, so the file must have the same ones.
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
    """Return the text of a token, which a configuration file gives as a str or as a dict."""
    return token["content"] if isinstance(token, dict) else token


def read_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON file, or return {} if it does not exist."""
    return read_json(path) if path.exists() else {}


def is_failure(error: BaseException) -> bool:
    """Return whether `error` is a failure, and not an interrupt such as Ctrl-C.

    A panic in the tokenizers package is a failure, although it is not an Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
