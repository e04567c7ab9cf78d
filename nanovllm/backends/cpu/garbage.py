"""Fewer full garbage collections while a call runs."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# A full collection looks at every object of the process: 170,000 after the imports of PyTorch,
# Triton and transformers, which took 90 to 110 ms, the device waiting (Python 3.12). A call of
# thousands of requests makes so many objects that one falls due every second or third time.
TIMES_RARER = 20

_lock = threading.Lock()
_callers = 0
_before = _within = (0, 0, 0)


@contextmanager
def full_collections_are_rare() -> Iterator[None]:
    """Inside, a full collection takes TIMES_RARER as many collections of young objects.

    Those go on as ever, and what falls due inside runs soon after. The thresholds are the whole
    process's: whoever changes them meanwhile keeps his own.
    """
    global _callers, _before, _within
    with _lock:
        if _callers == 0:
            _before = gc.get_threshold()
            _within = (*_before[:2], _before[2] * TIMES_RARER)
            gc.set_threshold(*_within)
        _callers += 1
    try:
        yield
    finally:
        with _lock:
            _callers -= 1
            if _callers == 0 and gc.get_threshold() == _within:
                gc.set_threshold(*_before)
