"""Let a kernel start while the one before it ends: programmatic dependent launch, on Hopper and newer.

A decode step of one sequence is some 250 kernels of 2 to 5 microseconds, a third of which is starting and draining. A
kernel launched with `**overlap(x)` may start as soon as every program of the kernel before it has called
`wait_for_inputs` or ended. What it does before its own call overlaps with that kernel, so it may only touch what no
kernel writes, that is, weights. The call returns once the kernel before has ended, its writes visible; since that one
waited too, all earlier ones have ended as well. Every kernel launched so must call it in every program.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor


def overlap(x: Tensor) -> dict[str, bool]:
    """Launch options for kernels that take `PDL: tl.constexpr`, on the device of `x`."""
    able = x.is_cuda and _is_hopper_or_newer(x.device)
    return {"PDL": able, "launch_pdl": able}


@lru_cache
def _is_hopper_or_newer(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
