"""The runner of CUDA devices on a CPU: kernels run in Triton's interpreter, and a graph is a list
of operations, which a replay repeats on the same tensors.

As on a GPU, a replay reads what its buffers hold by then, and the results of the replay before it
are lost. Unlike there, the device never works while the host goes on.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from nanovllm import build
from nanovllm.backends.cuda import runner as cuda
from nanovllm.backends.cuda.attention_backends import select_attention_backend
from nanovllm.backends.cuda.resampler import make_resampler
from nanovllm.engine.model_runner import SampledTokens

aten = torch.ops.aten
EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
GARBAGE = {torch.float32: torch.nan, torch.int64: 123456789, torch.int32: 123456789}


def tensors_of(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def spoil(x: torch.Tensor) -> None:
    """Fill a tensor with what no result is."""
    if x.dtype in GARBAGE:
        x.fill_(GARBAGE[x.dtype])


class Recorder(TorchDispatchMode):
    """Records operations and kernels, and runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list = []  # functions that repeat what was recorded
        self.made: list[torch.Tensor] = []  # tensors that graphs keep in memory of their own

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not aten._local_scalar_dense.default, "a capture cannot read the device"
        call = partial(func, *args, **(kwargs or {}))
        results = call()
        if func._schema.is_mutable:
            self.steps.append(call)
            return results
        held = {x.untyped_storage().data_ptr() for x in tensors_of((args, kwargs))}
        new = [x.untyped_storage().data_ptr() not in held for x in tensors_of(results)]
        if any(new):  # otherwise the results are views
            self.made += [x for x, is_new in zip(tensors_of(results), new) if is_new]
            if func not in EMPTY:
                self.steps.append(partial(self.repeat, call, tensors_of(results)))
        return results

    @staticmethod
    def repeat(call, results: list[torch.Tensor]) -> None:
        for result, again in zip(results, tensors_of(call())):
            result.copy_(again)


class RecordedGraphs:
    """Stands in for Graphs."""

    recorder: Recorder | None = None  # of the capture that is under way

    def __init__(self) -> None:
        self.graphs: dict = {}
        self.num_replays = 0

    def capture(self, key, run) -> None:
        RecordedGraphs.recorder = recorder = Recorder()
        try:
            with recorder:
                left = run()
        finally:
            RecordedGraphs.recorder = None
        assert all(x.is_contiguous() for x in left)
        self.graphs[key] = recorder, left

    def __contains__(self, key) -> bool:
        return key in self.graphs

    def replay(self, key):
        for recorder, _ in self.graphs.values():  # they share their memory
            for made in recorder.made:
                spoil(made)
        recorder, left = self.graphs[key]
        for step in recorder.steps:
            step()
        self.num_replays += 1
        return left

    def clear(self) -> None:
        self.graphs.clear()


class RunnerOnCPU(cuda.CUDAModelRunner):
    """A CUDAModelRunner whose copies to and from the device take no time."""

    def _compile_kernels(self) -> None:
        pass

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def _answer(self, output, logprobs) -> SampledTokens:
        logprobs = [replace(part, records=part.records.clone()) for part in logprobs]
        return SampledTokens(output.tokens.clone(), logprobs, output.prompt_logprobs)

    def synchronize(self) -> None:
        pass


def use_cuda_runner(monkeypatch) -> None:
    """Let an LLM on the CPU have the runner of CUDA devices."""
    run_kernel = interpreter.GridExecutor.__call__

    def record(self, *args, **kwargs):
        if (recorder := RecordedGraphs.recorder) is not None:
            recorder.steps.append(partial(run_kernel, self, *args, **kwargs))
        with _disable_current_modes():
            return run_kernel(self, *args, **kwargs)

    def make_runner(*args, **options):
        options |= dict(transform=None, make_resampler=make_resampler)
        return RunnerOnCPU(*args, **options)

    def select_triton(_, *args, **options):
        return select_attention_backend("triton", *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", record)
    monkeypatch.setattr(build, "CPUModelRunner", make_runner)
    monkeypatch.setattr(cuda, "Graphs", RecordedGraphs)
    monkeypatch.setattr(cuda, "MemoryBudget", lambda *_: None)
    monkeypatch.setattr(cuda, "begin_hashing", lambda: None)
    monkeypatch.setattr(cuda, "select_attention_backend", select_triton)
    for name in ("set_device", "Stream", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
