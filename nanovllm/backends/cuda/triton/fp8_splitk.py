"""Products of the rows of a decode step in FP8 by blocks on Hopper, in few and in many tiles.

A tile has 128 outputs and up to 192 rows. Few outputs are few tiles, so several programs share one:
each multiplies some of the columns (split-K). Of many tiles, each multiprocessor's program computes
one or more alone, and those that are left are shared. A program fetches its next tile while it
stores the results of the last one.

A program has one warp that fetches, by the tensor memory accelerator, and two or three groups of
four warps that multiply: each multiplies 64 rows of inputs by the weights that all of them share,
and waits for nothing but what is fetched. So the tensor cores multiply for one group while another
scales its sums. They take codes from shared memory as they lie in a checkpoint.

At the end, the groups of a tile's programs that have the same rows exchange their sums: each adds
up those of some outputs, in the order of the columns, so the result is deterministic. A program
that waits for others keeps its multiprocessor. Programs start in the order of their numbers, and
those of a tile are neighbours: so they all start as long as four multiprocessors are free.

Hopper's tensor cores add up products of FP8 in few bits, so the sums of 128 columns are scaled, and
added to totals in float32.

On an H200 (PyTorch 2.11, Triton 3.6), with the quantising before it, `down` of Qwen3-8B takes 31.0
us for 192 rows, where fp8_linear.py takes 37.9, and 24.5 us for 96 rows, where it takes 30.5. Gates
and ups of 192 rows add 36.9 us a layer to a decode step, and added 41.0 when a program ended with
its tile.

The kernel is written in Gluon, the part of Triton in which a kernel says which thread holds what.

Shapes: M rows, K inputs, N outputs.
"""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.backends.cuda.triton.dispatch import (
    MAX_ROWS,
    arrivals,
    ask_for,
    cdiv,
    is_hopper,
    num_processors,
    overlap,
)
from nanovllm.backends.cuda.triton.fp8_inputs import CUBLAS_BLOCK, Fp8Matrix, Rows
from nanovllm.backends.cuda.triton.gluon_common import (
    barrier,
    fetch,
    from_threads,
    in_threads,
    part_places,
    run,
)

if "functions_and_args" not in inspect.signature(gl.warp_specialize).parameters:
    raise ImportError("Triton 3.5 specialises warps by other arguments")

MOST_GROUPS = 3  # of warps that multiply: more would not have the registers
# Bytes that a program may fill with codes and scales. It has 227 KiB; the compiler takes up to 12.
SHARED_MEMORY = gl.constexpr(212 << 10)
OUTPUTS = gl.constexpr(128)  # of a tile
ROWS = gl.constexpr(64)  # of a group of warps
BLOCKS = gl.constexpr(4)  # of outputs, which a tile's programs share out
# Steps whose weights a program asks for before its inputs are ready, and fetches later.
AHEAD = gl.constexpr(4)
# A program lets the next kernel start when it has so many steps left to fetch.
LEAD = gl.constexpr(2)


def suits(x: Rows, matrix: Fp8Matrix, dtype: torch.dtype) -> bool:
    """Tell whether the kernel knows the GPU, the sizes and the format, and is the fastest."""
    (outputs, inputs), device = matrix.codes.shape, matrix.codes.device
    if not (
        is_hopper(device)
        and dtype.itemsize == 2
        and matrix.block_scales is not None
        and matrix.sharing == matrix.block_rows == CUBLAS_BLOCK
        and outputs % OUTPUTS.value == inputs % 128 == 0
        and is_fastest(len(x), outputs, inputs, num_processors(device))
    ):
        return False
    tiles, groups = row_tiles(len(x))
    return len(x.codes) >= tiles * groups * ROWS.value


def is_fastest(rows: int, outputs: int, inputs: int, processors: int) -> bool:
    """Tell whether no other kernel is faster, as measured for the shapes of 8B and 4B on an H200.

    Few tiles: those that four programs can share. Many: gates and ups. Of 129 to 192 rows, cuBLASLt
    computes 256, in 2.9 tiles of 128 x 128 a multiprocessor for 8B: a layer with this kernel took
    3.5 us less. Since programs go on from tile to tile, it takes 4 us less again. For qkv, cuBLASLt
    is as fast.
    """
    tiles = outputs // OUTPUTS.value
    are_few = processors <= 12 * tiles <= 3 * processors and inputs % (4 * 128) == 0
    return (64 < rows <= MAX_ROWS and are_few) or (128 < rows <= 192 and tiles > processors)


