"""The compilation of Triton kernels in parallel, before they are launched.

Triton compiles a kernel at its first launch. An engine's start launches 35 to 100 kernels. Each
takes a quarter of a second or more to compile, most of which does not hold Python's lock: threads
can compile several at a time.

Kernels are loaded one after the other, when all are compiled. To load a kernel, Triton 3.6 imports
its launcher, a module that it has compiled from C. All these modules have one name, and Python
returns the same object for each one that is imported again, with the function of the last one. Of
two threads that import, one may find the other's function there. Its kernel is then launched with
arguments that are laid out for another kernel.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, wait
from contextlib import suppress
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


def compile_kernels(run: Callable[[], None], pool: Executor) -> None:
    """Compile in the threads of `pool` the kernels that `run` launches, and load them.

    `run` is called without launching the kernels that are not compiled yet. No kernel then fills
    the tensors that it makes. So they are filled with 0, a valid token, position and block.
    """
    tasks = [pool.submit(_compile, kernel, data) for kernel, data in find_uncompiled(run)]
    wait(tasks)
    for task in tasks:
        # A kernel that does not compile or cannot be loaded raises when it is launched.
        with suppress(Exception):
            _load(task.result())


def find_uncompiled(run: Callable[[], None]) -> list[tuple[Any, str]]:
    """Find the kernels that `run` launches and that are not compiled yet.

    Returns for each of them the function and what Triton wants to know to compile it.
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
    return list(found.values())


def _compile(kernel: Any, data: str) -> Any:
    compiled = kernel.preload(data)
    # Triton keeps the launcher on disk, so the kernel is loaded in no time later.
    triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
    return compiled


def _load(compiled: Any) -> Any:
    """Load a compiled kernel onto this thread's device, which Triton does when `run` is read."""
    try:
        return compiled.run
    except Exception:
        # Otherwise its launch would not load it again, and would fail for want of a function.
        compiled._run = None
        raise


class _Zeroed(TorchFunctionMode):
    """A mode in which new tensors are filled with 0."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return ZEROED.get(func, func)(*args, **(kwargs or {}))
