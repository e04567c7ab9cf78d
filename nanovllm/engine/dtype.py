"""The dtype of a model's weights and activations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def resolve_dtype(name: str, given: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and activations that the option `name` asks for.

    "auto" means float32 on a CPU. Elsewhere it means the dtype `given` in config.json, or bfloat16
    if that gives none. Raises ValueError if `given` is no floating-point dtype.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    dtype = torch.bfloat16 if given is None else getattr(torch, given, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"config.json: dtype is {given!r}: it must be a floating-point dtype such as "
            "'bfloat16'; or give the option dtype"
        )
    return dtype


@contextmanager
def tensors_default_to(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Make `dtype` and `device` the defaults for new tensors inside the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)
