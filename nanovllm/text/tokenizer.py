"""The model folder's tokenizer and its end-of-sequence tokens.

The token ids must be those that transformers gives. But transformers takes seconds to import, most
of a start on a GPU. So the tokenizers package reads the folder's tokenizer.json where that file
says all that transformers would read; transformers is imported for the other folders, and for
whoever asks for a chat or for `Tokenizer.transformers`.
"""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from nanovllm.text.time_limit import run_limited
from nanovllm.weights.model_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Classes of transformers that add nothing to tokenizer.json but what the configuration says, and
# Qwen's, which cut a text as Qwen's files do whatever the file says.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# For these, transformers makes the class that tokenizer_config.json names; for another model_type,
# such as qwen2, it may make that type's own.
TYPES_WITHOUT_CLASS = (None, "qwen3", "qwen3_moe", "llama", "mistral")
CHAT_SECONDS = 30.0  # for a chat template to write one conversation: most take a millisecond
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SURROGATE = re.compile("[\ud800-\udfff]")
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Text to token ids and back. Raises ValueError for a folder whose tokenizer is broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = _read_if_there(folder / "tokenizer_config.json")
        self._plain = _read_plain(folder, self._config)
        if self._plain is None:
            _ = self.transformers  # now is the time to say what is wrong with it

    @cached_property
    def transformers(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
        except BaseException as error:  # which one, differs from release to release
            if not _is_failure(error):
                raise
            remedy = "download it again"
            if "auto_map" in self._config:
                remedy = "it may need the folder's Python code, which is never run: use token ids"
            raise ValueError(
                f"{self._folder}: its tokenizer cannot be loaded, {remedy} ({error})"
            ) from error

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
        return bool(self._config.get("chat_template")) or file.exists() and file.stat().st_size > 0

    def encode(self, name: str, texts: list[str], special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each text; errors call them `name`.

        `special_tokens`: with those that the tokenizer puts around a text, such as one for its
        beginning.
        """
        for i, text in enumerate(texts):
            if SURROGATE.search(text):
                raise ValueError(
                    f"{name}[{i}] is {text[:50]!r}, which holds half a character: decode it with "
                    "errors='replace'"
                )
        if self._plain is None:
            if not texts:
                return []
            return self.transformers(texts, add_special_tokens=special_tokens)["input_ids"]
        encodings = self._plain.encode_batch(texts, add_special_tokens=special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, outputs: list[list[int]]) -> list[str]:
        """The text of each list of token ids, special tokens left out."""
        if self._backend is not None:  # it works in threads, where transformers goes one by one
            return self._backend.decode_batch(outputs, skip_special_tokens=True)
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
        return frozenset(
            i for i, token in self._backend.get_added_tokens_decoder().items() if token.special
        )

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        decoder = self._backend.decoder if self._backend is not None else None
        if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
            return frozenset()
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    def is_silent(self, token: int) -> bool:
        """Whether `decode` leaves the token out: it is special, or the model has more entries
        than the tokenizer.
        """
        if token in self._special_ids:
            return True
        return self._backend is not None and self._backend.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether the token is one byte, decoded together with its neighbours: to characters if
        all are valid.
        """
        return token in self._byte_ids

    def encode_chats(self, chats: list[list[dict]], options: dict[str, Any]) -> list[list[int]]:
        """The token ids of each conversation, written by the tokenizer's chat template.

        They end where the assistant's turn begins. Raises ValueError for a conversation that the
        template refuses, or with which it is not done after CHAT_SECONDS.
        """
        options = {"add_generation_prompt": True, **options, "tokenize": False}
        tokenizer, texts = self.transformers, []

        def write() -> None:
            for chat in chats:
                texts.append(tokenizer.apply_chat_template(chat, **options))

        try:
            run_limited(write, CHAT_SECONDS, progress=lambda: len(texts))
        except TimeoutError as error:
            raise ValueError(
                f"messages[{len(texts)}] keeps the model's chat template busy without end: {error}."
                " Shorten it, or give another template in chat_template_kwargs['chat_template']"
            ) from error
        except Exception as error:  # a template raises whatever it likes
            raise ValueError(
                f"messages[{len(texts)}] does not fit the model's chat template: {error}"
            ) from error
        # The template has written the special tokens that are needed.
        return self.encode("messages", texts, special_tokens=False)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer. None if it has none: then prompts are token ids, without any text."""
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
    except BaseException as error:  # of whatever kind: transformers will say what is wrong
        if not _is_failure(error):
            raise
        return None
    plain.no_truncation()
    plain.no_padding()
    return plain


def _says_all(plain: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> bool:
    changes_more = ("auto_map", "add_bos_token", "add_eos_token", "split_special_tokens")
    if "eos_token" not in config or any(config.get(name) for name in changes_more):
        return False
    model_type = _read_if_there(folder / "config.json").get("model_type")
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
        for token, i in _read_if_there(folder / "added_tokens.json").items()
    ):
        return False
    older = _read_if_there(folder / "special_tokens_map.json")
    if any(
        _content(older[name]) != _content(config.get(name))
        for name in NAMED_TOKENS
        if name in older
    ):
        return False
    named = [config.get(name) for name in NAMED_TOKENS]
    for values in (config, older):
        more = values.get("additional_special_tokens") or values.get("extra_special_tokens") or []
        named += more.values() if isinstance(more, dict) else more
    special = {token.content for token in added.values() if token.special} | {None}
    return {_content(token) for token in named} <= special


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


def _is_failure(error: BaseException) -> bool:
    """Whether `error` tells of a failure. Ctrl-C does not; a panic in the tokenizers package does.

    Neither of them is an Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _content(token: "str | dict[str, Any] | None") -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def load_stop_ids(folder: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end a sequence: the tokenizer's, and those that the folder's files name.

    The files are generation_config.json and, where that names none, config.json.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = _read_if_there(path).get("eos_token_id")
        if eos is not None:
            eos = eos if isinstance(eos, list) else [eos]
            if any(type(i) is not int or i < 0 for i in eos):
                raise ValueError(
                    f"{path}: eos_token_id is {eos}: it must be a token id or a list of them"
                )
            ids.update(eos)
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
