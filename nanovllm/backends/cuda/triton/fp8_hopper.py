"""Products of a few rows in FP8 on Hopper's tensor cores, as fast as memory delivers the weights.

The tensor cores take weights from shared memory as they lie in a checkpoint, so no thread touches a
code. Weights are the left operand, of which a product has at least 64 rows; the inputs are the
right one, which may have as few as 8. The tensor memory accelerator fetches tiles of several steps
in advance, those of the weights before the inputs are ready.

A unit of work is a tile of 128 outputs times 128 columns. Each program takes the same number of
units in a row: the last columns of one tile, whole tiles, the first columns of another one. So all
multiprocessors read the same number of bytes. Programs that share a tile write parts of its sums,
and the last of them to end adds these up in their order: the result is deterministic.

Hopper's tensor cores add up products of FP8 in few bits, so the sums of 128 columns are scaled, and
added to totals in float32, while the tensor cores multiply those of the next unit.

The kernel is written in Gluon, the part of Triton in which a kernel says which thread holds what.

Shapes: M rows, K inputs, N outputs, G groups of inputs, U units of a program.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.backends.cuda.triton.dispatch import arrivals, is_hopper, num_processors, overlap
from nanovllm.backends.cuda.triton.fp8_inputs import Fp8Matrix, Rows
from nanovllm.backends.cuda.triton.woven_linear import barrier, fetch, run

# Triton 3.9 has another name for it than 3.6.
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None)
    or gl.shared_memory_descriptor._reinterpret
)

MOST_ROWS = 128
TILE = 128  # outputs and columns of a unit
SHARED_MEMORY = 215 << 10  # bytes that a program may fill with tiles and scales
# Units of a program that keeps their scales in shared memory, 64 KB of them for 128 rows. A larger
# weight takes more programs than there are multiprocessors.
MOST_UNITS = 128
MOST_WAVES = 4  # of programs on all multiprocessors: `arrivals` has as many counters


def suits(x: Rows, matrix: Fp8Matrix) -> bool:
    """Tell whether the kernel knows the GPU, the sizes and the format."""
    inputs, groups = matrix.codes.shape[1], matrix.scales.shape[1]
    # A unit has one scale of weights, and a row of it one of inputs.
    is_divisible = matrix.group % TILE == 0 and matrix.block_rows % TILE == 0
    return (
        is_hopper(matrix.codes.device)
        and len(x) <= MOST_ROWS
        and x.scales is not None
        and len(x.scales) == groups
        and (groups == 1 or is_divisible)
        and inputs % 16 == 0
        and matrix.codes.is_contiguous()
        and waves(matrix) <= MOST_WAVES
    )


def waves(matrix: Fp8Matrix) -> int:
    """Return how many programs each multiprocessor runs, one after another."""
    if matrix.scales.shape[1] == 1:
        return 1
    outputs, inputs = matrix.codes.shape
    units = triton.cdiv(outputs, TILE) * triton.cdiv(inputs, TILE)
    return triton.cdiv(units, num_processors(matrix.codes.device) * MOST_UNITS)


def linear(x: Rows, matrix: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute x @ weight.T + bias, where `suits` holds: x [M, K], bias [N] -> [M, N].

    No running kernel may write to the weight or its scales.

    Warps and stages were measured with 16, 64 and 128 rows and the shapes of Qwen3-8B on an H100
    (torch 2.11, Triton 3.6).
    """
    assert x.scales is not None
    (rows, inputs), outputs, device = x.codes.shape, len(matrix.codes), matrix.codes.device
    block_m = max(8, triton.next_power_of_2(rows))
    warps, stages = (4, 6) if block_m <= 16 else (8, 8)
    steps = triton.cdiv(inputs, TILE)
    units = triton.cdiv(outputs, TILE) * steps
    span = triton.cdiv(units, num_processors(device) * waves(matrix))
    programs = triton.cdiv(units, span)
    sharing = triton.cdiv(steps - 1, span) + 1 if span % steps else 1
    groups = matrix.scales.shape[1]
    kept = triton.next_power_of_2(span) if groups > 1 else 0
    room = SHARED_MEMORY - 4 * kept * block_m
    out = torch.empty(rows, outputs, dtype=dtype, device=device)
    parts = counters = None
    if sharing > 1:
        parts = torch.empty(programs, 2, TILE, block_m, dtype=torch.float32, device=device)
        counters = arrivals(device)
    layout = gl.NVMMASharedLayout(128, 8, 2)
    _unit_kernel[(programs,)](
        TensorDescriptor.from_tensor(x.codes, [block_m, TILE], layout),
        TensorDescriptor.from_tensor(matrix.codes, [TILE, TILE], layout),
        *(x.scales, matrix.scales, bias, out, parts, counters),
        *(rows, outputs, groups, steps, units, span),
        matrix.group // TILE if groups > 1 else 1,
        *(kept, block_m, warps, min(stages, room // (TILE * (TILE + block_m))), sharing),
        num_warps=warps,
        **overlap(out),
    )
    return out[: len(x)]


@gluon.jit
def _place(unit, steps):
    """Return the first output and column of a unit."""
    tile = unit // steps
    return tile * 128, (unit - tile * steps) * 128


@gluon.jit
def _multiply(weights, inputs, stage, zeros):
    """Begin to multiply a stage's weights by its inputs."""
    columns = inputs.index(stage).permute((1, 0))
    return warpgroup_mma(weights.index(stage), columns, zeros, use_acc=False, is_async=True)


@gluon.jit(do_not_specialize=["M", "units", "span"])
def _unit_kernel(
    x,
    weight,
    x_scales,
    w_scales,
    bias,
    out,
    parts,
    arrivals,
    M,
    N,
    G,
    steps,
    units,
    span,
    STEPS: gl.constexpr,  # units that share scales
    UNITS: gl.constexpr,  # a power of 2 that holds a program's; 0: all columns share scales
    BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,  # units that are in shared memory or on their way
    SHARING: gl.constexpr,  # programs that share a tile, at most
    PDL: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 32])
    BYTES: gl.constexpr = (128 + BLOCK_M) * 128
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, 128, 128], weight.layout)
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, 128], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    begin = gl.program_id(0) * span
    count = gl.minimum(span, units - begin)
    first = gl.minimum(count, STAGES)
    for i in range(first):
        n, k = _place(begin + i, steps)
        mbarrier.expect(ready.index(i), BYTES)
        fetch(weight, [n, k], ready.index(i), weights.index(i))
    if UNITS:
        SCALES: gl.constexpr = gl.BlockedLayout(
            [1, 1], [32 // min(32, BLOCK_M), min(32, BLOCK_M)], [WARPS, 1], [1, 0]
        )
        each = gl.arange(0, UNITS, layout=gl.SliceLayout(1, SCALES))
        own, column = _place(begin + gl.minimum(each, count - 1), steps)
        group = column // (128 * STEPS)
        w_scale = gl.expand_dims(gl.load(w_scales + own * G + group), 1)
    if PDL:
        run("griddepcontrol.launch_dependents;")
        run("griddepcontrol.wait;")
    for i in range(first):
        n, k = _place(begin + i, steps)
        fetch(x, [0, k], ready.index(i), inputs.index(i))
    if UNITS:
        # A row of a unit has one scale: that of the inputs times that of the weights.
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        row = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCALES)), 0)
        at = gl.expand_dims(group * M, 1) + row
        x_scale = gl.load(x_scales + at, mask=row < M, other=0.0)
        scales = gl.allocate_shared_memory(gl.float32, [UNITS, BLOCK_M], FLAT)
        scales.store(x_scale * w_scale)
        barrier()
        scales = reinterpret(scales, gl.float32, [UNITS, 1, BLOCK_M], FLAT)
    zeros = gl.zeros([128, BLOCK_M], gl.float32, MMA)
    total = zeros
    mbarrier.wait(ready.index(0), 0)
    begun = _multiply(weights, inputs, 0, zeros)
    for i in range(count):
        sums = warpgroup_mma_wait(0, deps=(begun,))
        # All threads are done with this unit's place: fetch a later unit into it.
        barrier()
        stage = i % STAGES
        wanted = i + STAGES < count
        n, k = _place(begin + i + STAGES, steps)
        mbarrier.expect(ready.index(stage), BYTES, pred=wanted)
        fetch(weight, [n, k], ready.index(stage), weights.index(stage), wanted)
        fetch(x, [0, k], ready.index(stage), inputs.index(stage), wanted)
        # The tensor cores multiply while the threads scale. What they multiply after the last unit
        # is of no use.
        stage = (i + 1) % STAGES
        mbarrier.wait(ready.index(stage), (i + 1) // STAGES & 1, pred=i + 1 < count)
        begun = _multiply(weights, inputs, stage, zeros)
        if UNITS:
            sums *= scales.index(i).load(MMA)
        total += sums
        unit = begin + i
        tile = unit // steps
        if (unit + 1 - tile * steps == steps) | (i == count - 1):
            _finish(
                *(total, x_scales, w_scales, bias, out, parts, arrivals),
                *(M, N, steps, span, tile, UNITS == 0, WARPS, SHARING),
            )
            total = zeros
    warpgroup_mma_wait(0, deps=(begun,))


@gluon.jit
def _finish(
    total,
    x_scales,
    w_scales,
    bias,
    out,
    parts,
    arrivals,
    M,
    N,
    steps,
    span,
    tile,
    SCALED: gl.constexpr,
    WARPS: gl.constexpr,
    SHARING: gl.constexpr,
):
    """Store a tile [128, BLOCK_M], or this program's part of it.

    SCALED: whether rows and outputs have scales that all columns share.
    """
    BLOCK_M: gl.constexpr = total.shape[1]
    MMA: gl.constexpr = total.type.layout
    SIZE: gl.constexpr = 128 * BLOCK_M
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA))
    col = gl.arange(0, 128, layout=gl.SliceLayout(1, MMA))
    first = tile * steps // span  # of the programs that share the tile
    others = (tile * steps + steps - 1) // span - first
    is_last = others == 0
    if SHARING > 1:
        if others > 0:
            # A program has at most two parts: first of a tile that it does not begin, then of one
            # that it begins.
            pid = gl.program_id(0)
            place = parts + gl.expand_dims(col * BLOCK_M, 1) + gl.expand_dims(row, 0)
            gl.store(place + (2 * pid + (pid == first).to(gl.int32)) * SIZE, total)
            # The program that arrives last sees what the others wrote before they arrived.
            barrier()  # wait until all threads have stored
            is_last = gl.atomic_add(arrivals + first, 1, sem="acq_rel") == others
            barrier()
            if is_last:
                gl.store(arrivals + first, 0)
                total = gl.load(place + (2 * first + 1) * SIZE)
                place += 2 * first * SIZE
                if BLOCK_M * SHARING <= 128:  # few enough to be loaded at once
                    for i in gl.static_range(1, SHARING):
                        is_there = (col >= 0) & (i <= others)
                        is_there = gl.expand_dims(is_there, 1)
                        total += gl.load(place + 2 * i * SIZE, mask=is_there, other=0.0)
                else:
                    for i in range(1, others + 1):
                        total += gl.load(place + 2 * i * SIZE)
    if is_last:
        inside = gl.minimum(tile * 128 + col, N - 1)
        if SCALED:
            w_scale = gl.load(w_scales + inside)
            x_scale = gl.load(x_scales + row, mask=row < M, other=0.0)
            total *= gl.expand_dims(w_scale, 1) * gl.expand_dims(x_scale, 0)
        if bias is not None:
            total += gl.expand_dims(gl.load(bias + inside).to(gl.float32), 1)
        # Let a thread store neighbours.
        STORE: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
        result = gl.convert_layout(total.to(out.dtype.element_ty), STORE)
        own = tile * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, STORE))
        target = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, STORE))
        gl.store(
            out + gl.expand_dims(target.to(gl.int64) * N, 0) + gl.expand_dims(own, 1),
            result,
            mask=gl.expand_dims(target < M, 0) & gl.expand_dims(own < N, 1),
        )
