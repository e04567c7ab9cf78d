"""Launch Triton kernels: early, and at little cost to the host.

Early: a kernel may start while the one before it ends, by programmatic dependent launch, on Hopper
and newer. A decode step of one sequence is some 250 kernels of 2 to 5 microseconds, a third of
which is starting and draining. A kernel launched with `**overlap(x)` may start as soon as every
program of the kernel before it has called `wait_for_inputs` or ended. What it does before its own
call overlaps with that kernel, so it may only touch what no kernel writes, that is, weights. The
call returns once the kernel before has ended, its writes visible; since that one waited too, all
earlier ones have ended as well. Every kernel launched so must call it in every program.

At little cost: a step that is no graph's replay launches five of these kernels a layer, and the
host may take longer for that than the device. `launch` makes Triton look at a launch's arguments
once: on one host of an H200, with a slow processor, add_rms_norm went from 44 to 31 microseconds a
call.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.3
    TensorDescriptor = None

# With more rows kernels fill the device, and one that waits takes room from one that works.
MAX_ROWS = 256


def overlap(x: Tensor) -> dict[str, bool]:
    """Options of a kernel that takes `PDL: tl.constexpr`, by its input's rows and device."""
    able = x.shape[0] <= MAX_ROWS and x.is_cuda and can_overlap(x.device)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


VALUES = {int, float, bool, type(None)}
_compiled: dict[tuple, Any] = {}
# In older releases of Triton, a compiled kernel takes other arguments than the function it was made
# from. This was run on 3.6; what is looked for came shortly before.
TAKES_ALL_ARGUMENTS = hasattr(triton, "AsyncCompileMode")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options), at little cost to the host.

    `args` are all of the kernel's but PDL, which is its last if it takes that.

    The first must be a tensor, on the device where the kernel shall run.
    """
    # All that Triton looks at: tensors' types and whether they are aligned, tiles' types and
    # shapes, and all else by value.
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
    # The interpreter, and a launch that was put off, give None.
    if TAKES_ALL_ARGUMENTS and compiled is not None:
        _compiled[key] = compiled


def arrivals(device: torch.device) -> Tensor:
    """Counters of 0, four a multiprocessor.

    Programs that share work count themselves there, and the last one leaves 0 again.

    Each stream has its own, for what runs on one runs in turn. Made by the first step, so that no
    graph's pool owns them.
    """
    return _counters(
        device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    )


@lru_cache
def _counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(4 * num_processors(device), dtype=torch.int32, device=device)


@lru_cache
def can_overlap(device: torch.device) -> bool:
    is_hopper_or_newer = torch.cuda.get_device_capability(device) >= (9, 0)
    # Older releases of Triton lack it.
    return is_hopper_or_newer and hasattr(tl.extra.cuda, "gdc_wait")


@lru_cache
def num_processors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 8
    )


@lru_cache
def has_large_shared_memory(device: torch.device) -> bool:
    """227 KB a multiprocessor, which Hopper and the Blackwell of data centers have."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
