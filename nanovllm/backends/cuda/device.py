"""The device that a rank runs on."""

import ctypes
import threading
from contextlib import suppress

import torch


def start_cuda_driver(name: str) -> None:
    """Start the CUDA driver in a thread: it takes seconds, during which Python's lock is free."""
    if name != "cpu":
        with suppress(OSError):  # the machine has no driver
            threading.Thread(
                target=ctypes.CDLL("libcuda.so.1").cuInit, args=(0,), daemon=True
            ).start()


def resolve_device(name: str, rank: int) -> torch.device:
    """Return the device of a rank; "auto" means cuda if PyTorch sees a CUDA device, else cpu.

    Raises ValueError if there is no such device.
    """
    available = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if available else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not available:
        raise ValueError(
            f"device is {name!r}, but PyTorch sees no CUDA device: use 'cpu' or install a CUDA "
            "build of torch"
        )
    index = int(name.partition(":")[2] or 0) + rank
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"device cuda:{index} is needed for rank {rank}, but there are "
            f"{torch.cuda.device_count()} CUDA devices: lower tensor_parallel_size, or choose "
            "another device"
        )
    return torch.device("cuda", index)


def describe_device(name: str, count: int) -> str:
    """Describe `count` devices, the first of which is `name`, such as "2 x NVIDIA H200"."""
    device = torch.device(name)
    if device.type == "cpu":
        return "the CPU"
    name = torch.cuda.get_device_name(device)
    return name if count == 1 else f"{count} x {name}"
