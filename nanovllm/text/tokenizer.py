"""The model folder's tokenizer and its end-of-sequence tokens.

The token ids must be those that transformers gives. But that takes seconds to import, most of a start on a GPU: where the
folder's tokenizer.json says all by itself, the tokenizers package reads it, until someone asks for a chat or for more.
"""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Classes of transformers that add nothing to tokenizer.json but what the configuration says, and Qwen's, which cut a text
# as Qwen's files do whatever the file says.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SURROGATE = re.compile("[\ud800-\udfff]")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Raises ValueError for a folder whose tokenizer is broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = _read_json(folder / "tokenizer_config.json")
        self._plain = _read_plain(folder, self._config)
        if self._plain is None:
            _ = self.transformers  # now is the time to say what is wrong with it

    @cached_property
    def transformers(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._folder)
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(f"{self._folder}: its tokenizer cannot be loaded, download it again ({error})") from error

    @property
    def eos_token_id(self) -> int | None:
        if self._plain is None:
            return self.transformers.eos_token_id
        eos_token = _content(self._config.get("eos_token"))
        return None if eos_token is None else self._plain.token_to_id(eos_token)

    @property
    def has_chat_template(self) -> bool:
        if self._plain is None:
            return bool(self.transformers.chat_template)
        file = self._folder / "chat_template.jinja"
        return bool(self._config.get("chat_template")) or file.exists() and bool(file.read_text())

    def encode(self, name: str, texts: list[str], special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each text; errors call them `name`.

        `special_tokens`: with those that the tokenizer puts around a text, such as one for its beginning.
        """
        for i, text in enumerate(texts):
            if SURROGATE.search(text):
                raise ValueError(f"{name}[{i}] is {text[:50]!r}, which holds half a character: decode it with errors='replace'")
        if self._plain is None:
            return self.transformers(texts, add_special_tokens=special_tokens)["input_ids"] if texts else []
        return [encoding.ids for encoding in self._plain.encode_batch(texts, add_special_tokens=special_tokens)]

    def decode(self, outputs: list[list[int]]) -> list[str]:
        """The text of each list of token ids, special tokens left out."""
        if self._backend is not None:
            return self._backend.decode_batch(outputs, skip_special_tokens=True)  # in threads, transformers has none
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return [self.transformers.decode(ids, **options) for ids in outputs]

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer | None:
        """What decodes without transformers' help, if the folder's tokenizer has it."""
        return self._plain or getattr(self.transformers, "backend_tokenizer", None)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(self.transformers.all_special_ids)
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        decoder = self._backend.decoder if self._backend is not None else None
        if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
            return frozenset()
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    def is_silent(self, token: int) -> bool:
        """Whether `decode` leaves the token out: it is special, or the model has more entries than the tokenizer."""
        if token in self._special_ids:
            return True
        return self._backend is not None and self._backend.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether the token is one byte, decoded together with its neighbours: to characters if all are valid."""
        return token in self._byte_ids

    def encode_chats(self, chats: list[list[dict]], options: dict[str, Any]) -> list[list[int]]:
        """The token ids of each conversation by the tokenizer's chat template, ready for the assistant's turn."""
        texts = []
        for i, chat in enumerate(chats):
            try:
                wishes = {"add_generation_prompt": True, **options, "tokenize": False}
                texts.append(self.transformers.apply_chat_template(chat, **wishes))
            except Exception as error:  # a template raises whatever it likes
                raise ValueError(f"messages[{i}] does not fit the model's chat template: {error}") from error
        return self.encode("messages", texts, special_tokens=False)  # the template has written those that are needed


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, or None where it has none: then prompts are token ids and outputs have no text."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return Tokenizer(folder) if any((folder / name).exists() for name in names) else None


def _read_plain(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """What tokenizer.json holds; None if it is not all that transformers reads."""
    if config.get("tokenizer_class") not in PLAIN_CLASSES + QWEN_CLASSES:
        return None
    try:
        plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if not _says_all(plain, folder, config):
            return None
    except Exception:  # noqa: BLE001 - of whatever kind: transformers will say what is wrong
        return None
    plain.no_truncation()
    plain.no_padding()
    return plain


def _says_all(plain: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> bool:
    changes_more = ("auto_map", "add_bos_token", "add_eos_token", "split_special_tokens")
    if "eos_token" not in config or any(config.get(name) for name in changes_more):
        return False
    if config["tokenizer_class"] in QWEN_CLASSES and (config.get("add_prefix_space") or not _cuts_like_qwen(plain)):
        return False
    added = plain.get_added_tokens_decoder()
    for i, wanted in config.get("added_tokens_decoder", {}).items():
        if int(i) not in added or any(getattr(added[int(i)], name, value) != value for name, value in wanted.items()):
            return False
    if any(plain.token_to_id(token) != i for token, i in _read_json(folder / "added_tokens.json").items()):
        return False
    older = _read_json(folder / "special_tokens_map.json")
    if any(_content(older[name]) != _content(config.get(name)) for name in NAMED_TOKENS if name in older):
        return False
    named = [config.get(name) for name in NAMED_TOKENS]
    for values in (config, older):
        more = values.get("additional_special_tokens") or values.get("extra_special_tokens") or []
        named += more.values() if isinstance(more, dict) else more
    special = {token.content for token in added.values() if token.special} | {None}
    return {_content(token) for token in named} <= special


def _cuts_like_qwen(plain: tokenizers.Tokenizer) -> bool:
    words = {"type": "Split", "pattern": {"Regex": QWEN_WORDS}, "behavior": "Isolated", "invert": False}
    parts = plain.normalizer, plain.pre_tokenizer, plain.decoder
    match [json.loads(part.__getstate__()) if part else {} for part in parts]:
        case [
            {"type": "NFC"},
            {"pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]},
            {"type": "ByteLevel"},
        ]:
            return split == words
    return False


def _content(token: "str | dict[str, Any] | None") -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    """The values of a file that need not be there. What is wrong in it, transformers says."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def load_stop_ids(folder: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end a sequence: generation_config.json's (config.json's where that has none) and the tokenizer's."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        try:
            eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if eos is not None:
            eos = eos if isinstance(eos, list) else [eos]
            if any(type(i) is not int or i < 0 for i in eos):
                raise ValueError(f"{path}: eos_token_id is {eos}: it must be a token id or a list of them")
            ids.update(eos)
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
