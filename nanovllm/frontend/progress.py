"""What a call shows of its progress: a bar on stderr, if it is wanted there and can be written."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.outputs import StepRecord

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
        return (shown if callable(shown) else Bar)(dynamic_ncols=True, **options)
    return None


@contextmanager
def progress(
    total: int,
    unfinished: Collection[int],
    observe: Callable[[Callable[[StepRecord], Any]], Callable[[], None]],
    shown: Shown,
) -> Iterator[None]:
    """Show a bar of a call's requests that have finished, with the tokens a second that all steps
    have computed meanwhile.

    `total`: requests of the call; `unfinished`: those under way, by id, as the call keeps them.
    `observe`: what `LLM.on_step` does.
    """
    bar = show_bar(shown, total=total, desc="Generating", unit="request")
    if bar is None:
        yield
        return
    begin = perf_counter()
    num_prefill_tokens = num_decode_tokens = 0

    def update(step: StepRecord) -> None:
        nonlocal num_prefill_tokens, num_decode_tokens
        num_prefill_tokens += step.prefill_tokens
        num_decode_tokens += step.decode_tokens
        seconds = perf_counter() - begin
        prefill, decode = num_prefill_tokens / seconds, num_decode_tokens / seconds
        bar.set_postfix_str(
            f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s", refresh=False
        )
        bar.update(sum([request in unfinished for request in step.finished]))

    end = observe(update)
    try:
        yield
    finally:
        end()
        bar.close()
