"""The progress bar of a call, on stderr."""

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.outputs import StepRecord

RATE_SECONDS = 5.0  # a rate is an average over this time
REFRESH_SECONDS = 0.5  # between two drawings of a bar, since stderr may be a file

Shown = bool | Callable[..., Any]  # whether to show a bar, or a function that makes one like tqdm


class Bar(tqdm):
    """A progress bar that never raises.

    If a bar cannot be written, for example because the disk is full, it is disabled: the results of
    the call matter more.
    """

    def display(self, *args: Any, **options: Any) -> Any:
        try:
            return super().display(*args, **options)
        except Exception:  # sys.stderr may be any object, which raises anything
            self.disable = True

    def close(self) -> None:
        with suppress(Exception):
            super().close()


def show_bar(shown: Shown, **options: Any) -> Any:
    """Make a bar with these options of tqdm, or return None if it is not wanted or fails."""
    if not shown or sys.stderr is None:  # stderr is None in a daemon, for example
        # A disabled bar would not do: it waits for a lock that forked processes share.
        return None
    with suppress(Exception):
        make = shown if callable(shown) else Bar
        # miniters=0 draws the bar again although no request has finished: its token counts change.
        return make(dynamic_ncols=True, mininterval=REFRESH_SECONDS, miniters=0, **options)
    return None


class Tokens:
    """The numbers of computed prefill and decode tokens, and their recent rates."""

    def __init__(self) -> None:
        self._counts = 0, 0  # of prefill and decode tokens
        # (time, prefill tokens, decode tokens): all marks of the last RATE_SECONDS, and the one
        # before them.
        self._marks = deque([(perf_counter(), *self._counts)])

    def reach(self, prefill: int, decode: int) -> None:
        """Set the counts to their present values."""
        self._counts = prefill, decode
        now = perf_counter()
        self._marks.append((now, prefill, decode))
        while len(self._marks) > 2 and self._marks[1][0] <= now - RATE_SECONDS:
            self._marks.popleft()

    def add(self, prefill: int, decode: int) -> None:
        """Add tokens that were computed since the last update."""
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
    """Show a bar that counts the finished requests of a call inside the block.

    The bar also shows how many tokens all steps have computed meanwhile, and at what rate.

    Args:
        total: number of requests of the call.
        unfinished: ids of those that are running; the caller keeps this collection up to date.
        observe: adds a callback that is called after each step, as `LLM.on_step` does.
        shown: whether to show a bar, or a function that makes one.
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
