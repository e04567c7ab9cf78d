"""The dtype of a model's weights and activations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def resolve_dtype(name: str, hf_config, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and activations that the option `name` asks for.

    "auto" means float32 on a CPU, and the dtype of the checkpoint elsewhere. Raises ValueError if
    the checkpoint names no floating-point dtype.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    given = (
        getattr(hf_config, "dtype", None)
        or getattr(hf_config, "torch_dtype", None)
        or torch.bfloat16
    )
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
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
