"""PyTorch on a CPU in a forked process.

PyTorch computes with the threads of OpenMP. A fork copies only the thread that called it, but
OpenMP in the new process still counts on the others: its next product on more than one thread waits
for them forever (PyTorch 2.13 with GCC's OpenMP). A product on one thread does not wait. So a
forked process computes on one thread here, as it does in the workers of PyTorch's data loader.
"""

import os

import torch

_computing_pid: int | None = None  # the process that computed first; it may be an ancestor


def keep_clear_of_lost_threads() -> None:
    """Limit PyTorch to one thread if this process was forked from one that has computed.

    Call this before every computation.
    """
    global _computing_pid
    if _computing_pid is None:
        _computing_pid = os.getpid()
    elif _computing_pid != os.getpid():
        torch.set_num_threads(1)
