"""The launch of Triton kernels: early, and with little work for the host.

Early. By programmatic dependent launch, on Hopper and newer GPUs, a kernel may start while the
kernel before it ends. A decode step of one sequence had some 250 kernels of 2 to 5 microseconds
when these launches were written, and a third of that time went to starting and draining. A kernel
launched with `**overlap(x)` may start as soon as every program of the kernel before it has called
`wait_for_inputs` or ended. Until its own call, a kernel overlaps with the one before, so it may
only read memory that no kernel writes, that is, weights. (It may ask the L2 cache for other memory,
too, because what the cache holds is never stale.) The call returns when the kernel before has ended
and its writes are visible. As that kernel waited too, all earlier kernels have ended as well. In a
kernel launched with `**overlap(x)`, every program must call `wait_for_inputs`.

There are three exceptions:

- A kernel of long programs may let the next kernel start later, by `admit_next` or at its end.
- In woven_token.py and woven_experts.py, a kernel waits first and lets the next one start then. So
  the next one may read, before its own call, what was written before this kernel.
- In woven_experts.py, that next kernel reads the results of programs that have stored theirs and
  counted themselves, and waits at its end.

A late start saves time after some products, and costs time after others: only whole decode steps
show which. Probably it saves time where kernels that wait hold shared memory, so that those before
them are spread unevenly over the multiprocessors, or where a product evicts from the cache what
they have prefetched. Neither cause was measured by itself.

Each forward pass begins with the embedding. It is a kernel of PyTorch, which is not launched early,
or `embed_and_norm`, which lets the next kernel start when the kernels before itself have ended. In
a decode step, a layer's kernel or the sampler's may therefore also read before its call what was
written before the embedding: the step's inputs, which are positions, slots, lengths and block
tables, the state of slots, and the keys and values of earlier tokens.

With little work. A step that is not a graph's replay launches four or five of these kernels a
layer, and the host may take longer to launch them than the device to run them. With `launch`,
Triton looks at each combination of arguments once. On one host of an H200, with a slow processor, a
call of add_rms_norm went from 44 to 31 microseconds.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.3
    TensorDescriptor = None

# With more rows, kernels fill the device: a kernel that waits would take room from one that works.
MAX_ROWS = 256


def overlap(x: Tensor, top_k: int = 1) -> dict[str, bool]:
    """Return the launch options of a kernel that takes `PDL: tl.constexpr` and has input `x`.

    top_k: how many rows of x belong to a token.
    """
    able = x.shape[0] <= MAX_ROWS * top_k and can_overlap(x.device)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


# Triton's functions of these names serve kernels, too. For the host they are slow: Triton 3.6 took
# 1.9 us a call on a CPU where these take 0.1, and a step with prompts of Qwen3-8B made 670 calls.


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is no less than n, which must be positive."""
    return 1 << (n - 1).bit_length()


