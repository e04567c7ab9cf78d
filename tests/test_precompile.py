"""Finding what has to be compiled, with Triton's hook but without a device: kernels here are
stand-ins.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from process_helpers import SECONDS, in_thread
from torch import nn

triton = pytest.importorskip("triton")
if not hasattr(triton, "AsyncCompileMode"):
    pytest.skip("this release of Triton does not compile in threads", allow_module_level=True)

from nanovllm.backends.cuda.attention_backends import PLAIN_BACKEND
from nanovllm.backends.cuda.fused_layers import FusedGatedMLP, fuse
from nanovllm.backends.cuda.precompile import _load, compile_kernels, find_uncompiled
from nanovllm.backends.cuda.runner import CUDAModelRunner
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.parallel import ParallelGroup


class Kernel:
    """Asks the hook as a launch of triton.jit's functions does."""

    def __init__(self):
        self.launched, self.preloaded = [], []

    def launch(self, key: str):
        hook = triton.knobs.runtime.jit_cache_hook
        fn = SimpleNamespace(module="m", name="k", jit_function=self)
        if not (
            hook
            and hook(
                key=key,
                repr="",
                fn=fn,
                compile={"specialization_data": key},
                already_compiled=False,
            )
        ):
            self.launched.append(key)

    def preload(self, specialization: str):
        self.preloaded.append(specialization)
        return Compiled(specialization)


class Compiled:
    """A stand-in that notes which threads build its launcher and load it.

    The kernel "bad" does not compile, and "large" cannot be loaded.
    """

    metadata = None

    def __init__(self, key: str):
        if key == "bad":
            raise RuntimeError("it does not compile")
        self.src = key

    @property
    def run(self):
        notes.append(("loaded", self.src, threading.get_ident()))
        any_loaded.set()
        if self.src == "large":
            raise RuntimeError("it does not fit")


notes: list[tuple[str, str, int]] = []
any_loaded = threading.Event()


@pytest.fixture
def built_launchers(monkeypatch):
    """Let launchers be built by a stand-in: there is no driver."""
    both_build = threading.Barrier(2)

    def launcher_cls(src, metadata):
        if src in "ab":
            both_build.wait(SECONDS)
        if src == "b":
            any_loaded.wait(0.1)  # a kernel that is loaded too early is loaded meanwhile
        notes.append(("built", src, threading.get_ident()))

    notes.clear()
    any_loaded.clear()
    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher_cls))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    return notes


def test_each_kernel_is_found_once_and_none_is_launched():
    kernel = Kernel()
    found = find_uncompiled(lambda: [kernel.launch(key) for key in "aba"])
    assert kernel.launched == [] == kernel.preloaded
    assert found == [(kernel, "a"), (kernel, "b")]


def test_threads_compile_and_one_loads_when_all_have(built_launchers):
    """Two threads that load at the same time may take each other's launchers."""
    kernel = Kernel()
    with ThreadPoolExecutor(2) as pool:
        compile_kernels(lambda: [kernel.launch(key) for key in "ab"], pool)
    here = threading.get_ident()
    (*built, (*first, by), (*second, by_too)) = built_launchers
    assert {key for _, key, _ in built} == {"a", "b"}
    assert len({thread for _, _, thread in built} | {here}) == 3
    assert (first, second, by, by_too) == (["loaded", "a"], ["loaded", "b"], here, here)


def test_a_kernel_that_does_not_compile_or_load_is_left_to_its_launch(built_launchers):
    kernel = Kernel()
    with ThreadPoolExecutor(1) as pool:
        compile_kernels(lambda: [kernel.launch(key) for key in ("bad", "large", "fine")], pool)
    assert [note[:2] for note in built_launchers] == [
        *(("built", key) for key in ("large", "fine")),
        *(("loaded", key) for key in ("large", "fine")),
    ]


def test_the_launch_of_a_kernel_that_could_not_be_loaded_says_why(monkeypatch):
    """Triton keeps the launcher of such a kernel, and would launch it without a function."""

    def load_binary(*_):
        raise RuntimeError("out of memory")

    compiler = triton.compiler.compiler
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        launcher_cls=lambda *_: lambda *_: None,
        utils=SimpleNamespace(load_binary=load_binary),
    )
    monkeypatch.setattr(compiler, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 0)
    kernel = object.__new__(compiler.CompiledKernel)
    names = ("name", "src", "kernel", "hash", "metadata_group", "module", "function", "_run")
    vars(kernel).update(dict.fromkeys(names), metadata=SimpleNamespace(shared=0))
    with pytest.raises(RuntimeError, match="out of memory"):
        _load(kernel)
    with pytest.raises(RuntimeError, match="out of memory"):
        kernel.run()


def test_launches_of_other_threads_and_after_it_go_on():
    kernel = Kernel()

    def run():
        in_thread(lambda: kernel.launch("other")).result(SECONDS)

    assert find_uncompiled(run) == []
    kernel.launch("after")
    assert kernel.launched == ["other", "after"]


def test_what_no_kernel_writes_reads_zero():
    made = []

    def run():
        x = torch.empty(1000, dtype=torch.int64)
        made.extend([x, torch.empty_like(x), x.new_empty(3, 4)])

    find_uncompiled(run)
    assert all(not each.any() for each in made) and made[2].shape == (3, 4)


def test_an_error_takes_the_hook_back():
    def run():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        find_uncompiled(run)
    assert triton.knobs.runtime.jit_cache_hook is None


def test_a_start_runs_what_mlps_launch_for_prompts_once_for_each_size(monkeypatch):
    model = nn.ModuleList(GatedMLP(8, size, ParallelGroup()) for size in (16, 24, 16))
    fuse(model, PLAIN_BACKEND)
    warmed_up = []
    monkeypatch.setattr(FusedGatedMLP, "warmup", lambda mlp: warmed_up.append(mlp))
    CUDAModelRunner._run_small_steps(make_runner(model))
    sizes = [mlp.down_proj.weight.shape[1] for mlp in warmed_up]
    assert sorted(sizes) == [16, 24]


def make_runner(model):
    """Make a runner of one sequence whose steps take up to 64 tokens."""
    runner = MagicMock(model=model, max_num_seqs=1, max_num_batched_tokens=64, resampler=None)
    runner.decode_sizes, runner.attention_layers = [1], ()
    runner.config.batch_invariant = False
    runner._slots = torch.tensor([1])
    return runner


def test_a_start_runs_as_many_rows_as_prompts_have_tokens_even_of_one_sequence():
    runner = make_runner(nn.ModuleList())
    CUDAModelRunner._run_small_steps(runner)
    slots = [call.args[0] for call in runner._run_decode.call_args_list]
    assert {32, 64} < {len(each) for each in slots} and max(map(len, slots)) == 64
    assert all((each == 1).all() for each in slots)  # the padding slot behind that of the sequence
