"""The kernel that sums over ranks: with ranks that are processes, in the interpreter, or streams
of one GPU.
"""

import multiprocessing

import pytest
import torch

pytest.importorskip("triton")

import plain_layers as plain
from process_helpers import SECONDS

from nanovllm.backends.cuda.triton import allreduce_norm
from nanovllm.backends.cuda.triton.allreduce_norm import SharedRows
from nanovllm.backends.tensor_parallel.symmetric_memory import SymmetricMemorySum

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
ROWS = (3, 1, 5, 5, 2, 4, 1)  # of one sum after the other


def run_ranks(size, rank_sums):
    """Call rank_sums(rank, turn) for all turns on every rank at once."""
    if HAS_GPU:
        streams = [torch.cuda.Stream() for _ in range(size)]
        torch.cuda.synchronize()
        for turn in range(len(ROWS)):
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    rank_sums(rank, turn)
        torch.cuda.synchronize()
        return
    processes = [
        multiprocessing.get_context("fork").Process(
            target=lambda rank: [rank_sums(rank, turn) for turn in range(len(ROWS))],
            args=(rank,),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS / 2)
        assert process.exitcode == 0, "it failed, or waits for the others"


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("size, width", [(2, 64), (4, 100), (4, 1024)])
@pytest.mark.parametrize("direct_rows", [5, 0, 3])  # all, none, and some of the sums go directly
def test_ranks_that_sum_in_a_norm_get_the_norm_of_their_sum(fresh, size, width, dtype, direct_rows):
    fresh(check_sums, size, width, dtype, direct_rows)


def check_sums(size, width, dtype, direct_rows):
    torch.manual_seed(0)

    def shared(*shape):
        tensor = torch.randn(*shape).to(dtype)
        return tensor.cuda() if HAS_GPU else tensor.share_memory_()

    weight = shared(width)
    xs = [[shared(rows, width) for _ in range(size)] for rows in ROWS]
    residuals = [[shared(rows, width) for _ in range(size)] for rows in ROWS]
    for first, *others in residuals:  # every rank has the same
        for residual in others:
            residual.copy_(first)
    wants = [
        plain.add_rms_norm(
            sum(x.float() for x in turn), rest[0].float(), weight=weight.float(), eps=1e-6
        )
        for turn, rest in zip(xs, residuals)
    ]
    pieces = [
        shared(SharedRows.BYTES // dtype.itemsize).zero_().view(torch.uint8) for _ in range(size)
    ]
    addresses = torch.tensor([piece.data_ptr() for piece in pieces], device=DEVICE)
    direct_bytes = direct_rows * width * dtype.itemsize

    def rank_sums(rank, turn):
        memory = SharedRows(addresses, rank, direct_bytes)
        allreduce_norm.sum_add_rms_norm(
            xs[turn][rank], residuals[turn][rank], weight=weight, eps=1e-6, shared=memory
        )

    run_ranks(size, rank_sums)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for turn, (normed, added) in enumerate(wants):
        for x, residual in zip(xs[turn], residuals[turn]):
            assert torch.equal(x, xs[turn][0]) and torch.equal(residual, residuals[turn][0])
        torch.testing.assert_close(xs[turn][0].float(), normed, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(
            residuals[turn][0].float(), added, atol=tolerance, rtol=tolerance
        )
    direct = [rows for rows in ROWS if rows <= direct_rows]
    owned = [rows for rows in ROWS if rows > direct_rows]
    for rank, piece in enumerate(pieces):
        counters = (
            piece[: 3 * 8 * SharedRows.ROWS].view(torch.int64).view(3, -1)[:, : max(ROWS)].tolist()
        )
        for row, counts in enumerate(zip(*counters)):
            directly = sum(rows > row for rows in direct)
            through_owner = sum(rows > row for rows in owned)
            arrivals = through_owner * (size - 1) if row % size == rank else 0
            assert counts == (directly * size, arrivals, through_owner)


def test_a_sum_in_one_shot_begins_when_all_of_the_summand_is_there(monkeypatch):
    """PyTorch's operation that copies the summand itself lets other ranks read before it has."""
    size, x = 2, torch.randn(3, 8)

    def one_shot_all_reduce(shared, operation, group_name):
        assert torch.equal(shared, x) and (operation, group_name) == ("sum", "all")
        return size * shared

    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce", one_shot_all_reduce)
    symmetric = object.__new__(SymmetricMemorySum)
    symmetric.buffer, symmetric.group_name = torch.zeros(1024, dtype=torch.uint8), "all"
    assert torch.equal(symmetric.all_reduce(x), size * x)
    assert torch.equal(symmetric.all_reduce(x.t().contiguous().t()), size * x)