def row_tiles(rows: int) -> tuple[int, int]:
    """Return how many tiles rows make, and the groups of warps that a tile takes."""
    tiles = cdiv(rows, MOST_GROUPS * ROWS.value)
    return tiles, cdiv(rows, tiles * ROWS.value)


class Cut(NamedTuple):
    """The cut of a product's tiles into programs."""

    rounds: int  # in each, every multiprocessor has a program that computes a tile alone
    shared: int  # the tiles that are left
    splits: int  # programs that share one of them: 1, 2 or 4


def cut(rows: int, outputs: int, inputs: int, processors: int) -> Cut:
    """Choose how tiles are cut into programs. Those that share tiles all run at the same time."""
    tiles, steps = row_tiles(rows)[0] * (outputs // OUTPUTS.value), inputs // 128
    shared = tiles % processors
    splits = [n for n in (2, 4) if 0 < shared * n <= processors and steps % n == 0]
    return Cut(tiles // processors, shared, splits[-1] if splits else 1)


def linear(x: Rows, matrix: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute x @ weight.T + bias, where `suits` holds: x [M, K], bias [N] -> [M, N].

    No running kernel may write to the weight or its scales.
    """
    assert x.scales is not None and matrix.block_scales is not None
    rows, (outputs, inputs), device = len(x), matrix.codes.shape, matrix.codes.device
    tiles, groups = row_tiles(rows)
    rounds, shared, splits = cut(rows, outputs, inputs, num_processors(device))
    programs = num_processors(device) if rounds else shared * splits
    out = torch.empty(rows, outputs, dtype=dtype, device=device)
    sharers = shared * splits * groups  # groups of warps that share
    parts = torch.empty(sharers, ROWS.value, OUTPUTS.value, dtype=torch.float32, device=device)
    counters = arrivals(device)
    assert sharers <= len(counters)
    codes, scales = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(0, 32, 1)
    # Boxes of the tensor memory accelerator, whose sizes are powers of 2, for the rows of two or
    # three groups. A box that reaches beyond the last row of codes would be slow.
    first, has_more = 2 * ROWS.value, groups == 3
    x_scales = x.scales.view(-1)
    _splitk_kernel[(programs,)](
        TensorDescriptor.from_tensor(x.codes, [first, 128], codes),
        TensorDescriptor.from_tensor(x.codes, [ROWS.value, 128], codes) if has_more else None,
        TensorDescriptor.from_tensor(x_scales, [first], scales),
        TensorDescriptor.from_tensor(x_scales, [ROWS.value], scales) if has_more else None,
        TensorDescriptor.from_tensor(matrix.codes, [OUTPUTS.value, 128], codes),
        *(matrix.codes, matrix.block_scales, bias, out, parts, counters),
        *(rows, x.scales.shape[1], outputs, inputs),
        *(rounds, groups, splits, shared * splits, tiles),
        num_warps=4,
        **overlap(out),
    )
    return out


@gluon.jit
def _fetch_inputs(inputs, stages, m, step, stride, stage):
    """Begin to fetch the codes and the scales of all rows of a tile into a stage."""
    x, more_x, x_scales, more_scales = inputs
    codes, more, scales, of_more, _, ready, _ = stages
    fetch(x, [m, step * 128], ready.index(stage), codes.index(stage))
    fetch(x_scales, [step * stride + m], ready.index(stage), scales.index(stage))
    if more_x is not None:
        m += x.block_shape[0]
        fetch(more_x, [m, step * 128], ready.index(stage), more.index(stage))
        fetch(more_scales, [step * stride + m], ready.index(stage), of_more.index(stage))


@gluon.jit
def _fetch_weights(weight, stages, n, step, stage, BYTES: gl.constexpr):
    """Begin to fetch 128 columns of a tile's weights into a stage. BYTES: of the whole stage."""
    _, _, _, _, weights, ready, _ = stages
    mbarrier.expect(ready.index(stage), BYTES)
    fetch(weight, [n, step * 128], ready.index(stage), weights.index(stage))


@gluon.jit
def _place(tile, GROUPS: gl.constexpr, ROW_TILES: gl.constexpr):
    """Return the first row and the first output of a tile."""
    return tile % ROW_TILES * (GROUPS * ROWS), tile // ROW_TILES * OUTPUTS


@gluon.jit
def _fetch_steps(
    work,
    ROUNDS: gl.constexpr,
    GROUPS: gl.constexpr,
    SPLITS: gl.constexpr,
    SHARERS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    ADMIT: gl.constexpr,  # whether the next kernel may start early
):
    """Fetch all steps but the first `fetched` ones, each into the place of one that no warps need.

    The tiles and their steps are those of _multiply_rows, in the same order.
    """
    inputs, weight, stages, steps, stride, fetched = work
    STAGES: gl.constexpr = stages[0].shape[0]
    BYTES: gl.constexpr = (GROUPS * ROWS + OUTPUTS) * 128 + GROUPS * ROWS * 4
    program, programs = gl.program_id(0), gl.num_programs(0)
    shares = gl.where(program < SHARERS, 1, 0)
    last = ROUNDS * steps + shares * (steps // SPLITS)
    _, _, _, _, _, _, free = stages
    i = fetched
    for r in range(ROUNDS + shares):
        is_whole = r < ROUNDS
        tile = gl.where(is_whole, r * programs + program, ROUNDS * programs + program // SPLITS)
        m, n = _place(tile, GROUPS, ROW_TILES)
        begin = gl.where(is_whole, 0, program % SPLITS * (steps // SPLITS))
        end = gl.where(is_whole, steps, begin + steps // SPLITS)
        for step in range(begin + gl.where(r == 0, fetched, 0), end):
            if ADMIT:
                if last - i <= LEAD:
                    run("griddepcontrol.launch_dependents;")
            stage = i % STAGES
            mbarrier.wait(free.index(stage), (i // STAGES & 1) ^ 1)
            _fetch_weights(weight, stages, n, step, stage, BYTES)
            _fetch_inputs(inputs, stages, m, step, stride, stage)
            i += 1


@gluon.jit
def _multiply_rows(
    work,
    INDEX: gl.constexpr,  # of the group of warps
    ROUNDS: gl.constexpr,
    GROUPS: gl.constexpr,
    SPLITS: gl.constexpr,
    SHARERS: gl.constexpr,
    ROW_TILES: gl.constexpr,
):
    """Multiply the rows of a group of warps by the columns of a program's tiles."""
    stages, tensors, M, N, steps = work
    bias, out, _, _, w_scales = tensors
    program, programs = gl.program_id(0), gl.num_programs(0)
    for r in range(ROUNDS):
        m, n = _place(r * programs + program, GROUPS, ROW_TILES)
        total = _add_up(stages, w_scales + n // OUTPUTS * steps, r * steps, steps, INDEX)
        blocks = _blocks(in_threads(total))
        for b in gl.static_range(BLOCKS):
            at = n + b * (OUTPUTS // BLOCKS)
            _store(blocks[b], bias, out, M, N, m + INDEX * ROWS, at)
    if program < SHARERS:
        m, n = _place(ROUNDS * programs + program // SPLITS, GROUPS, ROW_TILES)
        count = steps // SPLITS
        w_scales += n // OUTPUTS * steps + program % SPLITS * count
        total = _add_up(stages, w_scales, ROUNDS * steps, count, INDEX)
        blocks = _blocks(in_threads(total))
        _share(blocks, tensors, M, N, m + INDEX * ROWS, n, INDEX, GROUPS, SPLITS)


@gluon.jit
def _add_up(stages, w_scales, first, count, INDEX: gl.constexpr):
    """Multiply 64 rows by the columns of `count` steps from step `first` of the program on.

    Returns the scaled sums, float32 [64, 128].
    """
    codes, more, scales_of_codes, scales_of_more, weights, ready, free = stages
    STAGES: gl.constexpr = codes.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 32])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    all_rows = more if INDEX == 2 else codes
    all_scales = scales_of_more if INDEX == 2 else scales_of_codes
    FIRST: gl.constexpr = 0 if INDEX == 2 else INDEX * ROWS
    # ptxas keeps what is the same for all threads in a register that they share, and waits for it
    # at once. So it is not told that this is 0.
    zero = gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0x40000000;",
        "=r,r",
        [gl.arange(0, ROWS, layout=OF_ROWS)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    total = gl.zeros([ROWS, OUTPUTS], gl.float32, MMA)
    sums = total
    for i in range(first, first + count):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        rows = all_rows.index(stage).slice(FIRST, ROWS, 0)
        columns = weights.index(stage).permute((1, 0))
        begun = warpgroup_mma(rows, columns, sums, use_acc=False, is_async=True)
        scales = all_scales.index(stage).slice(FIRST, ROWS, 0).load(OF_ROWS)
        scales *= gl.load(w_scales + (i - first) + zero)
        sums = warpgroup_mma_wait(0, deps=(begun,))
        mbarrier.arrive(free.index(stage), count=1)
        total += sums * gl.expand_dims(scales, 1)
    return total


@gluon.jit
def _share(
    blocks,
    tensors,
    M,
    N,
    m,
    n,
    INDEX: gl.constexpr,
    GROUPS: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """Exchange sums with the programs that share the tile, and store some of the results."""
    bias, out, parts, arrivals, _ = tensors
    # Each group of warps has its own parts and its own counter.
    split = gl.program_id(0) % SPLITS
    first = (gl.program_id(0) - split) * GROUPS + INDEX
    SIZE: gl.constexpr = ROWS * OUTPUTS
    SHARE: gl.constexpr = BLOCKS // SPLITS  # of the blocks, that a program adds up
    parts += first.to(gl.int64) * SIZE
    arrivals += first
    place = part_places(blocks[0], 0, 1, OUTPUTS // BLOCKS)
    has_all = place >= 0  # a mask of all numbers
    for b in gl.static_range(BLOCKS):
        others = has_all & (split != b // SHARE)
        at = parts + split * GROUPS * SIZE + b * (SIZE // BLOCKS)
        gl.store(at + place, blocks[b], mask=others)
    # Who sees that all have arrived sees what they wrote before.
    barrier()  # wait until all threads have stored
    arrived = gl.atomic_add(arrivals, 1, sem="acq_rel") + 1
    while arrived < SPLITS:
        arrived = gl.atomic_add(arrivals, 0, sem="acquire")
    barrier()
    for k in gl.static_range(SHARE):
        own = blocks[k]
        for s in gl.static_range(1, SPLITS):
            own = gl.where(split == s, blocks[s * SHARE + k], own)
        block = split * SHARE + k
        added = gl.zeros_like(own)
        for s in gl.static_range(SPLITS):
            at = parts + s * GROUPS * SIZE + block * (SIZE // BLOCKS)
            others = has_all & (split != s)
            part = gl.load(at + place, mask=others, other=0.0)
            added += gl.where(split == s, own, part)
        _store(added, bias, out, M, N, m, n + block * (OUTPUTS // BLOCKS))
    # Who leaves last makes the counter ready for the next kernel.
    if gl.atomic_add(arrivals, 1, sem="relaxed") == 2 * SPLITS - 1:
        gl.store(arrivals, 0)


@gluon.jit
def _blocks(sums):
    """Cut sums [OUTPUTS // 8, threads, 4] into four blocks of neighbouring outputs."""
    EIGHTS: gl.constexpr = sums.shape[0]
    THREADS: gl.constexpr = sums.shape[1]
    halves = sums.reshape([2, 2, EIGHTS // 4, THREADS, 4]).permute([2, 3, 4, 1, 0])
    left, right = gl.split(halves)
    first, second = gl.split(left)
    third, fourth = gl.split(right)
    return first, second, third, fourth


@gluon.jit
def _store(sums, bias, out, M, N, m, n):
    """Store a block of results from row m and output n on: sums [outputs // 8, threads, 4]."""
    WIDTH: gl.constexpr = OUTPUTS // BLOCKS
    PAIRS: gl.constexpr = WIDTH // 2
    sums = from_threads(sums)
    if bias is not None:
        col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, sums.type.layout))
        sums += gl.expand_dims(gl.load(bias + n + col).to(gl.float32), 0)
    # Four threads exchange pairs of outputs, so that each stores 8 neighbours.
    low, high = gl.split(sums.to(out.dtype.element_ty).reshape([ROWS, PAIRS, 2]))
    low, high = low.to(gl.int16, bitcast=True), high.to(gl.int16, bitcast=True)
    pairs = (high.to(gl.int32) << 16) | (low.to(gl.int32) & 0xFFFF)
    STORE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    pairs = gl.convert_layout(pairs, STORE)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    col = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, STORE))
    out = out.to(gl.pointer_type(gl.int32), bitcast=True) + (m.to(gl.int64) * N + n) // 2
    place = out + gl.expand_dims(row * (N // 2), 1) + gl.expand_dims(col, 0)
    gl.store(place, pairs, mask=gl.expand_dims(row < M - m, 1))


@gluon.jit(do_not_specialize=["M"])
def _splitk_kernel(
    x,
    more_x,
    x_scales,
    more_scales,
    weight,
    codes,  # those of the weight, where the memory is asked for them
    w_scales,
    bias,
    out,
    parts,
    arrivals,
    M,
    stride,  # of the rows' scales, from group to group
    N,
    K,
    ROUNDS: gl.constexpr,  # tiles that each program computes alone
    GROUPS: gl.constexpr,  # of warps that multiply
    SPLITS: gl.constexpr,  # programs that share a tile
    SHARERS: gl.constexpr,  # programs that compute the tiles that are left
    ROW_TILES: gl.constexpr,
    PDL: gl.constexpr,
):
    BYTES: gl.constexpr = (GROUPS * ROWS + OUTPUTS) * 128 + GROUPS * ROWS * 4
    STAGES: gl.constexpr = SHARED_MEMORY // BYTES  # steps that are there or on their way
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_shape[0], 128], x.layout)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, x.block_shape[0]], x_scales.layout)
    more = inputs
    of_more = scales
    if more_x is not None:
        more = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, 128], more_x.layout)
        of_more = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], x_scales.layout)
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, OUTPUTS, 128], weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    # The place of the first tile, as _fetch_steps computes it for all tiles. Programs that share a
    # tile are neighbours.
    tile = gl.program_id(0) // (1 if ROUNDS else SPLITS)
    m, n = _place(tile, GROUPS, ROW_TILES)
    count = K // (128 if ROUNDS else 128 * SPLITS)
    begin = 0 if ROUNDS else gl.program_id(0) % SPLITS * count
    fetched = gl.minimum(count, STAGES)
    stages = (inputs, more, scales, of_more, weights, ready, free)
    for i in range(fetched):
        _fetch_weights(weight, stages, n, begin + i, i, BYTES)
    if PDL:
        if m == 0:  # programs of other rows need the same weights
            lane = gl.arange(0, OUTPUTS, layout=gl.BlockedLayout([1], [32], [4], [0]))
            own = codes + (n + lane).to(gl.int64) * K
            for i in range(STAGES, gl.minimum(count, STAGES + AHEAD)):
                ask_for(own + (begin + i) * 128)
        run("griddepcontrol.wait;")
    all_inputs = (x, more_x, x_scales, more_scales)
    for i in range(fetched):
        _fetch_inputs(all_inputs, stages, m, begin + i, stride, i)
    if PDL:
        if ROUNDS == 0 and count <= STAGES:
            run("griddepcontrol.launch_dependents;")
    tensors = (bias, out, parts, arrivals, w_scales)
    # The registers of the first group of warps are those that the others leave.
    work = (stages, tensors, M, N, K // 128)
    fetching = (all_inputs, weight, stages, K // 128, stride, fetched)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_rows, (work, 0, ROUNDS, GROUPS, SPLITS, SHARERS, ROW_TILES)),
                (_multiply_rows, (work, 1, ROUNDS, GROUPS, SPLITS, SHARERS, ROW_TILES)),
                (_fetch_steps, (fetching, ROUNDS, GROUPS, SPLITS, SHARERS, ROW_TILES, PDL)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_rows, (work, 0, ROUNDS, GROUPS, SPLITS, SHARERS, ROW_TILES)),
                (_multiply_rows, (work, 1, ROUNDS, GROUPS, SPLITS, SHARERS, ROW_TILES)),
                (_multiply_rows, (work, 2, ROUNDS, GROUPS, SPLITS, SHARERS, ROW_TILES)),
                (_fetch_steps, (fetching, ROUNDS, GROUPS, SPLITS, SHARERS, ROW_TILES, PDL)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
