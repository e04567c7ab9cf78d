"""How many threads a step runs on.

PyTorch starts a thread for each core of the machine, and threads that wait for each other spin.
That is the fastest way as long as each has a core to itself. When other processes want the cores
too, a thread spins for one that the system has set aside, a hundred times a step. Two threads on
two cores (AMD EPYC, PyTorch 2.13), beside four busy processes, made 3 tokens a second with the
package's small model, and one thread made 150; on the idle machine either made 560.

So a step runs on at most as many threads as this process may use cores, and on fewer for a while
when the thread that runs it is kept from its core. What the user has set is left alone. Knows no
model and no request.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time

import torch

USERS_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
)
WINDOW = 0.1  # seconds of steps that are judged together
CONTESTED, FREE = 0.75, 0.9  # below and above this share of a core, others want it and do not
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0  # seconds before more threads are tried again


class SharedCores:
    """Runs steps on as many threads as there are cores for them."""

    def __init__(self) -> None:
        self._usual = torch.get_num_threads()
        self._adapts = not is_users_choice(self._usual)
        self._most = min(self._usual, usable_cores()) if self._adapts else self._usual
        self.threads = self._most
        self._pause = FIRST_PAUSE
        self._retry_at = 0.0
        self._wall = self._busy = 0.0  # seconds of the window, and those that the thread ran

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Run the block on `threads` threads; on the user's, if he has changed them by now."""
        before = torch.get_num_threads()
        if before != self._usual or before == self.threads:
            yield
            return
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def step(self) -> Iterator[None]:
        """The same, and learn from how the block went.

        The block must keep its thread busy: a wait would look like a lost core.
        """
        wall, busy = perf_counter(), thread_time()
        with self.limit():
            yield
        now = perf_counter()
        self.learn(now - wall, thread_time() - busy, now)

    def learn(self, wall: float, busy: float, now: float) -> None:
        """Choose `threads` anew, after a step of `wall` seconds, which ended at `now`.

        Its thread ran for `busy` seconds of them.
        """
        self._wall += wall
        self._busy += busy
        if not self._adapts or self._wall < WINDOW:
            return
        share = self._busy / self._wall
        self._wall = self._busy = 0.0
        if share < CONTESTED:
            self._retry_at = now + self._pause
            if self.threads > 1:
                self.threads //= 2
                self._pause = min(2 * self._pause, LAST_PAUSE)
        elif self.threads == self._most:
            self._pause = max(0.9 * self._pause, FIRST_PAUSE)
        elif share > FREE and now >= self._retry_at:
            self.threads = min(2 * self.threads, self._most)


def is_users_choice(num_threads: int) -> bool:
    """Whether the user chose how PyTorch's threads run.

    He may do so by a variable, or by a number that is not PyTorch's default: one for each core of
    this process, or for each two where they are halves of one.
    """
    cores = _cores_of_affinity()
    is_default = num_threads in (cores, cores // 2)
    return not is_default or any(name in os.environ for name in USERS_VARIABLES)


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use, by its affinity and its control groups' quotas."""
    return max(1, min([_cores_of_affinity(), *(int(quota) for quota in _quotas(root))]))


def threads_of_rank(num_ranks: int) -> int:
    """Threads of each of several ranks on one CPU.

    They share the cores that there are, or the number that the user has set.
    """
    threads = torch.get_num_threads()
    if not is_users_choice(threads):
        threads = min(threads, usable_cores())
    return max(1, threads // num_ranks)


def _cores_of_affinity() -> int:
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """The cores' worth of time that each control group around this process grants.

    Version 2 has one file for it, version 1 has two.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # In a container the path may be the host's, which is not there: then the top one is ours.
        inner = folder / group.strip("/")
        for place in (inner, *inner.parents):
            if not place.is_relative_to(folder):
                break
            yield from _quota(
                place, ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
            )


def _quota(folder: Path, names: list[str]) -> Iterator[float]:
    try:
        quota, period = " ".join((folder / name).read_text() for name in names).split()
        if int(period) > 0 and int(quota) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError):  # not there, or "max": no bound
        pass
