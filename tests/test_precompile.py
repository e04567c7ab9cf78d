"""Finding what has to be compiled, with Triton's hook but without a device: kernels here are
stand-ins.
"""

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
from nanovllm.backends.cuda.precompile import find_uncompiled
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
        return SimpleNamespace(run=specialization)


def test_each_kernel_is_found_once_and_none_is_launched():
    kernel = Kernel()
    found = find_uncompiled(lambda: [kernel.launch(key) for key in "aba"])
    assert kernel.launched == [] == kernel.preloaded
    assert [compile_kernel() for compile_kernel in found] == ["a", "b"] == kernel.preloaded


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
