"""Compile Triton kernels side by side, before they are launched.

Triton compiles a kernel at its first launch. An engine's start meets some 35 kernels, a quarter of
a second each, most of it outside of Python's lock, so that threads compile several at a time.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode

try:
    from triton.runtime.cache import triton_key
except ImportError:  # an older release has it elsewhere
    triton_key = None

ZEROED = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    Tensor.new_empty: Tensor.new_zeros,
}


def begin_hashing() -> None:
    """Hash Triton's own files, half a gigabyte, beside what the host does next.

    Triton does so, and keeps the result, before it looks for the first kernel on disk.
    """
    if triton_key is not None:
        threading.Thread(target=triton_key, daemon=True).start()


def find_uncompiled(run: Callable[[], None]) -> list[Callable[[], object]]:
    """A function for each kernel that `run` launches and that is not compiled yet.

    It compiles the kernel, on any thread.

    `run` is run without those kernels. What they would have written is 0: a valid token, position
    and block.
    """
    # An older release, which does not compile in threads.
    if not hasattr(triton, "AsyncCompileMode"):
        return []
    found, this_thread, hooks = {}, threading.get_ident(), triton.knobs.runtime

    def record(key, fn, compile, **_) -> bool:
        here = threading.get_ident() == this_thread
        if here:
            found[fn.module, fn.name, key] = fn.jit_function, compile["specialization_data"]
        return here  # neither compile nor launch it

    previous, hooks.jit_cache_hook = hooks.jit_cache_hook, record
    try:
        with _Zeroed():
            run()
    finally:
        hooks.jit_cache_hook = previous
    # Reading `run` of a compiled kernel builds its launcher and loads it onto the thread's device.
    return [partial(_compile, kernel, data) for kernel, data in found.values()]


def _compile(kernel: Any, data: str) -> Any:
    return kernel.preload(data).run


class _Zeroed(TorchFunctionMode):
    """New memory is 0, not whatever it was."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return ZEROED.get(func, func)(*args, **(kwargs or {}))
