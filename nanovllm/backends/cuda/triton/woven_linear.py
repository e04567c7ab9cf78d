"""Products of 4-bit weights on Hopper's tensor cores, which take weights from registers.

A thread that holds a part of a weight's tile for the tensor cores needs columns 2c, 2c + 1, 2c + 8
and 2c + 9 of every 16, where c is its place among four threads. In the order of checkpoints, these
codes are in words of which the thread needs nothing else. So the codes of 128 columns, 16 words,
are woven once, when the weights are loaded: see `weave`. Then four neighbouring words are all that
a thread needs, and a shift and a mask yield two numbers that belong into one register.

Codes and inputs of several steps, of one run or two, are on their way to shared memory at a time.
While the tensor cores multiply by 64 columns of weights, the threads dequantise the next ones. To
wait for a product before beginning the next one would not do: ptxas (CUDA 12.8) moves what is
computed before such a wait behind it. So a product is begun before the last one is waited for.

The kernel is written in Gluon, the part of Triton in which a kernel says which thread holds what.

Shapes: M rows, K inputs, N outputs, W words in a row, G groups in a row.
"""

from functools import cache
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
    arrivals,
    ask_for,
    cdiv,
    next_power_of_2,
    num_processors,
    overlap,
)
from nanovllm.backends.cuda.triton.gluon_common import (
    barrier,
    fetch,
    from_threads,
    in_threads,
    part_places,
    run,
)

RUN = 16  # words whose codes are woven
COLUMNS = 128  # those of a run


class Tiling(NamedTuple):
    """The tiling of a product."""

    block_m: int  # rows of a tile
    more: int  # rows that a tile has beyond these; 0: none
    warps: int  # a tile has 16 outputs a warp
    splits: int  # programs that share a tile, but for the first `whole` tiles
    stages: int  # steps that are in shared memory or on their way
    registers: int | None = None  # at most, of a thread
    runs: int = 1  # that a step takes
    whole: int = 0  # tiles that one program computes alone


