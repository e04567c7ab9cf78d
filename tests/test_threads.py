"""How many threads steps run on: the cores that are there for them, and what the user has set."""

import os

import pytest
import torch

from nanovllm.backends.cpu import threads
from nanovllm.backends.cpu.threads import (
    WINDOW,
    SharedCores,
    core_use,
    is_users_choice,
    threads_of_rank,
    usable_cores,
)


@pytest.fixture
def sixteen(monkeypatch):
    """A machine of 16 cores, of which PyTorch uses all, and a user who has set nothing."""
    for name in threads.USERS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_cores_of_affinity", lambda: 16)
    monkeypatch.setattr(threads, "_quotas", lambda root: iter(()))
    number = 16

    def set_number(n):
        nonlocal number
        number = n

    monkeypatch.setattr(torch, "get_num_threads", lambda: number)
    monkeypatch.setattr(torch, "set_num_threads", set_number)


def grant(root, group, **files):
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / group / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_root(tmp_path, cgroup):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    return tmp_path


@pytest.mark.parametrize(
    "quota, cores",
    [
        ("max 100000", 16),
        ("400000 100000", 4),
        ("150000 100000", 1),
        ("10000 100000", 1),
        ("?", 16),
    ],
)
def test_a_quota_of_version_2_bounds_the_cores(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(threads, "_cores_of_affinity", lambda: 16)
    root = make_root(tmp_path, "0::/\n")
    grant(root, "", cpu__max=quota)
    assert usable_cores(root) == cores


def test_the_narrowest_of_nested_groups_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "_cores_of_affinity", lambda: 16)
    root = make_root(tmp_path, "0::/user.slice/job\n")
    grant(root, "user.slice", cpu__max="300000 100000")
    grant(root, "user.slice/job", cpu__max="800000 100000")
    assert usable_cores(root) == 3


@pytest.mark.parametrize("group", ["/", "/docker/0123"], ids=["inside", "the host's path"])
def test_a_quota_of_version_1_bounds_the_cores(tmp_path, monkeypatch, group):
    monkeypatch.setattr(threads, "_cores_of_affinity", lambda: 16)
    root = make_root(tmp_path, f"3:memory:/\n2:cpu,cpuacct:{group}\n")
    grant(root, "cpu", cpu__cfs_quota_us="200000\n", cpu__cfs_period_us="100000\n")
    assert usable_cores(root) == 2


def test_without_control_groups_the_affinity_counts(tmp_path):
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("name", threads.USERS_VARIABLES)
def test_a_variable_of_the_users_is_his_choice(sixteen, monkeypatch, name):
    assert not is_users_choice(16) and not is_users_choice(8)
    monkeypatch.setenv(name, "16")
    assert is_users_choice(16)
    cores = SharedCores()
    cores.learn(1.0, 0.1, 1.0)
    assert cores.threads == 16


def test_a_number_the_user_has_set_is_his_choice(sixteen, monkeypatch):
    monkeypatch.setattr(threads, "_quotas", lambda root: iter([2.0]))
    torch.set_num_threads(5)
    cores = SharedCores()
    cores.learn(1.0, 0.1, 1.0)
    with cores.step():
        assert torch.get_num_threads() == 5
    assert threads_of_rank(2) == 2


def test_a_number_set_later_is_the_users_too(sixteen):
    cores = SharedCores()
    cores.learn(1.0, 0.1, 1.0)
    torch.set_num_threads(3)
    with cores.step():
        assert torch.get_num_threads() == 3


def test_a_quota_holds_within_steps_and_nowhere_else(sixteen, monkeypatch):
    monkeypatch.setattr(threads, "_quotas", lambda root: iter([4.0]))
    cores = SharedCores()
    for block in (cores.limit, cores.step):
        with pytest.raises(RuntimeError), block():
            assert torch.get_num_threads() == 4
            raise RuntimeError
        assert torch.get_num_threads() == 16
    assert threads_of_rank(2) == 2 and threads_of_rank(8) == 1


