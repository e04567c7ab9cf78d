"""The sum over ranks, the residual addition and the norm of a few rows, in one Triton kernel.

Knows the memory that ranks share, `SharedRows`, as addresses alone. Its twin is the ranks' `all_reduce` and then
`reference.add_rms_norm`. Each rank runs the same kernels in the same order, with one program for each row:

    write the row to a place of mine; count 1 on every rank's counter of that row; wait until all have on mine;
    read the row on every rank, and sum in the order of ranks, so that all ranks get the same bits

The n-th sum of a row brings its counter to n * size, and no rank counts again before it has seen that: so a counter also
says which turn it is, whatever graph or step the kernel runs in, and by its parity which of two places to use. Two are
enough. Who writes a place again, two turns later, saw in the turn between that all had begun that one: each had then
ended its kernel of the turn before, and with it the reading.

A program waits for the programs of the same row alone, and all that come before it in a grid start before it. So those
that wait never keep out those that they wait for, however many fit on a device. A rank that dies leaves the others
waiting: to notice is the engine's part.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import overlap, wait_for_inputs
from nanovllm.kernels.triton_ops import normed
from nanovllm.utils.parallel import SharedRows


def sum_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shared: SharedRows
) -> tuple[Tensor, Tensor]:
    """norm(residual + sum of the ranks' `x`), and that sum with its residual; both overwrite the arguments."""
    rows, width = x.shape
    assert rows <= shared.ROWS and width * x.itemsize <= shared.ROW_BYTES
    if rows:
        block = triton.next_power_of_2(width)
        warps = max(1, min(8, block // 512))
        _sum_add_rms_norm_kernel[(rows,)](
            x, residual, weight, shared.addresses, eps, width, block, shared.rank, len(shared.addresses),
            shared.ROWS, shared.ROW_BYTES, num_warps=warps, **overlap(x),
        )  # fmt: skip
    return x, residual


@triton.jit
def _sum_add_rms_norm_kernel(
    x, residual, weight, addresses, eps, N: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    scale = tl.load(weight + cols, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    mine = tl.load(x + row * N + cols, mask=inside, other=0.0)
    rest = tl.load(residual + row * N + cols, mask=inside, other=0.0)
    counter = _counter(addresses[RANK], row)
    turn = tl.load(counter, volatile=True) // SIZE  # others may have counted already, I have not
    place = ROWS * 8 + (row * 2 + turn % 2) * ROW_BYTES
    tl.store(_elements(addresses[RANK], place, x) + cols, mine, mask=inside)
    tl.debug_barrier()  # one thread releases what all have written
    for rank in tl.static_range(SIZE):
        tl.atomic_add(_counter(addresses[rank], row), 1, sem="release", scope="sys")
    while tl.atomic_add(counter, 0, sem="acquire", scope="sys") < (turn + 1) * SIZE:
        pass
    tl.debug_barrier()  # and one has acquired what all will read
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += mine.to(tl.float32)
        else:
            total += tl.load(_elements(addresses[rank], place, x) + cols, mask=inside, other=0.0).to(tl.float32)
    value = (total + rest.to(tl.float32)).to(mine.dtype)
    tl.store(residual + row * N + cols, value, mask=inside)
    tl.store(x + row * N + cols, normed(value, scale, eps, N), mask=inside)


@triton.jit
def _counter(address, row):
    return (address + row * 8).to(tl.pointer_type(tl.int64))


@triton.jit
def _elements(address, place, like):
    return tl.multiple_of((address + place).to(like.dtype), 16)
