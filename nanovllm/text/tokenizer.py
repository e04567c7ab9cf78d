"""The model folder's tokenizer.

The token ids must be those that transformers gives. But transformers takes seconds to import, most
of a start on a GPU. So the tokenizers package reads the folder's tokenizer.json where that file
says all that transformers would read; transformers is imported for the other folders, and for
whoever asks for a chat or for `Tokenizer.transformers`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from nanovllm.checks import shown
from nanovllm.text.chat import write_chats
from nanovllm.text.token_bytes import most_bytes, takes_blanks
from nanovllm.text.tokenizer_json import content, is_failure, read_if_there, read_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SURROGATE = re.compile("[\ud800-\udfff]")
# Characters that are tokenized at once, if a text is no longer. The tokenizers package takes up to
# 140 bytes of memory for each.
TOKENIZED_AT_ONCE = 2**20


class Tokenizer:
    """Text to token ids and back. Raises ValueError for a folder whose tokenizer is broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_if_there(folder / "tokenizer_config.json")
        self._plain = read_plain(folder, self._config)
        if self._plain is None:
            _ = self.transformers  # now is the time to say what is wrong with it

    @cached_property
    def transformers(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
        except BaseException as error:  # which one, differs from release to release
            if not is_failure(error):
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
        eos_token = content(self._config.get("eos_token"))
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
        beginning. Raises ValueError for the first that is half a character, or that the tokenizer
        does not take.
        """
        for i, text in enumerate(texts):
            if SURROGATE.search(text):
                raise ValueError(
                    f"{name}[{i}] is {text[:50]!r}, which holds half a character: decode it with "
                    "errors='replace'"
                )
        try:
            return self._encode(texts, special_tokens)
        except BaseException as error:  # a tokenizer raises whatever it likes
            if not is_failure(error):
                raise
            self._refuse_first_wrong(name, texts, special_tokens)
            raise

    def _refuse_first_wrong(self, name: str, texts: list[str], special_tokens: bool) -> None:
        for i, text in enumerate(texts):
            try:
                self._encode([text], special_tokens)
            except BaseException as error:
                if not is_failure(error):
                    raise
                raise ValueError(
                    f"{name}[{i}] is {shown(text)}, of which the model's tokenizer makes no "
                    f"tokens: give another text, or token ids ({type(error).__name__}: {error})"
                ) from error

    def _encode(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        token_ids: list[list[int]] = []
        for some in batches(texts, TOKENIZED_AT_ONCE):
            if self._plain is None:
                encoded = self.transformers(some, add_special_tokens=special_tokens)
                token_ids += encoded["input_ids"]
            else:
                encodings = self._plain.encode_batch(some, add_special_tokens=special_tokens)
                token_ids += [encoding.ids for encoding in encodings]
        return token_ids

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens below which no encoding of the text has so few. It takes no
        time: it is a text's length in bytes over that of the longest token.
        """
        if self._most_bytes is None:
            return 0
        if self._takes_blanks:
            text = "".join(text.split())
        return -(-len(text.encode(errors="surrogatepass")) // self._most_bytes)

    @cached_property
    def _most_bytes(self) -> int | None:
        return None if self._backend is None else most_bytes(self._backend)

    @cached_property
    def _takes_blanks(self) -> bool:
        return self._backend is not None and takes_blanks(self._backend)

    def decode(self, outputs: list[list[int]], with_special: Sequence[int] = ()) -> list[str]:
        """The text of each list of token ids, special tokens left out but for lists at the indices
        `with_special`.
        """
        texts = self._decode(outputs, skip_special=True)
        if with_special:
            whole = self._decode([outputs[i] for i in with_special], skip_special=False)
            for i, text in zip(with_special, whole):
                texts[i] = text
        return texts

    def _decode(self, outputs: list[list[int]], skip_special: bool) -> list[str]:
        if self._backend is not None:  # it works in threads, where transformers goes one by one
            return self._backend.decode_batch(outputs, skip_special_tokens=skip_special)
        options = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
        return [str(self.transformers.decode(ids, **options)) for ids in outputs]

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer | None:
        """What decodes without transformers' help, if the folder's tokenizer has it."""
        return self._plain or getattr(self.transformers, "backend_tokenizer", None)

    def to_json(self) -> str | None:
        """All that tokenizer.json says, as text; None if there is no such form of the tokenizer."""
        return None if self._backend is None else self._backend.to_str()

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(self.transformers.all_special_ids)
        return frozenset(
            i for i, token in self._backend.get_added_tokens_decoder().items() if token.special
        )

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        backend = self._backend
        decoder = backend.decoder if backend is not None else None
        if backend is None or decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
            return frozenset()
        ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    def is_silent(self, token: int, with_special: bool = False) -> bool:
        """Whether `decode` leaves the token out: it is special, or the model has more entries
        than the tokenizer.
        """
        if token in self._special_ids:
            return not with_special
        return self._backend is not None and self._backend.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether the token is one byte, decoded together with its neighbours: to characters if
        all are valid.
        """
        return token in self._byte_ids

    def encode_chats(
        self,
        chats: list[list[dict]],
        options: dict[str, Any],
        check: Callable[[str, list[str]], None] | None = None,
    ) -> tuple[list[str], list[list[int]]]:
        """Each conversation as the tokenizer's chat template writes it: its text, its token ids.

        `check`: called with a name for errors and the texts, before they are tokenized. Raises
        ValueError as `write_chats` does.
        """
        texts = write_chats(self.transformers, chats, options)
        if check is not None:
            check("messages", texts)
        # The template has written the special tokens that are needed.
        return texts, self.encode("messages", texts, special_tokens=False)


def batches(texts: list[str], most: int) -> Iterator[list[str]]:
    """Yield the texts in order, in lists of at most so many characters or of one text."""
    some: list[str] = []
    size = 0
    for text in texts:
        if some and size + len(text) > most:
            yield some
            some, size = [], 0
        some.append(text)
        size += len(text)
    if some:
        yield some


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer. None if it has none: then prompts are token ids, without any text."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return Tokenizer(folder) if any((folder / name).exists() for name in names) else None
