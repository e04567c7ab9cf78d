"""Put the core and its rooms together: the one place that knows both.

The core imports no room. A room that is not there is left out: the library then does less, or does
it slower.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.parallel import ParallelGroup


def build_runner(
    config: Config, hf_config, folder: str, *, group: ParallelGroup = ParallelGroup(), **sizes: int
) -> ModelRunner:
    """One rank's runner, with what makes it fast on its device."""
    device = choose_device(config.device, group.rank)
    options: dict[str, Any] = dict(device=device, group=group, **sizes)
    if resampler := room("sampling.resampler"):
        options["make_resampler"] = resampler.Resampler
    runner_class = ModelRunner
    if device.type == "cuda" and (gpu := room("gpu.runner")):
        runner_class = gpu.CUDAModelRunner
    return runner_class(
        config, hf_config, folder, transform=choose_transform(config, device), **options
    )


def choose_device(name: str, rank: int) -> torch.device:
    """The device of a rank; "auto" is a GPU where there is one."""
    if gpu := room("gpu.device"):
        return gpu.resolve_device(name, rank)
    return torch.device("cpu" if name == "auto" else name)


def choose_transform(config: Config, device: torch.device) -> Callable[[nn.Module], None] | None:
    """What to make of the model once it is loaded. A GPU's own kernels are its runner's affair."""
    check_kernels(config, device)
    if config.kernels == "compile":
        return import_module("nanovllm.kernels.compile").compile_layers
    if config.kernels == "cpp":
        return import_module("nanovllm.cpu.layers").speed_up_by_cpp
    if config.kernels == "auto" and device.type == "cpu" and (cpu := room("cpu.layers")):
        return cpu.speed_up
    return None


def check_kernels(config: Config, device: torch.device) -> None:
    """Refuse kernels that do not suit the device or each other."""
    kernels, attention = config.kernels, config.attention_backend
    if kernels != "auto" and attention not in ("auto", "torch"):
        raise ValueError(
            f"kernels is {kernels!r}, which leaves attention to PyTorch, but attention_backend is "
            f"{attention!r}: use 'auto' for one of them"
        )
    if kernels == "cpp" and device.type != "cpu":
        raise ValueError(
            f"kernels is 'cpp', but device is {device}: use kernels='auto', or device='cpu'"
        )
    if device.type == "cpu" and attention in ("triton", "flash-attn"):
        raise ValueError(
            f"attention_backend is {attention!r}, but device {device} is no GPU: use 'auto'"
        )


def room(name: str) -> Any:
    """The module nanovllm.`name`, or None if its room was taken out."""
    full_name = f"nanovllm.{name}"
    try:
        return import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name is None or not full_name.startswith(error.name):
            raise  # it is there, and misses something else
        return None
