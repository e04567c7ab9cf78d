"""The compilation of Triton kernels in parallel, before they are launched.

Triton compiles a kernel at its first launch. An engine's start launches some 35 kernels. Each takes
a quarter of a second to compile, most of which does not hold Python's lock: threads can compile
several at a time.
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
except ImportError:  # older releases define it elsewhere
    triton_key = None

ZEROED = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    Tensor.new_empty: Tensor.new_zeros,
}


def begin_hashing() -> None:
    """Hash Triton's own files, half a gigabyte, in a thread.

    Triton needs the hash before it looks for the first kernel on disk, and keeps it.
    """
    if triton_key is not None:
        threading.Thread(target=triton_key, daemon=True).start()


def find_uncompiled(run: Callable[[], None]) -> list[Callable[[], object]]:
    """Find the kernels that `run` launches and that are not compiled yet.

    Calls `run` without launching these kernels. The memory that they would have written is 0, which
    is a valid token, position and block.

    Returns a function for each kernel, which compiles it and may be called in any thread.
    """
    # Older releases do not compile in threads.
    if not hasattr(triton, "AsyncCompileMode"):
        return []
    found, this_thread, hooks = {}, threading.get_ident(), triton.knobs.runtime

    def record(key, fn, compile, **_) -> bool:
        here = threading.get_ident() == this_thread
        if here:
            found[fn.module, fn.name, key] = fn.jit_function, compile["specialization_data"]
        return here  # True: Triton neither compiles nor launches the kernel

    previous, hooks.jit_cache_hook = hooks.jit_cache_hook, record
    try:
        with _Zeroed():
            run()
    finally:
        hooks.jit_cache_hook = previous
    # _compile reads `run` of the compiled kernel: that builds its launcher and loads the kernel
    # onto the thread's device.
    return [partial(_compile, kernel, data) for kernel, data in found.values()]


def _compile(kernel: Any, data: str) -> Any:
    return kernel.preload(data).run


class _Zeroed(TorchFunctionMode):
    """A mode in which new tensors are filled with 0."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return ZEROED.get(func, func)(*args, **(kwargs or {}))
