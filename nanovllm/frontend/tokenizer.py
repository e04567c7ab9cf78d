"""The tokenizer of a model folder.

The token ids must be those of transformers. But the import of transformers takes seconds, most of a
start on a GPU. So the tokenizers package reads the folder's tokenizer.json, if that file alone
decides the token ids. transformers is imported for all other folders, for chats, and for users who
ask for `Tokenizer.transformers`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from nanovllm.checks import short_repr
from nanovllm.frontend.chat import write_chats
from nanovllm.frontend.token_bytes import most_bytes, takes_blanks
from nanovllm.frontend.tokenizer_json import content, is_failure, read_if_there, read_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SURROGATE = re.compile("[\ud800-\udfff]")
# Characters that are tokenized at once, if a text is no longer. The tokenizers package takes up to
# 140 bytes of memory for each.
TOKENIZED_AT_ONCE = 2**20


class Tokenizer:
    """The tokenizer of a model folder. Raises ValueError if it cannot be loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_if_there(folder / "tokenizer_config.json")
        self._plain = read_plain(folder, self._config)
        if self._plain is None:
            _ = self.transformers  # load it now, so that a broken tokenizer raises here

    @cached_property
    def transformers(self) -> "PreTrainedTokenizerBase":
        """The tokenizer that transformers makes of the folder."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
        except BaseException as error:  # which type depends on the release of transformers
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
        """Return the token ids of each text. Errors call the texts `name`.

        `special_tokens` says whether to add the tokens that the tokenizer puts around a text, such
        as beginning-of-sequence. Raises ValueError for the first text that holds half a character
        (a lone surrogate), or that the tokenizer does not accept.
        """
        for i, text in enumerate(texts):
            if SURROGATE.search(text):
                raise ValueError(
                    f"{name}[{i}] is {text[:50]!r}, which holds half a character: decode it with "
                    "errors='replace'"
                )
        try:
            return self._encode(texts, special_tokens)
        except BaseException as error:  # a tokenizer may raise any type
            if not is_failure(error):
                raise
            self._refuse_first_wrong(name, texts, special_tokens)
            raise

    def _refuse_first_wrong(self, name: str, texts: list[str], special_tokens: bool) -> None:
        """Raise ValueError for the first text that the tokenizer does not accept."""
        for i, text in enumerate(texts):
            try:
                self._encode([text], special_tokens)
            except BaseException as error:
                if not is_failure(error):
                    raise
                raise ValueError(
                    f"{name}[{i}] is {short_repr(text)}, which the model's tokenizer cannot "
                    "encode: "
                    f"give another text, or token ids ({type(error).__name__}: {error})"
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
        """Return a lower bound of the number of tokens of a text.

        The bound takes no time: it is the text's length in bytes, divided by that of the longest
        token.
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
        """Return the text of each list of token ids.

        Special tokens are left out, except in lists whose index is in `with_special`.
        """
        texts = self._decode(outputs, skip_special=True)
        if with_special:
            whole = self._decode([outputs[i] for i in with_special], skip_special=False)
            for i, text in zip(with_special, whole):
                texts[i] = text
        return texts

    def _decode(self, outputs: list[list[int]], skip_special: bool) -> list[str]:
        if self._backend is not None:  # decodes in threads; transformers decodes one by one
            return self._backend.decode_batch(outputs, skip_special_tokens=skip_special)
        options = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
        return [str(self.transformers.decode(ids, **options)) for ids in outputs]

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer | None:
        """The tokenizer as an object of the tokenizers package, or None if it has no such form."""
        return self._plain or getattr(self.transformers, "backend_tokenizer", None)

    def to_json(self) -> str | None:
        """Return the tokenizer in the format of tokenizer.json, or None if it has no such form."""
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
        """Return whether `decode` leaves the token out.

        It leaves out special tokens, and tokens that the model has and the tokenizer does not know.
        """
        if token in self._special_ids:
            return not with_special
        return self._backend is not None and self._backend.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Return whether the token is one byte.

        A run of bytes is decoded as a whole, to characters if all of its bytes are valid.
        """
        return token in self._byte_ids

    def encode_chats(
        self,
        chats: list[list[dict]],
        options: dict[str, Any],
        check: Callable[[str, list[str]], None] | None = None,
    ) -> tuple[list[str], list[list[int]]]:
        """Render conversations with the chat template. Returns their texts and token ids.

        `check`: called with a name for errors and the texts, before they are tokenized. Raises
        ValueError as `write_chats` does.
        """
        texts = write_chats(self.transformers, chats, options)
        if check is not None:
            check("messages", texts)
        # The template has written all special tokens already.
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
    """Load the folder's tokenizer, or return None if the folder has none.

    Without a tokenizer prompts are token ids, and outputs have no text.
    """
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return Tokenizer(folder) if any((folder / name).exists() for name in names) else None


def need_tokenizer(tokenizer: Tokenizer | None, why: str = "", remedy: str = "") -> Tokenizer:
    """Return the tokenizer of a model, or raise ValueError if the model's folder has none.

    The error begins with `why`, the reason that a tokenizer is needed. `remedy` says what to do
    without a tokenizer.
    """
    if tokenizer is None:
        begin = f"{why}, but " if why else ""
        end = f"{remedy}, or " if remedy else ""
        raise ValueError(f"{begin}the model's folder has no tokenizer: {end}add tokenizer.json")
    return tokenizer
