"""Incremental detokenization: texts that grow token by token, and the search for stop strings.

Text that was handed out never changes later. This file knows how to call a tokenizer, and which
sequences are detokenized while they run. It knows nothing of steps and blocks.
"""

from collections.abc import Iterable
from typing import Protocol

from nanovllm.engine.sequence import Sequence

# Decoders write REPLACEMENT for each byte that is no character, or not yet a whole one. A character
# has at most four bytes, so up to three REPLACEMENTs at the end of a text may become one character.
REPLACEMENT, MOST_INCOMPLETE = "\ufffd", 3
# How many earlier tokens a decoder must see to decode the next token, with room to spare: CONTEXT
# where all text is certain, INCOMPLETE_CONTEXT where the tokens end with bytes of incomplete
# characters (nine at most).
CONTEXT, INCOMPLETE_CONTEXT = 4, 16


class Tokenizer(Protocol):
    """The methods that detokenization needs of a tokenizer, such as frontend.tokenizer's."""

    def decode(self, outputs: list[list[int]], with_special: list[int]) -> list[str]:
        """Decode each list of token ids; special tokens only in lists indexed by `with_special`."""

    def is_silent(self, token: int, with_special: bool) -> bool:
        """Return whether `decode` leaves the token out, wherever it stands."""

    def is_byte(self, token: int) -> bool:
        """Return whether the token is a byte: its text depends on the bytes around it."""


class TextStream:
    """The text of one output.

    `text` grows by whole characters. It ends before the first stop string, or with the stop string
    if `keeps_stop`. `take` returns the text piece by piece, and holds back an end that could be the
    beginning of a stop string.
    """

    def __init__(
        self,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        keeps_stop: bool = False,
        with_special: bool = False,
    ) -> None:
        self.text = ""
        self.stop_reason: str | None = None  # the stop string that ended the text
        self.ended = False
        self.with_special = with_special  # whether special tokens are written
        self._stops = stops
        self._min_tokens = min_tokens  # a stop string that ends within these tokens is ignored
        self._keeps_stop = keeps_stop
        self._num_tokens = 0
        self._window: list[int] = []  # the last tokens, without silent ones
        self._num_read = 0  # characters of the window's text that `text` holds
        self._num_taken = 0  # characters of `text` that `take` has returned

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop_reason is not None

    def take(self) -> str:
        """Return the text that has become certain since the last call."""
        certain = len(self.text)
        if not self.ended and not self._keeps_stop:
            certain -= max((_overlap(self.text, stop) for stop in self._stops), default=0)
        new = self.text[self._num_taken : certain]
        self._num_taken += len(new)
        return new

    def push(self, token: int | None, ended: bool, tokenizer: Tokenizer) -> bool:
        """Add a token. Returns whether the window must be decoded now.

        `token` is None where the text ends without another token. `ended` says whether the output
        has ended.
        """
        self.ended = ended
        if token is None:
            return True
        self._num_tokens += 1
        silent = tokenizer.is_silent(token, self.with_special)
        if not silent:
            self._window.append(token)
        # One invalid byte changes the text of a whole run of bytes: decode a run when it ends.
        return ended or not silent and not tokenizer.is_byte(token)

    def read(self, whole: str) -> int:
        """Append to `text` the certain part of `whole`, which is the decoded window.

        Returns how many characters at the end of `whole` are not certain yet.
        """
        num_incomplete = 0
        if not self.ended:
            tail = whole[-MOST_INCOMPLETE:]
            num_incomplete = len(tail) - len(tail.rstrip(REPLACEMENT))
        certain = len(whole) - num_incomplete
        if certain > self._num_read:
            self._append(whole[self._num_read : certain])
            self._num_read = certain
        return num_incomplete

    def _append(self, new: str) -> None:
        old = len(self.text)
        self.text += new
        if self._num_tokens <= self._min_tokens:
            return
        found = [(self.text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stops]
        if found := [(at, stop) for at, stop in found if at >= 0]:
            at, self.stop_reason = min(found)  # the earliest; of two at one place, the shorter
            self.text = self.text[: at + len(self.stop_reason) if self._keeps_stop else at]
            self.ended = True


def extend_texts(news: Iterable[tuple[TextStream, int | None, bool]], tokenizer: Tokenizer) -> None:
    """Add a token to each stream, and decode all streams in one call of the tokenizer.

    `news` holds arguments of `TextStream.push`: (stream, token, ended).
    """
    streams = [stream for stream, token, ended in news if stream.push(token, ended, tokenizer)]
    texts = _decode_windows(streams, tokenizer)
    num_incomplete = [stream.read(text) for stream, text in zip(streams, texts)]
    # Cut windows that have grown long, so that a token takes the same time however long its text.
    cut = []
    for stream, count in zip(streams, num_incomplete):
        needed = INCOMPLETE_CONTEXT if count else CONTEXT
        if len(stream._window) >= 2 * needed:
            stream._window = stream._window[-needed:]
            cut.append((stream, count))
    for (stream, count), text in zip(
        cut, _decode_windows([stream for stream, _ in cut], tokenizer)
    ):
        stream._num_read = len(text) - count


def _decode_windows(streams: list[TextStream], tokenizer: Tokenizer) -> list[str]:
    """Decode the window of each stream."""
    with_special = [i for i, stream in enumerate(streams) if stream.with_special]
    return tokenizer.decode([stream._window for stream in streams], with_special)


class Detokenizer:
    """The texts of sequences that are decoded while they run: streamed, or with stop strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._reading: set[Sequence] = set()

    def add(self, seq: Sequence) -> None:
        """Give the sequence a TextStream, `seq.text`, and keep it up to date until it ends."""
        params = seq.params
        seq.text = TextStream(
            tuple(params.stop or ()),
            params.min_tokens,
            params.include_stop_str_in_output,
            not params.skip_special_tokens,
        )
        self._reading.add(seq)

    def update(self, sampled: list[Sequence]) -> list[Sequence]:
        """Add the last token of each sequence among `sampled` to its text.

        Sequences that were not given to `add` are skipped. Returns the sequences whose text has
        reached a stop string.
        """
        if not self._reading:
            return []
        reading = [seq for seq in sampled if seq in self._reading]
        extend_texts([(seq.text, *_last_of(seq)) for seq in reading], self._tokenizer)
        self._reading.difference_update([seq for seq in reading if seq.text.ended])
        return [seq for seq in reading if seq.text.stopped]

    def end(self, seq: Sequence) -> None:
        """Complete the text of a sequence that ends without another token."""
        if seq in self._reading:
            extend_texts([(seq.text, None, True)], self._tokenizer)
            self._reading.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, whose text stays as it is."""
        self._reading.discard(seq)

    def clear(self) -> None:
        """Forget all sequences."""
        self._reading.clear()


def _last_of(seq: Sequence) -> tuple[int | None, bool]:
    """Return a sequence's last token (None if its text leaves the token out), and whether the
    output has ended.
    """
    if seq.finish_reason is None:  # the common case
        return seq.token_ids[-1], False
    leaves_out = len(seq.text_ids) < len(seq.output_ids)
    return None if leaves_out else seq.token_ids[-1], True


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )
