"""Text as it grows, token by token: final at every point, and searched for stop strings.

Knows how to call a tokenizer. Knows nothing of sequences and steps.
"""

from collections.abc import Callable, Iterable

Decode = Callable[[list[list[int]]], list[str]]
INCOMPLETE = "\ufffd"  # what a decoder makes of a character whose last bytes are missing


class TextStream:
    """The text of one output.

    `text` grows by whole characters and ends before the first stop string. `take` hands it out piece by piece and holds
    back what could be the beginning of a stop string.
    """

    __slots__ = (
        "text", "stopped", "_ended", "_stops", "_min_tokens", "_num_tokens", "_window", "_num_read", "_num_taken",
    )  # fmt: skip

    def __init__(self, stops: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self.text = ""
        self.stopped = False  # by a stop string
        self._ended = False
        self._stops = stops
        self._min_tokens = min_tokens  # no stop string counts that ends within these
        self._num_tokens = 0
        # The last tokens, as many as a decoder must see to make the next text: first those whose text has been read,
        # for it may depend on them (a space at the beginning of all text is dropped), then those still incomplete.
        self._window: list[int] = []
        self._num_read = 0
        self._num_taken = 0  # characters

    def take(self) -> str:
        """What has become certain since the last call."""
        certain = len(self.text)
        if not self._ended:
            certain -= max((_overlap(self.text, stop) for stop in self._stops), default=0)
        new = self.text[self._num_taken : certain]
        self._num_taken += len(new)
        return new

    def _read(self, before: str, whole: str, ended: bool) -> None:
        """The window now decodes to `whole`, and the part of it that had been read to `before`."""
        if not ended and whole.endswith(INCOMPLETE):
            return
        if len(whole) > len(before):
            self._append(whole[len(before) :])
            self._window = self._window[self._num_read :]
            self._num_read = len(self._window)
        self._ended = ended or self.stopped

    def _append(self, new: str) -> None:
        old = len(self.text)
        self.text += new
        if self._num_tokens <= self._min_tokens:
            return
        found = [self.text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops]
        if found := [at for at in found if at >= 0]:
            self.text = self.text[: min(found)]
            self.stopped = True


def extend_texts(news: Iterable[tuple[TextStream, int, bool]], decode: Decode) -> None:
    """Add a token to each stream, all in one call of the tokenizer. The bool: it is the output's last."""
    streams, windows = [], []
    for stream, token, ended in news:
        stream._window.append(token)
        stream._num_tokens += 1
        streams.append((stream, ended))
        windows += [stream._window[: stream._num_read], stream._window]
    texts = decode(windows)
    for (stream, ended), before, whole in zip(streams, texts[::2], texts[1::2]):
        stream._read(before, whole, ended)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
