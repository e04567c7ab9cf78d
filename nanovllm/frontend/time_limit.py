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
    # Not Thread.join and is_alive: Python 3.11 takes a thread for ended once Ctrl-C has come while
    # it was joined.
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.append((True, function()))
        except _Stop:
            pass
        except BaseException as error:
            outcome.append((False, error))
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="limited", daemon=True)
    try:
        thread.start()
        seen = object()  # equal to nothing that `progress` says
        while not ended.is_set() and (now := progress()) != seen:
            seen = now
            ended.wait(seconds)
    finally:  # after Ctrl-C, too
        _stop(thread, ended)
    if not outcome:
        raise TimeoutError(f"it did not get on for {seconds:g} s")
    succeeded, value = outcome[0]
    if not succeeded:
        raise value
    return value


def _stop(thread: threading.Thread, ended: threading.Event) -> None:
    for _ in range(10):  # it may be where an exception is swallowed, as in a destructor
        if ended.is_set():
            break
        if thread.ident is not None:  # it has begun
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop)
            )
        ended.wait(0.1)
