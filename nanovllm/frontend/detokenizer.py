"""Text as it grows, token by token: final at every point, and searched for stop strings.

Knows how to call a tokenizer, and which sequences are read. Knows nothing of steps and blocks.
"""

from collections.abc import Iterable
from typing import Protocol

from nanovllm.engine.sequence import Sequence

# What decoders write for bytes that are no character, or not yet one. Up to three of them at the
# end of a text may yet become one character, which has at most four bytes.
REPLACEMENT, MOST_INCOMPLETE = "\ufffd", 3
# Tokens that a decoder must see to make the next one's text, with room to spare: where all text is
# certain, and where bytes of incomplete characters, up to nine, must be among them.
CONTEXT, INCOMPLETE_CONTEXT = 4, 16


class Tokenizer(Protocol):
    """What is needed of a tokenizer, such as text.tokenizer's."""

    def decode(self, outputs: list[list[int]], with_special: list[int]) -> list[str]:
        """The text of each list of token ids, with special tokens where its index is listed."""

    def is_silent(self, token: int, with_special: bool) -> bool:
        """Whether `decode` leaves the token out, wherever it stands."""

    def is_byte(self, token: int) -> bool:
        """Whether the token is a byte, whose text depends on the run of bytes it stands in."""


class TextStream:
    """The text of one output.

    `text` grows by whole characters and ends before the first stop string, or with it. `take` hands
    it out piece by piece and holds back what could be the beginning of a stop string.
    """

    def __init__(
        self,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        keeps_stop: bool = False,
        with_special: bool = False,
    ) -> None:
        self.text = ""
        self.stop_reason: str | None = None  # the stop string that it came to
        self.ended = False
        self.with_special = with_special  # whether special tokens are written
        self._stops = stops
        self._min_tokens = min_tokens  # no stop string counts that ends within these
        self._keeps_stop = keeps_stop
        self._num_tokens = 0
        self._window: list[int] = []  # the last tokens that are not silent
        self._num_read = 0  # characters of the window's text that have become certain
        self._num_taken = 0  # characters of `text`

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self.stop_reason is not None

    def take(self) -> str:
        """What has become certain since the last call."""
        certain = len(self.text)
        if not self.ended and not self._keeps_stop:
            certain -= max((_overlap(self.text, stop) for stop in self._stops), default=0)
        new = self.text[self._num_taken : certain]
        self._num_taken += len(new)
        return new

    def push(self, token: int | None, ended: bool, tokenizer: Tokenizer) -> bool:
        """Add a token, the output's last one if `ended`; None: the text ends without one more.

        Returns whether the window must be decoded now.
        """
        self.ended = ended
        if token is None:
            return True
        self._num_tokens += 1
        silent = tokenizer.is_silent(token, self.with_special)
        if not silent:
            self._window.append(token)
        # One invalid byte changes the text of its whole run, so a run is read when it ends.
        return ended or not silent and not tokenizer.is_byte(token)

    def read(self, whole: str) -> int:
        """Take what is certain of `whole`, the window's text.

        Returns how many characters at its end are not.
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
            at, self.stop_reason = min(found)  # of two that begin there, the shorter
            self.text = self.text[: at + len(self.stop_reason) if self._keeps_stop else at]
            self.ended = True


def extend_texts(news: Iterable[tuple[TextStream, int | None, bool]], tokenizer: Tokenizer) -> None:
    """Add a token to each stream, all in one call of the tokenizer.

    `news`: a stream, its token, and whether that is the output's last. See `TextStream.push`.
    """
    streams = [stream for stream, token, ended in news if stream.push(token, ended, tokenizer)]
    texts = _texts(streams, tokenizer)
    num_incomplete = [stream.read(text) for stream, text in zip(streams, texts)]
    # Cut windows that have grown long: so a token's time does not depend on how many came before.
    cut = []
    for stream, count in zip(streams, num_incomplete):
        needed = INCOMPLETE_CONTEXT if count else CONTEXT
        if len(stream._window) >= 2 * needed:
            stream._window = stream._window[-needed:]
            cut.append((stream, count))
    for (stream, count), text in zip(cut, _texts([stream for stream, _ in cut], tokenizer)):
        stream._num_read = len(text) - count


def _texts(streams: list[TextStream], tokenizer: Tokenizer) -> list[str]:
    """Of their windows."""
    with_special = [i for i, stream in enumerate(streams) if stream.with_special]
    return tokenizer.decode([stream._window for stream in streams], with_special)


class Detokenizer:
    """Reads the texts of sequences while they run: those streamed, or stopped by a string."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._reading: set[Sequence] = set()

    def add(self, seq: Sequence) -> None:
        """Keep `seq.text` up to date from now on, until the sequence has ended."""
        params = seq.params
        seq.text = TextStream(
            tuple(params.stop or ()),
            params.min_tokens,
            params.include_stop_str_in_output,
            not params.skip_special_tokens,
        )
        self._reading.add(seq)

    def update(self, sampled: list[Sequence]) -> list[Sequence]:
        """Read the last token of each sequence that is read.

        Returns those of which the text has come to a stop string.
        """
        if not self._reading:
            return []
        reading = [seq for seq in sampled if seq in self._reading]
        extend_texts([(seq.text, *_last_of(seq)) for seq in reading], self._tokenizer)
        self._reading.difference_update([seq for seq in reading if seq.text.ended])
        return [seq for seq in reading if seq.text.stopped]

    def end(self, seq: Sequence) -> None:
        if seq in self._reading:
            extend_texts([(seq.text, None, True)], self._tokenizer)
            self._reading.remove(seq)

    def remove(self, seq: Sequence) -> None:
        self._reading.discard(seq)

    def clear(self) -> None:
        self._reading.clear()


def _last_of(seq: Sequence) -> tuple[int | None, bool]:
    """The sequence's last token, None if its text leaves that out, and whether the output ends."""
    if seq.finish_reason is None:  # by far the most
        return seq.token_ids[-1], False
    leaves_out = len(seq.text_ids) < len(seq.output_ids)
    return None if leaves_out else seq.token_ids[-1], True


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )
