"""The kernel that sums over ranks: with ranks that are processes, in the interpreter, or streams of one GPU."""

import itertools
import multiprocessing

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import reference, triton_sum
from nanovllm.utils.parallel import SharedRows

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
            target=lambda rank: [rank_sums(rank, turn) for turn in range(len(ROWS))], args=(rank,), daemon=True
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0, "it failed, or waits for the others"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size, width", [(2, 64), (3, 100), (4, 1024)])
def test_ranks_that_sum_in_a_norm_get_the_norm_of_their_sum(size, width, dtype):
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
        reference.add_rms_norm(sum(x.float() for x in turn), rest[0].float(), weight.float(), 1e-6)
        for turn, rest in zip(xs, residuals)
    ]
    pieces = [shared(SharedRows.BYTES // dtype.itemsize).zero_().view(torch.uint8) for _ in range(size)]
    addresses = tuple(piece.data_ptr() for piece in pieces)

    def rank_sums(rank, turn):
        triton_sum.sum_add_rms_norm(xs[turn][rank], residuals[turn][rank], weight, 1e-6, SharedRows(addresses, rank))

    if HAS_GPU:
        # A kernel's first launch may wait for the device, where another may be waiting for that kernel: so launch each
        # once, with and without early starts, where the others seem to have counted already.
        for rank, rows in itertools.product(range(size), (1, 5)):
            counted = torch.full((SharedRows.BYTES // 8,), size - 1, device=DEVICE)
            x, residual = (torch.zeros(rows, width, dtype=dtype, device=DEVICE) for _ in range(2))
            triton_sum.sum_add_rms_norm(x, residual, weight, 1e-6, SharedRows((counted.data_ptr(),) * size, rank))
            torch.cuda.synchronize()
    run_ranks(size, rank_sums)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for turn, (normed, added) in enumerate(wants):
        for x, residual in zip(xs[turn], residuals[turn]):
            assert torch.equal(x, xs[turn][0]) and torch.equal(residual, residuals[turn][0])
        torch.testing.assert_close(xs[turn][0].float(), normed, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(residuals[turn][0].float(), added, atol=tolerance, rtol=tolerance)
    counts = [[sum(rows > row for rows in ROWS) * size for row in range(SharedRows.ROWS)]] * size
    assert [piece[: 8 * SharedRows.ROWS].view(torch.int64).tolist() for piece in pieces] == counts