def test_steps_give_way_to_others_that_are_not_seen_and_come_back(sixteen):
    cores, now, seen = SharedCores(), 0.0, []

    def run(seconds, share):
        nonlocal now
        for _ in range(round(seconds / WINDOW)):
            now += WINDOW
            cores.learn(WINDOW, WINDOW * share(cores.threads), now)
            seen.append(cores.threads)

    run(10, lambda threads: 1.0)
    assert set(seen) == {16}
    run(1, lambda threads: 0.4)
    assert seen[-5:] == [8, 4, 2, 1, 1]
    seen.clear()
    run(600, lambda threads: 1.0 if threads == 1 else 0.5)  # a core is free, two are not
    assert seen.count(2) < 20, "it must not try more threads again and again"
    run(150, lambda threads: 1.0)
    assert cores.threads == 16


class Neighbours:
    """A simulated machine, on which steps and other processes share the cores fairly."""

    def __init__(self, monkeypatch, num_cores):
        monkeypatch.setattr(threads, "_cores_of_affinity", lambda: num_cores)
        monkeypatch.setattr(torch, "get_num_threads", lambda: num_cores)
        self.num_cores, self.now, self.cores = num_cores, 0.0, SharedCores()

    def run(self, seconds, wanted):
        """Run steps beside processes that want `wanted` cores. Returns the threads each time."""
        seen = []
        for _ in range(round(seconds / WINDOW)):
            self.now += WINDOW
            part = min(1.0, self.num_cores / (self.cores.threads + wanted))
            self.cores.choose(share=part, others=part * wanted, now=self.now)
            seen.append(self.cores.threads)
        return seen


@pytest.mark.parametrize(
    "num_cores, wanted, left",
    [(2, 0.7, 1), (2, 0.1, 2), (2, 4.0, 1), (16, 0.7, 15), (16, 3.6, 12), (16, 0.2, 16)],
)
def test_steps_leave_the_cores_that_others_use_for_as_long_as_they_use_them(
    sixteen, monkeypatch, num_cores, wanted, left
):
    machine = Neighbours(monkeypatch, num_cores)
    assert set(machine.run(5, 0.0)) == {num_cores}
    for seconds in (2, 600):
        beside = machine.run(seconds, wanted)
        assert set(beside[1:]) == {left}, "they give way at once, and try nothing meanwhile"
        after = machine.run(2, 0.0)
        assert set(after[round(1 / WINDOW) :]) == {num_cores}, "full speed after a second"


def test_steps_follow_neighbours_that_come_and_go(sixteen, monkeypatch):
    machine = Neighbours(monkeypatch, 2)
    for _ in range(20):
        assert set(machine.run(1, 1.0)[1:]) == {1} and set(machine.run(1, 0.0)[1:]) == {2}


def test_a_kernel_tells_how_much_others_use(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    now, ours = 5.0, 1.0
    monkeypatch.setattr(threads, "perf_counter", lambda: now)
    monkeypatch.setattr(threads, "process_time", lambda: ours)
    (tmp_path / "proc").mkdir()
    stat = "cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 {} 0 0 50 7 0 0 0 0 0\ncpu1 900 0 0 0 0 0 0 0 0 0\n"
    stat += "cpu2 {} 0 10 50 7 0 0 20 0 0\nintr 1 2 3\n"
    (tmp_path / "proc/stat").write_text(stat.format(100, 100))
    before = core_use(tmp_path)
    now, ours = 7.0, 2.5
    (tmp_path / "proc/stat").write_text(stat.format(250, 200))
    # 2.5 of the 4 seconds of two cores were used, 1.5 of them by this process.
    assert core_use(tmp_path).others_since(before) == pytest.approx(0.5)
    assert core_use(tmp_path / "nowhere") is None


def test_short_steps_are_judged_together(sixteen):
    cores = SharedCores()
    cores.learn(0.02, 0.0, 0.02)  # one that was interrupted says nothing
    assert cores.threads == 16
    for i in range(20):
        cores.learn(0.01, 0.01, 0.03 + i / 100)
    assert cores.threads == 16
