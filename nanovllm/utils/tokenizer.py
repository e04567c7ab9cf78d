"""The model folder's tokenizer and its end-of-sequence tokens.

The token ids must be those that transformers gives. But that takes seconds to import, most of a start on a GPU: where the
folder's tokenizer.json says all by itself, the tokenizers package reads it, until someone asks for a chat or for more.
"""

import json
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
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


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
        return bool(self._config.get("chat_template")) or any((self._folder / name).exists() for name in TEMPLATES)

    def encode(self, texts: list[str], special_tokens: bool = True) -> list[list[int]]:
        """`special_tokens`: with those that the tokenizer puts around a text, such as one for its beginning."""
        if self._plain is None:
            return self.transformers(texts, add_special_tokens=special_tokens)["input_ids"] if texts else []
        return [encoding.ids for encoding in self._plain.encode_batch(texts, add_special_tokens=special_tokens)]

    def decode(self, outputs: list[list[int]]) -> list[str]:
        """The text of each list of token ids, special tokens left out."""
        if (plain := self._plain or getattr(self.transformers, "backend_tokenizer", None)) is not None:
            return plain.decode_batch(outputs, skip_special_tokens=True)  # in threads, where transformers goes one by one
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return [self.transformers.decode(ids, **options) for ids in outputs]

    def encode_chats(self, chats: list[list[dict]], options: dict[str, Any]) -> list[list[int]]:
        """The token ids of each conversation by the tokenizer's chat template, ready for the assistant's turn."""
        texts = []
        for i, chat in enumerate(chats):
            try:
                wishes = {"add_generation_prompt": True, **options, "tokenize": False}
                texts.append(self.transformers.apply_chat_template(chat, **wishes))
            except Exception as error:  # a template raises whatever it likes
                raise ValueError(f"messages[{i}] does not fit the model's chat template: {error}") from error
        return self.encode(texts, special_tokens=False)  # the template has written those that are needed


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, or None where it has none: then prompts are token ids and outputs have no text."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return Tokenizer(folder) if any((folder / name).exists() for name in names) else None


def _read_plain(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """What tokenizer.json holds; None if it is not all that transformers reads."""
    kind = config.get("tokenizer_class")
    if kind not in PLAIN_CLASSES + QWEN_CLASSES or "auto_map" in config:
        return None
    if config.get("add_bos_token") or config.get("add_eos_token") or "eos_token" not in config:
        return None
    try:
        plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - of whatever kind: transformers will say what is wrong
        return None
    added = {i: (token.content, token.special) for i, token in plain.get_added_tokens_decoder().items()}
    wanted = config.get("added_tokens_decoder", {})
    wanted = {int(i): (token["content"], token.get("special", False)) for i, token in wanted.items()}
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [config.get(name) for name in NAMED_TOKENS] + list(more.values() if isinstance(more, dict) else more)
    special = {content for content, is_special in added.values() if is_special} | {None}
    older = _read_json(folder / "added_tokens.json")
    if not (
        wanted.items() <= added.items()
        and {_content(token) for token in named} <= special
        and all(plain.token_to_id(token) == i for token, i in older.items())
        and (kind in PLAIN_CLASSES or _cuts_like_qwen(plain))
    ):
        return None
    plain.no_truncation()
    plain.no_padding()
    return plain


def _cuts_like_qwen(plain: tokenizers.Tokenizer) -> bool:
    words = {"type": "Split", "pattern": {"Regex": QWEN_WORDS}, "behavior": "Isolated", "invert": False}
    state_of = [json.loads(part.__getstate__()) if part else {} for part in (plain.normalizer, plain.pre_tokenizer)]
    match state_of:
        case [
            {"type": "NFC"},
            {"pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]},
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
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if eos is not None:
            ids.update(eos if isinstance(eos, list) else [eos])
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
