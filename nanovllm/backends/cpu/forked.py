"""PyTorch on a CPU in a forked process.

PyTorch computes with the threads of OpenMP, and a fork copies none but the thread that called it.
That thread still counts on the others: its next product with more than one thread waits for them
forever (PyTorch 2.13 with GCC's OpenMP). With one thread it computes. PyTorch's data loader does
the same in its workers.
"""

import os

import torch

_computing_pid: int | None = None  # the first process that called this, perhaps an ancestor


def keep_clear_of_lost_threads() -> None:
    """Call before computing: uses one thread in a process forked from one that has computed."""
    global _computing_pid
    if _computing_pid is None:
        _computing_pid = os.getpid()
    elif _computing_pid != os.getpid():
        torch.set_num_threads(1)
