"""Launching a compiled kernel again without asking Triton: only where it would find the same one.

Kernels are stand-ins.
"""

import pytest
import torch

triton = pytest.importorskip("triton")

from nanovllm.backends.cuda.cublas import zero_bias
from nanovllm.backends.cuda.triton import dispatch as launching


class Kernel:
    """Says what it was launched with, and whether it was looked for first."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.launches.append(("found", grid, args, options))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launches.append(("again", grid, args))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(launching, "TAKES_ALL_ARGUMENTS", True)
    monkeypatch.setattr(launching, "_compiled", {})


X = torch.zeros(64)


def test_the_same_arguments_find_the_compiled_kernel_again():
    kernel, other = Kernel(), torch.ones(64)
    launching.launch(kernel, (3,), X, None, 5, num_warps=2, PDL=True, launch_pdl=True)
    launching.launch(kernel, (4, 2), other, None, 5, num_warps=2, PDL=True, launch_pdl=True)
    assert kernel.launches == [
        ("found", (3,), (X, None, 5), {"num_warps": 2, "PDL": True, "launch_pdl": True}),
        ("again", (4, 2, 1), (other, None, 5, True)),
    ]


@pytest.mark.parametrize(
    "args, options",
    [
        ((X.double(), None, 5), {"num_warps": 2}),
        ((X[1:], None, 5), {"num_warps": 2}),  # not aligned
        ((X, X, 5), {"num_warps": 2}),
        ((X, None, 16), {"num_warps": 2}),
        ((X, None, 5), {"num_warps": 4}),
        ((X.to("meta"), None, 5), {"num_warps": 2}),
    ],
    ids=["dtype", "alignment", "none", "value", "option", "device"],
)
def test_what_triton_tells_apart_is_looked_for_again(args, options):
    kernel = Kernel()
    launching.launch(kernel, (3,), X, None, 5, num_warps=2)
    launching.launch(kernel, (3,), *args, **options)
    assert [how for how, *_ in kernel.launches] == ["found", "found"]


@pytest.mark.skipif(
    launching.TensorDescriptor is None, reason="this release of Triton has no tiles"
)
def test_tiles_are_told_apart_by_their_type_and_shape():
    kernel, y, z = Kernel(), torch.zeros(8, 64), torch.ones(16, 64)
    for base, rows in ((y, 4), (z, 4), (y, 8), (y.half(), 4)):
        launching.launch(kernel, (3,), X, launching.TensorDescriptor.from_tensor(base, [rows, 64]))
    assert [how for how, *_ in kernel.launches] == ["found", "again", "found", "found"]


def test_a_launch_that_was_put_off_is_not_kept(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(
        Kernel,
        "__getitem__",
        lambda self, grid: lambda *args, **options: self.launches.append("found"),
    )
    for _ in range(2):
        launching.launch(kernel, (3,), X)
    assert kernel.launches == ["found", "found"]


def test_a_tensor_whose_address_a_graph_may_hold_is_never_dropped():
    device = torch.device("cpu")
    counters, bias = launching._counters(device, 0), zero_bias(1, torch.float32, device)
    for i in range(1, 200):
        launching._counters(device, i)
        zero_bias(1 + i, torch.float32, device)
    assert launching._counters(device, 0) is counters
    assert zero_bias(1, torch.float32, device) is bias


def test_sizes_are_rounded_as_by_triton():
    for n in range(1, 300):
        assert launching.next_power_of_2(n) == triton.next_power_of_2(n)
        for unit in (1, 3, 64, 300):
            assert launching.cdiv(n, unit) == triton.cdiv(n, unit)
