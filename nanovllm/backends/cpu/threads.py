"""The number of threads on which a step runs.

PyTorch starts a thread for each core of the machine, and threads that wait for each other spin.
Spinning is fastest as long as each thread has a core to itself. When other processes want the cores
too, a thread spins while the thread that it waits for has no core, a hundred times a step. Two
threads on two cores (AMD EPYC, PyTorch 2.13), beside four busy processes, made 3 tokens a second
with the package's small model, and one thread made 150; on the idle machine either made 560.

So a step runs on at most as many threads as this process may use cores, and leaves the cores that
other processes use to these. Linux tells how much they use. Where that cannot be seen, as where a
container's quota is shared, a step runs on fewer threads for a while after its thread was kept from
its core. A number of threads that the user has set is left alone. This file knows no model and no
request.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import NamedTuple

import torch

from nanovllm.control_groups import control_groups

USERS_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
)
WINDOW = 0.2  # seconds of steps that are judged together
# A core is left to other processes if they use more than SPARED of it.
SPARED = 0.3
# A thread that had less than CONTESTED of a core's time competes with other processes for the core;
# a thread that had more than FREE does not.
CONTESTED, FREE = 0.75, 0.9
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0  # seconds before more threads are tried again


class CoreUse(NamedTuple):
    """The seconds for which cores were used up to a moment."""

    now: float
    all: float  # by all processes, on the cores that this process may use
    ours: float  # by this process

    def others_since(self, before: "CoreUse") -> float:
        """Return how many cores other processes used between `before` and now."""
        used = self.all - before.all - (self.ours - before.ours)
        return max(0.0, used / (self.now - before.now))


class SharedCores:
    """The cores that steps share with other processes: as many threads as there are free cores."""

    def __init__(self) -> None:
        self._usual = torch.get_num_threads()
        self._adapts = not is_users_choice(self._usual)
        self._most = min(self._usual, usable_cores()) if self._adapts else self._usual
        self.threads = self._most
        self._pause = FIRST_PAUSE
        self._retry_at = 0.0
        # Of this window: seconds of steps, and seconds of them in which the thread had a core.
        self._wall = self._busy = 0.0
        self._use: CoreUse | None = None  # when this window began

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Run the block on `threads` threads, or on the user's number if the user has set one."""
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
        """Run the block on `threads` threads, and learn from the time that it took.

        The block must keep its thread busy, because time spent waiting would look like a lost core.
        """
        if self._adapts and self._wall == 0:
            self._use = core_use()
        wall, busy = perf_counter(), thread_time()
        with self.limit():
            yield
        now = perf_counter()
        self.learn(now - wall, thread_time() - busy, now)

    def learn(self, wall: float, busy: float, now: float) -> None:
        """Count a step, and choose `threads` anew at the end of a window.

        The step took `wall` seconds and ended at `now`. Its thread had a core for `busy` of these
        seconds.
        """
        self._wall += wall
        self._busy += busy
        if not self._adapts or self._wall < WINDOW:
            return
        share = self._busy / self._wall
        self._wall = self._busy = 0.0
        others = 0.0
        if self._use is not None and (use := core_use()) is not None:
            others = use.others_since(self._use)
        self.choose(share, others, now)

    def choose(self, share: float, others: float, now: float) -> None:
        """Choose `threads` after a window in which the thread had this share of a core's time, and
        other processes were seen to use `others` cores.
        """
        free = max(1, self._most - int(others + 1 - SPARED))
        if free < self.threads:
            self.threads = free
        elif share < CONTESTED and others < SPARED:  # others that are not seen want the core
            self._retry_at = now + self._pause
            if self.threads > 1:
                self.threads //= 2
                self._pause = min(2 * self._pause, LAST_PAUSE)
        elif self.threads == self._most:
            self._pause = max(0.9 * self._pause, FIRST_PAUSE)
        elif now >= self._retry_at:
            if others >= SPARED:
                self.threads = free
            elif share > FREE:
                self.threads = min(2 * self.threads, free)


def is_users_choice(num_threads: int) -> bool:
    """Return whether the user chose how PyTorch's threads run.

    Users choose by an environment variable or by a number of threads other than PyTorch's default.
    The default is one thread for each core of this process, or one for each two where two logical
    cores are halves of one.
    """
    cores = _cores_of_affinity()
    is_default = num_threads in (cores, cores // 2)
    return not is_default or any(name in os.environ for name in USERS_VARIABLES)


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may use, by its affinity and its control groups' quotas."""
    return max(1, min([_cores_of_affinity(), *(int(quota) for quota in _quotas(root))]))


def core_use(root: Path = Path("/")) -> CoreUse | None:
    """Return how long the cores of this process were used until now; None where nothing tells."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):  # this is not Linux
        return None
    ticks = 0
    for name, *times in map(str.split, lines):
        if name in ours:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, times[:8])
            ticks += user + nice + system + irq + softirq + steal
    return CoreUse(perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), process_time())


def threads_of_rank(num_ranks: int) -> int:
    """Return the number of threads for each of several ranks on one CPU.

    The ranks share the cores of this process, or the number of threads that the user has set.
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
    """Yield the time that each control group around this process grants, in cores.

    Version 2 of control groups has one file for the quota, version 1 has two.
    """
    files = {1: ["cpu.cfs_quota_us", "cpu.cfs_period_us"], 2: ["cpu.max"]}
    for folder, version in control_groups("cpu", root):
        yield from _quota(folder, files[version])


def _quota(folder: Path, names: list[str]) -> Iterator[float]:
    """Yield the quota in cores that a control group's files grant, if they set a bound."""
    try:
        quota, period = " ".join((folder / name).read_text() for name in names).split()
        if int(period) > 0 and int(quota) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError):  # the files are not there, or say "max": there is no bound
        pass
