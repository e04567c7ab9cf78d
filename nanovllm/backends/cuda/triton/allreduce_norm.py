"""The all-reduce, residual addition and norm of a decode step's rows, in one Triton kernel.

The result is that of an all-reduce, an addition and RMSNorm. The kernels know the memory that ranks
share, `SharedRows`, by its addresses alone. Each rank runs the same kernels in the same order, with
one program for each row, and all ranks get the same bits. There are two ways to sum a row:

- Directly, which is best for a few rows. The program writes its row to a place in its own rank's
  memory. It adds 1 to the row's counter on every rank, and waits until all ranks have added 1 to
  its own counter. Then it reads the row from every rank, in an order that depends on the row alone.
- Through the row's owner, which is one of the ranks. The other ranks write the row to places in the
  owner's memory and add 1 to its counter. The owner waits for all of them, sums the rows, adds the
  residual, and writes the total to every rank. There are two waits instead of one, but of `size`
  ranks, each reads and writes 2 (size - 1) / size rows for each row instead of size - 1.

Counters only grow. So a row's counter also tells how often the row was summed before, in whatever
graph or step: that number is the turn.

No place is written while another rank may still read it. The direct way uses two places by turns.
It writes to a place again two turns later. In the turn between, it saw that all ranks had begun
that turn, so all had ended their kernel of the turn before and read the place. The owner's way
needs one place only. A rank that writes to the owner has received its answer of the turn before,
and the owner writes its answers when all ranks have begun this turn.

A program waits for programs of the same row alone, and programs start in the order of the grid. So
a waiting program never keeps out a program that it waits for, however few fit on a device. If a
rank dies, the others wait for it: the engine must notice that.
"""

from dataclasses import dataclass
from typing import ClassVar

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import next_power_of_2, overlap, wait_for_inputs
from nanovllm.backends.cuda.triton.elementwise import normed


@dataclass(frozen=True)
class SharedRows:
    """A piece of memory on each rank that all ranks read and write; see the module's docstring.

    A piece begins with three counters for each row, int64, 0 at first. Behind them, each row has
    four places of ROW_BYTES.
    """

    ROWS: ClassVar[int] = 512
    ROW_BYTES: ClassVar[int] = 16 << 10
    BYTES: ClassVar[int] = ROWS * (3 * 8 + 4 * ROW_BYTES)

    addresses: Tensor  # [size] int64: of each rank's piece, in this rank's address space
    rank: int
    direct_bytes: int  # tensors of up to so many bytes are summed directly, others through owners


def sum_add_rms_norm(
    x: Tensor, residual: Tensor, *, weight: Tensor, eps: float, shared: SharedRows
) -> tuple[Tensor, Tensor]:
    """Return (norm(total), total), where total = residual + sum of the ranks' x; [T, N] each.

    norm(total) overwrites x, and total overwrites residual.
    """
    rows, width = x.shape
    assert rows <= shared.ROWS and width * x.itemsize <= shared.ROW_BYTES
    if rows:
        block = next_power_of_2(width)
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
    # Other ranks may have counted for this turn already. This rank has not.
    turn = tl.load(_counter(here, row), volatile=True) // SIZE
    place = row * 2 + turn % 2
    tl.store(_place(here, place, ROWS, ROW_BYTES, x) + cols, mine, mask=inside)
    _count(_counter(everywhere, row))
    _wait(_counter(here, row), (turn + 1) * SIZE)
    total = tl.zeros([BLOCK], tl.float32)
    # Different rows begin with different ranks, so that the links of all ranks are in use.
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
    # The owner has a place for the row of each rank, from first_slot on. Behind those of all rows
    # are the places of the answers.
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
    """Return a pointer to a counter of the piece at `address`."""
    return (address + index * 8).to(tl.pointer_type(tl.int64))


@triton.jit
def _place(address, index, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, like):
    """Return a pointer to a place of the piece at `address`, for elements as `like` points to."""
    return tl.multiple_of((address + 3 * ROWS * 8 + index * ROW_BYTES).to(like.dtype), 16)


@triton.jit
def _count(counters):
    """Add 1 to counters, after all that this program has written and read so far."""
    tl.debug_barrier()  # wait for all threads: one thread adds for all
    tl.atomic_add(counters, 1, sem="release", scope="sys")


@triton.jit
def _wait(counter, count):
    """Wait until a counter is at least `count`."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="sys") < count:
        pass
    tl.debug_barrier()  # one thread has waited for all threads
