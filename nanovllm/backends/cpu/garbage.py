"""A way to have fewer full garbage collections while a call runs."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# A full collection looks at every object of the process: at 170,000 after the imports of PyTorch,
# Triton and transformers. That took 90 to 110 ms, in which the device waited (Python 3.12). A call
# of thousands of requests makes so many objects that every second or third call had a full one.
TIMES_RARER = 20

_lock = threading.Lock()
_callers = 0
_before = _within = (0, 0, 0)


@contextmanager
def full_collections_are_rare() -> Iterator[None]:
    """Make full garbage collections rarer inside the block, by the factor TIMES_RARER.

    Collections of young objects run as usual, and a full one that was put off runs soon after the
    block. The thresholds belong to the whole process: code that changes them inside the block keeps
    the values that it has set.
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
