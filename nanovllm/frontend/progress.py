"""What a call shows of its progress: a bar on stderr, if it is wanted there and can be written."""

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.outputs import StepRecord

LATELY = 5.0  # seconds that a rate looks back on
REFRESH_SECONDS = 0.5  # between two times that a bar is drawn: it may go to a file

Shown = bool | Callable[..., Any]  # whether to show a bar; or what makes one, as tqdm does


class Bar(tqdm):
    """A progress bar. Where it cannot be written, as on a full disk, it raises nothing and shows
    nothing more: what a call computes is worth more than it.
    """

    def display(self, *args: Any, **options: Any) -> Any:
        try:
            return super().display(*args, **options)
        except Exception:  # anything at all may stand in stderr's place
            self.disable = True

    def close(self) -> None:
        with suppress(Exception):
            super().close()


def show_bar(shown: Shown, **options: Any) -> Any:
    """A bar with these options of tqdm's; None if it is not to be shown, or cannot be."""
    if not shown or sys.stderr is None:  # as in a daemon
        # Not even a disabled bar, which would wait for a lock that forks share.
        return None
    with suppress(Exception):
        make = shown if callable(shown) else Bar
        # Drawn anew though no request has finished: a step has brought tokens.
        return make(dynamic_ncols=True, mininterval=REFRESH_SECONDS, miniters=0, **options)
    return None


class Tokens:
    """Counts of the tokens that were computed, and how many a second lately."""

    def __init__(self) -> None:
        self._counts = 0, 0  # of prefill and decode tokens
        # When the counts were what: the last time before LATELY seconds ago, and all later ones.
        self._marks = deque([(perf_counter(), *self._counts)])

    def reach(self, prefill: int, decode: int) -> None:
        """Take the counts as they are now."""
        self._counts = prefill, decode
        now = perf_counter()
        self._marks.append((now, prefill, decode))
        while len(self._marks) > 2 and self._marks[1][0] <= now - LATELY:
            self._marks.popleft()

    def add(self, prefill: int, decode: int) -> None:
        """Take what was computed since the last time."""
        self.reach(self._counts[0] + prefill, self._counts[1] + decode)

    def __str__(self) -> str:
        begin, *before = self._marks[0]
        end, *now = self._marks[-1]
        prefill, decode = [(b - a) / max(end - begin, 1e-9) for a, b in zip(before, now)]
        total = sum(self._counts)
        return f"{total:,} tokens, prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"


@contextmanager
def progress(
    total: int,
    unfinished: Collection[int],
    observe: Callable[[Callable[[StepRecord], Any]], Callable[[], None]],
    shown: Shown,
) -> Iterator[None]:
    """Show a bar of a call's requests that have finished, with the tokens that all steps have
    computed meanwhile, and how many a second lately.

    `total`: requests of the call; `unfinished`: those under way, by id, as the call keeps them.
    `observe`: what `LLM.on_step` does.
    """
    bar = show_bar(shown, total=total, desc="Generating", unit="request")
    if bar is None:
        yield
        return
    tokens = Tokens()

    def update(step: StepRecord) -> None:
        tokens.add(step.prefill_tokens, step.decode_tokens)
        bar.set_postfix_str(str(tokens), refresh=False)
        bar.update(sum([request in unfinished for request in step.finished]))

    end = observe(update)
    try:
        yield
    finally:
        end()
        bar.close()