def places() -> list[int]:
    """Return the column of each code of a woven run, from the lowest bits of its first word on.

    A word holds codes of four columns that lie 8 apart, in its lower half, and of the columns
    right of these, in its upper half.
    """
    columns = []
    for word in range(RUN):
        lane, block = word // 4, word % 4  # of 32 columns
        for code in range(8):
            columns.append(32 * block + 8 * (code % 4) + 2 * lane + code // 4)
    return columns


def weave(codes: Tensor) -> None:
    """Reorder the codes of each run of words in place, as the kernel reads them: [N, W]."""
    order = torch.tensor(places(), device=codes.device)
    shifts = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int32)
    for part in codes.split(max(1, (1 << 20) // codes.shape[1])):
        numbers = (part.unsqueeze(-1) >> shifts & 15).view(len(part), -1, COLUMNS)[:, :, order]
        # No two numbers share a bit, so their sum has the bits of all.
        part.copy_((numbers.view(*part.shape, 8) << shifts).sum(-1, dtype=torch.int32))


def tiling(x: Tensor, outputs: int, *, gated: bool = False) -> Tiling:
    """Choose how to cut a product into programs that fill the device: x [M, K].

    outputs: N; with `gated`, the weight has 2 N rows.

    A weight is dequantised once for each tile of rows, and a box of inputs that reaches beyond the
    last row takes up to 2.3 times as long to fetch as a whole one. So a tile may have 32 or 64 rows
    beyond 64 or 128. With 193 to 255 rows some boxes are not whole; tiles of eight warps, which are
    half as many, fetch fewer of them.

    Of programs with four warps, two to four run on a multiprocessor at a time: while one waits,
    others compute. Programs take a tile each as long as they fill the device, and share those that
    are left.

    Measured on an H200 (torch 2.11, Triton 3.6) with the shapes of Qwen3-8B and 8 to 256 rows.

    Of up to 32 rows, a step takes two runs: 148 of the 268 instructions of a step of one run
    dequantise nothing. Gates and ups of 16 rows take 23.5 us by two runs a step, 27.8 us by one.
    """
    rows, inputs = x.shape
    runs = inputs // COLUMNS
    more, warps = 0, 4
    if rows <= 64:
        block_m = max(8, next_power_of_2(rows))
    elif rows <= 192:
        block_m = 64 if rows <= 96 else 128
        more = cdiv(max(0, rows - block_m), 32) * 32
    else:
        block_m, warps = 128, 8 if rows % 128 else 4
    resident = 1 if warps == 8 else 4 if block_m <= 16 else 2 if block_m + more > 128 else 3
    slots = resident * num_processors(x.device)
    columns = cdiv(2 * outputs if gated else outputs, 16 * warps)
    tiles = cdiv(rows, block_m + more) * columns
    left = tiles % slots
    splits = max(1, min(slots // left, runs // 3)) if left else 1
    whole = tiles - left
    if block_m <= 32 and runs % 2 == 0:
        stages = {8: 4, 16: 3, 32: 3}[block_m]
        return Tiling(block_m, more, warps, splits, stages, None, runs=2, whole=whole)
    stages = 5 if warps == 8 else 2 if more else {8: 8, 16: 6, 32: 5, 64: 3, 128: 2}[block_m]
    registers = 168 if resident == 3 else None
    return Tiling(block_m, more, warps, splits, stages, registers, whole=whole)


def linear(
    x: Tensor,
    codes: Tensor,
    factors: Tensor,
    bias: Tensor | None,
    tiling: Tiling,
    *,
    group: int,
    gated: bool = False,
    gelu: bool = False,
) -> Tensor:
    """Compute x @ weight.T + bias, or with `gated` the activated product: x [M, K] -> [M, N].

    No running kernel may write to the weights.

    codes: int32 [N, W], woven; with `gated` [2 N, W], first all gates, then all ups.
    factors: int32 [G, N] or [G, 2 N], as in PackedTensors.
    group: columns that share a factor, a multiple of 128.
    """
    (rows, inputs), outputs = x.shape, codes.shape[0]
    if gated:
        outputs //= 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    block_m, more, warps, splits, stages, registers, runs, whole = tiling
    half, columns = 8 * warps, runs * COLUMNS
    steps = inputs // columns
    span = cdiv(steps, splits)
    splits = cdiv(steps, span)
    row_tiles = cdiv(rows, block_m + more)
    tiles = row_tiles * cdiv(codes.shape[0], 2 * half)
    whole = min(whole, tiles)
    if splits == 1 or whole == tiles:
        span, splits, whole = steps, 1, tiles
    parts = counters = None
    if shared := tiles - whole:
        size = shared * splits * 2 * half * (block_m + more)
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = arrivals(x.device)
        assert shared <= len(counters)
    in_shared_memory = gl.NVMMASharedLayout(128, 16, 2)
    words = codes.shape[1]
    tensors = (
        TensorDescriptor.from_tensor(x, [block_m, columns], in_shared_memory),
        TensorDescriptor.from_tensor(x, [more, columns], in_shared_memory) if more else None,
        TensorDescriptor.from_tensor(
            codes.view(2, -1, words), [2, half, runs * RUN], gl.NVMMASharedLayout(64 * runs, 32, 3)
        ),
        *(factors, bias, out, parts, counters),
        *(rows, outputs, steps, span, splits, row_tiles, whole, group // COLUMNS),
    )
    _woven_linear_kernel[(whole + shared * splits,)](
        *(*tensors, runs, block_m, more, warps, shared > 0, stages, gated, gelu),
        num_warps=warps,
        maxnreg=registers,
        **overlap(x),
    )
    return out


@cache
def unpacking(is_bfloat16: bool) -> str:
    """Write the assembly that dequantises two words of a row, whose codes become 8 pairs.

    Outputs 0 to 7 are the pairs; 8 and 9 are the words; 10 and 11 are pairs of what to subtract
    from a code, and of scales. A code in the lowest bits of a number that is 128 in bfloat16, or
    1024 in float16, adds itself.
    """
    kind, magic, one = (
        ("bf16x2", "43004300", "3f803f80") if is_bfloat16 else ("f16x2", "64006400", "3c003c00")
    )
    lines = [".reg .b32 t, none, one;", "mov.b32 none, 0x80008000;", f"mov.b32 one, 0x{one};"]
    for j in range(8):
        source = "$8" if j < 4 else "$9"
        if j % 4:
            lines.append(f"shr.u32 t, {source}, {4 * (j % 4)};")
            source = "t"
        lines.append(f"lop3.b32 t, {source}, 0x000f000f, 0x{magic}, 0xea;")
        lines.append(f"fma.rn.{kind} t, t, one, $10;")
        lines.append(f"fma.rn.{kind} ${j}, t, $11, none;")
    return "{" + "\n".join(lines) + "}"


BFLOAT16_ASM = gl.constexpr(unpacking(True))
FLOAT16_ASM = gl.constexpr(unpacking(False))


@gluon.jit
def _numbers(words, factor, dtype: gl.constexpr):
    """Dequantise words [H, W] by factors [H] -> [H, W, 2, 2, 2].

    The last three are the bits of a code's place in a pair of words, the highest first. As the
    words are woven, a pair of numbers comes from one word.
    """
    factor = gl.convert_layout(factor, gl.SliceLayout(1, words.type.layout), assert_trivial=True)
    factor = gl.expand_dims(factor, 1)
    scale = (factor >> 16).to(gl.int16).to(dtype, bitcast=True)
    # The negative of the number that a code of zero becomes.
    zero = factor & 255 | (0xC300 if dtype == gl.bfloat16 else 0xE400)
    words, zero = gl.broadcast(words, zero.to(gl.int16).to(dtype, bitcast=True))
    words, scale = gl.broadcast(words, scale)
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        BFLOAT16_ASM if dtype == gl.bfloat16 else FLOAT16_ASM,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, zero, scale],
        dtype=[scale.dtype] * 8,
        is_pure=True,
        pack=2,
    )
    even = gl.join(gl.join(a, e), gl.join(c, g))
    odd = gl.join(gl.join(b, f), gl.join(d, h))
    return gl.join(even, odd)


@gluon.jit
def _halves(words):
    """Split words [H, 16] into those of a run's first 64 columns and the others: twice [H, 8]."""
    H: gl.constexpr = words.shape[0]
    first, second = gl.split(words.reshape([H, 4, 2, 2]).permute([0, 1, 3, 2]))
    return gl.tuple((first.reshape([H, 8]), second.reshape([H, 8])))


@gluon.jit
def _quarters(words):
    """Split words [H, 16 RUNS] into those of 64 columns each: 2 RUNS times [H, 8]."""
    H: gl.constexpr = words.shape[0]
    if words.shape[1] == 16:
        return _halves(words)
    else:
        even, odd = gl.split(words.reshape([H, 2, 16]).permute([0, 2, 1]))
        return _halves(even) + _halves(odd)


@gluon.jit
def _load_factors(factors_0, factors_1, run, last, rows, SHARING: gl.constexpr, RUNS: gl.constexpr):
    """Load the factors of both halves of a tile in RUNS runs from `run` on: 2 RUNS times [H]."""
    loaded = gl.tuple(())
    for r in gl.static_range(RUNS):
        at = gl.minimum(run + r, last) // SHARING * rows
        loaded += (gl.load(factors_0 + at), gl.load(factors_1 + at))
    return loaded


@gluon.jit
def _weights(words, more, factor, more_factor, dtype: gl.constexpr, A: gl.constexpr):
    """Dequantise 64 columns of both halves of a tile: words [H, 8] -> [2 H, 64].

    In a warp's 16 rows, the first half's 8 come before those of the second half.
    """
    WARPS: gl.constexpr = words.shape[0] // 8
    numbers = gl.join(_numbers(words, factor, dtype), _numbers(more, more_factor, dtype))
    # [warp, row, lane, second of a pair, block, code // 2, code % 2, half]
    numbers = numbers.reshape([WARPS, 8, 4, 2, 2, 2, 2, 2])
    numbers = numbers.permute([0, 7, 1, 4, 5, 6, 2, 3]).reshape([16 * WARPS, 64])
    return gl.convert_layout(numbers, A, assert_trivial=True)


@gluon.jit
def _prefetch_factors(factors, n, apart, group, last, WARPS: gl.constexpr):
    """Ask for the factors of both halves of a tile in the next groups, without waiting for them.

    They are lines of 128 bytes, or 256, far apart. A step that waited for the memory to deliver
    them would take longer than all else that it does.
    """
    THREADS: gl.constexpr = 32 * WARPS
    i = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    group = gl.minimum(group + i // 2, last)
    line = factors + (2 * group + i % 2) * apart + gl.minimum(n, apart - 1)
    ask_for(line)


@gluon.jit
def _gelu(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1 + gl.exp(-2 * inner))


@gluon.jit
def gated_product(gate, up, GELU: gl.constexpr, dtype: gl.constexpr):
    """Activate gates, and multiply them by ups."""
    # Round where separate kernels for the product and the activation would round.
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    gate = _gelu(gate) if GELU else gate / (1 + gl.exp(-gate))
    return gate.to(dtype).to(gl.float32) * up


@gluon.jit
def _multiply(weights, inputs, FIRST: gl.constexpr, sums):
    """Begin to add weights [2 H, 64] times columns of the inputs, from FIRST on, to sums."""
    # For another part of the rows, the same registers are of another type.
    A: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 2)
    weights = gl.convert_layout(weights, A, assert_trivial=True)
    columns = inputs.slice(FIRST, 64, 1).permute((1, 0))
    return warpgroup_mma(weights, columns, sums, is_async=True)


@gluon.jit
def _add(new, weights, inputs, stage, FIRST: gl.constexpr, sums):
    """Begin to multiply by `new` weights, then wait until `weights` are no longer read.

    Adds weights [2 H, 64] times columns of a stage's inputs, from FIRST on. Inputs and sums have a
    part of BLOCK_M rows, and may have another one.
    """
    first = _multiply(new, inputs[0].index(stage), FIRST, sums[0])
    if len(sums) == 1:
        return _wait(1, weights, (first,))
    else:
        second = _multiply(new, inputs[1].index(stage), FIRST, sums[1])
        return _wait(2, weights, (first, second))


@gluon.jit
def _wait(PENDING: gl.constexpr, weights, sums):
    """Wait until only so many products are pending. Others, which read the weights, are done."""
    if len(sums) == 1:
        first, weights = warpgroup_mma_wait(PENDING, deps=(sums[0], weights))
        return (first,)
    else:
        first, second, weights = warpgroup_mma_wait(PENDING, deps=(sums[0], sums[1], weights))
        return (first, second)


@gluon.jit
def _load_words(codes, WORDS: gl.constexpr):
    """Load the words of both halves of a tile, [2, H, 16 RUNS]: twice 2 RUNS times [H, 8]."""
    H: gl.constexpr = codes.shape[1]
    codes = codes.reshape([2 * H, codes.shape[2]])
    first, second = codes.slice(0, H, 0).load(WORDS), codes.slice(H, H, 0).load(WORDS)
    return _quarters(first), _quarters(second)


@gluon.jit(do_not_specialize=["M", "all_steps", "span", "splits", "row_tiles", "whole"])
def _woven_linear_kernel(
    x,
    more_x,
    codes,
    factors,
    bias,
    out,
    parts,
    arrivals,
    M,
    N,
    all_steps,
    span,
    splits,
    row_tiles,
    whole,
    SHARING: gl.constexpr,  # runs that share a factor
    RUNS: gl.constexpr,  # of a step
    BLOCK_M: gl.constexpr,
    MORE: gl.constexpr,
    WARPS: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    PDL: gl.constexpr,
):
    ROWS: gl.constexpr = BLOCK_M + MORE
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    H: gl.constexpr = 8 * WARPS
    QUARTERS: gl.constexpr = 2 * RUNS  # of 64 columns, of a step
    # A thread holds four words of a run of a row. Eight rows and four threads a row make a warp.
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]] if RUNS == 1 else [[0, 1], [0, 2], [0, 16]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0], [32, 0]] if WARPS == 8 else [[8, 0], [16, 0]],
        [],
        [H, 16 * RUNS],
    )
    dtype: gl.constexpr = out.dtype.element_ty
    fetched_codes = gl.allocate_shared_memory(gl.int32, [STAGES, 2, H, 16 * RUNS], codes.layout)
    inputs = gl.tuple(
        (gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, 128 * RUNS], x.layout),)
    )
    sums = gl.tuple((gl.zeros([2 * H, BLOCK_M], gl.float32, MMA),))
    if MORE:
        MORE_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, MORE, 16])
        inputs += (gl.allocate_shared_memory(x.dtype, [STAGES, MORE, 128 * RUNS], x.layout),)
        sums += (gl.zeros([2 * H, MORE], gl.float32, MORE_MMA),)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    BYTES: gl.constexpr = RUNS * (2 * H * 64 + ROWS * 256)
    tile = gl.program_id(0)
    split = 0
    if SPLIT:
        # Programs that share a tile are neighbours.
        after = gl.maximum(tile - whole, 0)
        tile = gl.minimum(tile, whole) + after // splits
        split = after % splits
    m = tile % row_tiles * ROWS
    # The halves of a tile are gates and ups, or `apart` outputs from each other.
    n = tile // row_tiles * H
    apart = N if GATED else N // 2
    begin = split * span
    steps = gl.minimum(span, all_steps - begin)
    if SPLIT:
        if tile < whole:
            steps = all_steps
    first = gl.minimum(steps, STAGES)
    for k in range(first):
        mbarrier.expect(ready.index(k), BYTES)
        at = (begin + k) * 16 * RUNS
        fetch(codes, [0, n, at], ready.index(k), fetched_codes.index(k))
    # What lies outside is computed from what lies inside, and not stored.
    row = gl.minimum(n + gl.arange(0, H, layout=gl.SliceLayout(1, WORDS)), apart - 1)
    factors_0, factors_1 = factors + row, factors + apart + row
    rows = 2 * apart
    begin_run, last = begin * RUNS, all_steps * RUNS - 1
    _prefetch_factors(factors, n, apart, begin_run // SHARING, last // SHARING, WARPS)
    now = _load_factors(factors_0, factors_1, begin_run, last, rows, SHARING, RUNS)
    # Those of the next step are asked for a step ahead.
    following = _load_factors(factors_0, factors_1, begin_run + RUNS, last, rows, SHARING, RUNS)
    if PDL:
        run("griddepcontrol.launch_dependents;")
        run("griddepcontrol.wait;")
    for k in range(first):
        at = (begin + k) * 128 * RUNS
        fetch(x, [m, at], ready.index(k), inputs[0].index(k))
        if MORE:
            fetch(more_x, [m + BLOCK_M, at], ready.index(k), inputs[1].index(k))
    mbarrier.wait(ready.index(0), 0)
    words, more = _load_words(fetched_codes.index(0), WORDS)
    weights = _weights(words[0], more[0], now[0], now[1], dtype, A)
    sums = _add(weights, weights, inputs, 0, 0, sums)
    for q in gl.static_range(1, QUARTERS - 1):
        new = _weights(words[q], more[q], now[q // 2 * 2], now[q // 2 * 2 + 1], dtype, A)
        sums = _add(new, weights, inputs, 0, 64 * q, sums)
        weights = new
    # The last 64 columns of a step are multiplied while the next step's codes are awaited.
    LAST: gl.constexpr = QUARTERS - 1
    last_words, last_more = words[LAST], more[LAST]
    last_0, last_1 = now[LAST - 1], now[LAST]
    for k in range(1, steps):
        new = _weights(last_words, last_more, last_0, last_1, dtype, A)
        now = following
        ahead = begin_run + (k + 1) * RUNS
        following = _load_factors(factors_0, factors_1, ahead, last, rows, SHARING, RUNS)
        sums = _add(new, weights, inputs, (k - 1) % STAGES, 64 * LAST, sums)
        weights = new
        stage = k % STAGES
        mbarrier.wait(ready.index(stage), k // STAGES & 1)
        words, more = _load_words(fetched_codes.index(stage), WORDS)
        new = _weights(words[0], more[0], now[0], now[1], dtype, A)
        sums = _add(new, weights, inputs, stage, 0, sums)
        weights = new
        # All threads are done with step k - 1, so its place is free.
        barrier()
        later = k - 1 + STAGES
        wanted = later < steps
        place = later % STAGES
        at = (begin + later) * RUNS
        mbarrier.expect(ready.index(place), BYTES, pred=wanted)
        fetch(codes, [0, n, at * 16], ready.index(place), fetched_codes.index(place), wanted)
        fetch(x, [m, at * 128], ready.index(place), inputs[0].index(place), wanted)
        if MORE:
            fetch(
                *(more_x, [m + BLOCK_M, at * 128]),
                *(ready.index(place), inputs[1].index(place), wanted),
            )
        for q in gl.static_range(1, QUARTERS - 1):
            new = _weights(words[q], more[q], now[q // 2 * 2], now[q // 2 * 2 + 1], dtype, A)
            sums = _add(new, weights, inputs, stage, 64 * q, sums)
            weights = new
        last_words, last_more = words[LAST], more[LAST]
        last_0, last_1 = now[LAST - 1], now[LAST]
    new = _weights(last_words, last_more, last_0, last_1, dtype, A)
    sums = _add(new, weights, inputs, (steps - 1) % STAGES, 64 * LAST, sums)
    sums = _wait(0, new, sums)
    if SPLIT:
        if tile >= whole:
            parts += (tile - whole) * splits * ROWS * 2 * H
            arrivals += tile - whole
            _share(
                *(sums, bias, out, parts, arrivals, M, N, m, n, apart, split, splits),
                *(GATED, GELU),
            )
        else:
            _store_all(sums, bias, out, M, N, m, n, apart, GATED, GELU)
    else:
        _store_all(sums, bias, out, M, N, m, n, apart, GATED, GELU)


@gluon.jit
def _share(
    sums,
    bias,
    out,
    parts,
    arrivals,
    M,
    N,
    m,
    n,
    apart,
    split,
    splits,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
):
    """Store this program's part of a tile's sums, then add up all parts of some blocks of rows.

    The programs of a tile take turns at its blocks, as soon as all parts are stored. The only block
    of a small tile is left to the program that arrives last, and no other one waits.

    A program that waits keeps a place on a multiprocessor. Programs start in the order of their
    numbers, and those of a tile have neighbouring numbers: so at most one tile's programs wait for
    some that have not started, and these start when other tiles' programs end.
    """
    WIDTH: gl.constexpr = sums[0].shape[0]
    LEAST: gl.constexpr = sums[len(sums) - 1].shape[1]
    BLOCK: gl.constexpr = LEAST if LEAST < 32 else 32
    blocks = 0
    for i in gl.static_range(len(sums)):
        blocks = _store_part(sums[i], parts, blocks, split, splits, BLOCK)
    barrier()  # wait until all threads have stored
    # What the programs of a tile add amounts to 0, but not before all have added.
    own = gl.where(split == 0, 1 - splits, 1)
    missing = gl.atomic_add(arrivals, own, sem="acq_rel") + own
    if len(sums) > 1 or sums[0].shape[1] > BLOCK:
        while missing != 0:
            missing = gl.atomic_add(arrivals, 0, sem="acquire")
        turn = split
    else:
        turn = gl.where(missing == 0, 0, blocks)
    barrier()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WIDTH // 16, 1], [16, BLOCK, 16])
    zeros = in_threads(gl.zeros([WIDTH, BLOCK], gl.float32, MMA))
    place = part_places(zeros, 0, 1, BLOCK)
    for block in range(turn, blocks, splits):
        total = zeros
        for part in range(splits):
            total += gl.load(parts + (block * splits + part) * WIDTH * BLOCK + place)
        sums_of_block = from_threads(total)
        _store(sums_of_block, bias, out, M, N, m + block * BLOCK, n, apart, GATED, GELU)


@gluon.jit
def _store_part(sums, parts, block, split, splits, BLOCK: gl.constexpr):
    """Store a program's part of the sums, from a block on. Returns the block after them."""
    WIDTH: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    sums = in_threads(sums)
    gl.store(parts + block * splits * WIDTH * BLOCK + part_places(sums, split, splits, BLOCK), sums)
    return block + ROWS // BLOCK


@gluon.jit
def _store_all(sums, bias, out, M, N, m, n, apart, GATED: gl.constexpr, GELU: gl.constexpr):
    """Store a tile, which has sums of BLOCK_M rows and may have some of further rows."""
    _store(sums[0], bias, out, M, N, m, n, apart, GATED, GELU)
    if len(sums) == 2:
        _store(sums[1], bias, out, M, N, m + sums[0].shape[1], n, apart, GATED, GELU)


@gluon.jit
def _store(acc, bias, out, M, N, m, n, apart, GATED: gl.constexpr, GELU: gl.constexpr):
    """Store a tile [2 H, BLOCK_M], whose rows have the order of `_weights`."""
    BLOCK_M: gl.constexpr = acc.shape[1]
    H: gl.constexpr = acc.shape[0] // 2
    WARPS: gl.constexpr = H // 8
    dtype: gl.constexpr = out.dtype.element_ty
    if bias is not None:
        r = gl.arange(0, 2 * H, layout=gl.SliceLayout(1, acc.type.layout))
        row = gl.minimum(n + r // 16 * 8 + r % 8, apart - 1) + r // 8 % 2 * apart
        acc += gl.expand_dims(gl.load(bias + row).to(gl.float32), 1)
    halves = acc.reshape([WARPS, 2, 8, BLOCK_M])
    if GATED:
        gate, up = gl.split(halves.permute([0, 2, 3, 1]))
        result = gated_product(gate, up, GELU, dtype).reshape([H, BLOCK_M])
    else:
        result = halves.permute([1, 0, 2, 3]).reshape([2 * H, BLOCK_M])
    # Let a thread store neighbours.
    WIDTH: gl.constexpr = H if GATED else 2 * H
    LANES: gl.constexpr = WIDTH // 8
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    result = gl.convert_layout(result.to(dtype), STORE)
    own = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, STORE))
    column = n + own % H
    target = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, STORE))
    place = gl.expand_dims(target.to(gl.int64) * N, 0)
    gl.store(
        out + place + gl.expand_dims(column + own // H * apart, 1),
        result,
        mask=gl.expand_dims(target < M, 0) & gl.expand_dims(column < apart, 1),
    )
