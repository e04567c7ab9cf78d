"""The sum over ranks, the residual addition and the norm of a decode step's rows, in one Triton
kernel.

Knows the memory that ranks share, `SharedRows`, as addresses alone. It computes what an all-reduce,
the residual addition and RMSNorm do. Each rank runs the same kernels in the same order, with one
program for each row, and all ranks get the same bits. There are two ways for a row to go:

- Directly, which is best for a few rows: write the row to a place of mine; count 1 on every rank's
  counter of that row; wait until all have on mine; read the row on every rank, in an order that
  depends on the row alone.
- Through its owner, one of the ranks: write the row to a place on the owner and count 1 there; the
  owner waits for all, sums, adds the residual, and writes what it got to every rank. Two waits, but
  of `size` ranks each reads and writes 2 (size - 1) / size rows for each row and not size - 1.

A counter only grows, so it also says which turn a row has come to, whatever graph or step the
kernel runs in. No place is written while someone may still read it. Of two places, used by turns,
the direct way writes one again when it saw, in the turn between, that all had begun that one: each
had then ended its kernel of the turn before. The owner's way needs one: who writes to the owner has
its answer of the turn before, and the owner answers when all have begun this one.

A program waits for the programs of the same row alone, and all that come before it in a grid start
before it. So those that wait never keep out those that they wait for, however many fit on a device.
A rank that dies leaves the others waiting: to notice is the engine's part.
"""

from dataclasses import dataclass
from typing import ClassVar

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import overlap, wait_for_inputs
from nanovllm.backends.cuda.triton.elementwise import normed


@dataclass(frozen=True)
class SharedRows:
    """Memory on every rank that all of them read and write.

    The module's docstring says how.

    It begins with three counters for each row, int64s that are 0 at first; then each row has four
    places for its elements.
    """

    ROWS: ClassVar[int] = 512
    ROW_BYTES: ClassVar[int] = 16 << 10
    BYTES: ClassVar[int] = ROWS * (3 * 8 + 4 * ROW_BYTES)

    addresses: Tensor  # [size] int64: where each rank's piece begins, as this one sees it
    rank: int
    direct_bytes: int  # up to which a sum goes directly, and not through owners


def sum_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shared: SharedRows
) -> tuple[Tensor, Tensor]:
    """norm(residual + sum of the ranks' `x`), and that sum with its residual.

    Both overwrite the arguments.
    """
    rows, width = x.shape
    assert rows <= shared.ROWS and width * x.itemsize <= shared.ROW_BYTES
    if rows:
        block = triton.next_power_of_2(width)
        warps = max(1, min(8, block // 512))
        kernel = (
            _sum_directly_kernel if x.nbytes <= shared.direct_bytes else _sum_through_owner_kernel
        )
        kernel[(rows,)](
            x,
            residual,
            weight,
            shared.addresses,
            shared.rank,
            eps,
            width,
            block,
            len(shared.addresses),
            shared.ROWS,
            shared.ROW_BYTES,
            num_warps=warps,
            **overlap(x),
        )
    return x, residual


@triton.jit(do_not_specialize=["rank"])
def _sum_directly_kernel(
    x,
    residual,
    weight,
    addresses,
    rank,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    scale = tl.load(weight + cols, mask=inside, other=0.0)
    everywhere, here = tl.load(addresses + tl.arange(0, SIZE)), tl.load(addresses + rank)
    wait_for_inputs(PDL)
    mine = tl.load(x + row * N + cols, mask=inside, other=0.0)
    rest = tl.load(residual + row * N + cols, mask=inside, other=0.0)
    # Others may have counted already, I have not.
    turn = tl.load(_counter(here, row), volatile=True) // SIZE
    place = row * 2 + turn % 2
    tl.store(_place(here, place, ROWS, ROW_BYTES, x) + cols, mine, mask=inside)
    _count(_counter(everywhere, row))
    _wait(_counter(here, row), (turn + 1) * SIZE)
    total = tl.zeros([BLOCK], tl.float32)
    # Rows begin with different ranks, so that all ranks' links are in use.
    for i in tl.static_range(SIZE):
        there = tl.load(addresses + (row + i) % SIZE)
        total += tl.load(
            _place(there, place, ROWS, ROW_BYTES, x) + cols, mask=inside, other=0.0
        ).to(tl.float32)
    value = (total + rest.to(tl.float32)).to(mine.dtype)
    tl.store(residual + row * N + cols, value, mask=inside)
    tl.store(x + row * N + cols, normed(value, scale, eps, N), mask=inside)


@triton.jit(do_not_specialize=["rank"])
def _sum_through_owner_kernel(
    x,
    residual,
    weight,
    addresses,
    rank,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # A slot for each rank; then come the answers.
    owner, first_slot = row % SIZE, 2 * ROWS + row // SIZE * SIZE
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    scale = tl.load(weight + cols, mask=inside, other=0.0)
    everywhere, here = tl.load(addresses + tl.arange(0, SIZE)), tl.load(addresses + rank)
    at_owner = tl.load(addresses + owner)
    wait_for_inputs(PDL)
    value = tl.load(x + row * N + cols, mask=inside, other=0.0)
    answered = _counter(here, 2 * ROWS + row)
    turn = tl.load(answered, volatile=True)
    if rank == owner:
        total = value.to(tl.float32)
        total += tl.load(residual + row * N + cols, mask=inside, other=0.0).to(tl.float32)
        _wait(_counter(here, ROWS + row), (turn + 1) * (SIZE - 1))
        for i in tl.static_range(1, SIZE):
            slot = _place(here, first_slot + (rank + i) % SIZE, ROWS, ROW_BYTES, x)
            total += tl.load(slot + cols, mask=inside, other=0.0).to(tl.float32)
        value = total.to(value.dtype)
        for i in tl.static_range(1, SIZE):
            there = tl.load(addresses + (rank + i) % SIZE)
            tl.store(_place(there, 3 * ROWS + row, ROWS, ROW_BYTES, x) + cols, value, mask=inside)
        _count(_counter(everywhere, 2 * ROWS + row))
    else:
        tl.store(_place(at_owner, first_slot + rank, ROWS, ROW_BYTES, x) + cols, value, mask=inside)
        _count(_counter(at_owner, ROWS + row))
        _wait(answered, turn + 1)
        value = tl.load(
            _place(here, 3 * ROWS + row, ROWS, ROW_BYTES, x) + cols, mask=inside, other=0.0
        )
    tl.store(residual + row * N + cols, value, mask=inside)
    tl.store(x + row * N + cols, normed(value, scale, eps, N), mask=inside)


@triton.jit
def _counter(address, index):
    return (address + index * 8).to(tl.pointer_type(tl.int64))


@triton.jit
def _place(address, index, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, like):
    """Behind the counters, room for a row of elements like those."""
    return tl.multiple_of((address + 3 * ROWS * 8 + index * ROW_BYTES).to(like.dtype), 16)


@triton.jit
def _count(counters):
    """Tell who waits for these counters that all this program has written and read is done."""
    tl.debug_barrier()  # one thread speaks for all
    tl.atomic_add(counters, 1, sem="release", scope="sys")


@triton.jit
def _wait(counter, count):
    while tl.atomic_add(counter, 0, sem="acquire", scope="sys") < count:
        pass
    tl.debug_barrier()  # one thread has waited for all