VALUES = {int, float, bool, type(None)}
_compiled: dict[tuple, Any] = {}
# In older releases of Triton, a compiled kernel takes other arguments than the function that it was
# compiled from. `launch` was tried with Triton 3.6; the name looked for here came shortly before.
TAKES_ALL_ARGUMENTS = hasattr(triton, "AsyncCompileMode")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Call kernel[grid](*args, **options) with little work for the host.

    `args` are all arguments of the kernel but PDL, which must be its last argument if it has it.
    The first argument must be a tensor on the device where the kernel shall run.
    """
    # Compiled code depends on the dtype and alignment of tensors, the dtype and shape of tiles, and
    # the value of all other arguments.
    look = [
        arg
        if type(arg) in VALUES
        else (arg.dtype, arg.data_ptr() % 16 == 0)
        if isinstance(arg, Tensor)
        else (arg.base.dtype, *arg.block_shape)
        for arg in args
    ]
    key = (id(kernel), args[0].device, *look, *options.values())
    if (compiled := _compiled.get(key)) is not None:
        args += (options["PDL"],) if "PDL" in options else ()
        compiled[grid + (1,) * (3 - len(grid))](*args)
        return
    compiled = kernel[grid](*args, **options)
    # It is None under the interpreter, and for a launch that find_uncompiled put off.
    if TAKES_ALL_ARGUMENTS and compiled is not None:
        _compiled[key] = compiled


def arrivals(device: torch.device) -> Tensor:
    """Return the current stream's counters, four a multiprocessor, int32. They are 0.

    Programs that share work count their arrivals there, and the last one resets its counter to 0.
    Each stream has counters of its own: kernels of one stream do not run at the same time. The
    first step makes the counters, before any capture, so that no graph's memory pool owns them.
    """
    return _counters(
        device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    )


@cache  # graphs hold the address: the tensor must live as long as they may
def _counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(4 * num_processors(device), dtype=torch.int32, device=device)


class GPU(NamedTuple):
    """What the choice of kernels and of their tiles depends on, besides shapes."""

    capability: tuple[int, int]
    processors: int  # multiprocessors
    shared_memory: int  # bytes that a program may take


@lru_cache
def gpu(device: torch.device) -> GPU:
    """Read the properties of a device; a CPU, which runs the interpreter, gets some of its own.

    All choices read them here, and nowhere else.
    """
    if device.type != "cuda":
        return GPU((0, 0), 8, 1 << 17)
    index = torch.cuda.current_device() if device.index is None else device.index
    # Older releases of PyTorch do not tell how much shared memory a program may take.
    triton_knows = triton.runtime.driver.active.utils.get_device_properties(index)
    return GPU(
        torch.cuda.get_device_capability(device),
        torch.cuda.get_device_properties(device).multi_processor_count,
        triton_knows["max_shared_mem"],
    )


def can_overlap(device: torch.device) -> bool:
    """Tell whether the device and Triton can launch kernels early."""
    # Older releases of Triton lack gdc_wait.
    return gpu(device).capability >= (9, 0) and hasattr(tl.extra.cuda, "gdc_wait")


def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 8 for the interpreter on a CPU."""
    return gpu(device).processors


# Tiles were measured on an H200. By the next three functions, other GPUs get tiles that fit them.
# Those tiles were only compiled: tests/cards.py compiles every kernel for six cards.


def has_large_shared_memory(device: torch.device) -> bool:
    """Tell whether a program may take 227 KB of shared memory: Hopper, data-center Blackwell.

    Their tensor cores read a product's operands there. On other GPUs a program holds the operands
    in registers, too, so its tiles must be smaller, or it must have more warps.
    """
    return gpu(device).shared_memory >= 227 << 10


def is_hopper(device: torch.device) -> bool:
    """Tell whether the device is of the H200's kind.

    There, some kernels were measured to be fastest with tiles that do not quite fit its registers.
    """
    return gpu(device).capability[0] == 9


def needs_register_limit(device: torch.device) -> bool:
    """Tell whether a kernel may spill unless it says how many registers a thread may have.

    For a GPU of 12.0, ptxas limits registers by itself and spills a few bytes, so that one more
    program fits a multiprocessor. If a kernel sets the limit, ptxas takes up to that many (Triton
    3.6; never timed on such a GPU).
    """
    return gpu(device).capability[0] == 12


@triton.jit
def wait_for_inputs(PDL: tl.constexpr, LATE: tl.constexpr = False):
    """Let the next kernel start, and wait until the kernels before this one have ended.

    LATE: let the next kernel start later: when all programs have called `admit_next` or ended.
    """
    if PDL:
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def ask_for(places):
    """Ask for the lines of 128 bytes at these addresses, without waiting for them.

    The memory delivers them to the L2 cache.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [places],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def admit_next(left, LEAD: tl.constexpr, PDL: tl.constexpr):
    """Let the next kernel start if a program has no more than LEAD inputs left. 0: do nothing.

    A program calls this function in each step: all calls but the first do no more.
    """
    if PDL and LEAD > 0:
        if left <= LEAD:
            tl.extra.cuda.gdc_launch_dependents()
