"""Run code that may never end, such as a model folder's chat template, for a limited time."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any


class _Stop(SystemExit):
    """Raised inside a call whose time is over. No `except Exception` of the code that runs catches
    it.
    """


def run_limited(function: Callable[[], Any], seconds: float, progress: Callable[[], Any]) -> Any:
    """What `function()` returns or raises, as long as it gets on.

    Raises TimeoutError, and ends it, when `progress()` has stayed the same for so many seconds.

    It runs in a thread of its own. So this works in any thread, where a signal would need the main
    one, and what ends the call can hit nothing else. Only a single operation of the interpreter,
    such as a power of two huge numbers, is not interrupted.
    """
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, function()))
        except _Stop:
            pass
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, name="limited", daemon=True)
    try:
        thread.start()
        seen = object()  # equal to nothing that `progress` says
        while thread.is_alive() and (now := progress()) != seen:
            seen = now
            thread.join(seconds)
    finally:  # after Ctrl-C, too
        if thread.is_alive():
            _stop(thread)
    if not outcome:
        raise TimeoutError(f"it did not get on for {seconds:g} s")
    succeeded, value = outcome[0]
    if not succeeded:
        raise value
    return value


def _stop(thread: threading.Thread) -> None:
    assert thread.ident is not None, "it was started"
    for _ in range(10):  # it may be where an exception is swallowed, as in a destructor
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop)
        )
        thread.join(0.1)
        if not thread.is_alive():
            break
