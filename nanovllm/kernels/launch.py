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

MAX_ROWS = 256  # with more rows kernels fill the device, and one that waits takes room from one that works


def overlap(x: Tensor) -> dict[str, bool]:
    """Launch options for a kernel that takes `PDL: tl.constexpr`, by the rows and the device of its input."""
    able = x.shape[0] <= MAX_ROWS and x.is_cuda and can_overlap(x.device)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@lru_cache
def can_overlap(device: torch.device) -> bool:
    is_hopper_or_newer = torch.cuda.get_device_capability(device) >= (9, 0)
    return is_hopper_or_newer and hasattr(tl.extra.cuda, "gdc_wait")  # older releases of Triton lack it


@lru_cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@lru_cache
def has_large_shared_memory(device: torch.device) -> bool:
    """227 KB a multiprocessor, which Hopper and the Blackwell of data centers have."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
