"""Products of one row with weights in FP8, whose programs quantise the row themselves, on Hopper.

A kernel that quantised one row added 1.3 to 2.8 us to a decode step of 8B on an H200, in which a
product reads 6 to 12 MB. So each program of a product quantises what it multiplies by: of each
group of 128 inputs, four threads hold 32 each, and need not wait for others. A program may norm the
row before, and add its outputs to the residual stream: see unnormed.py. The inputs' codes are those
of fp8_inputs.py.

As in woven_row.py, a program computes 16 outputs, or 8 gates and their ups, its warps share the
runs of 128 columns, and a product of the tensor cores has the inputs of another run in each of its
columns. Codes become float16, which holds them without loss. A run's sum is scaled once.

The kernel is written in Gluon, the part of Triton in which a kernel says which thread holds what.

Shapes: K inputs, N outputs, T threads of a program, R = T / 4 runs that they hold.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.backends.cuda.triton.dispatch import cdiv, is_hopper, next_power_of_2, overlap
from nanovllm.backends.cuda.triton.fp8_inputs import LARGEST, SMALLEST, Fp8Matrix
from nanovllm.backends.cuda.triton.gluon_common import run
from nanovllm.backends.cuda.triton.unnormed import Stream, Unnormed
from nanovllm.backends.cuda.triton.woven_row import (
    Division,
    _split,
    elements_at,
    finish,
    halved,
    halves,
    keep,
    norm_factor,
    normed,
    own_rows,
    places,
    product,
    threads,
)

GROUP = 128  # columns of a run, which share a scale
# Runs whose weights a warp asks for ahead, 2 KB each. Measured for 8B on an H200: with 3 or 5,
# gates and ups took 3 and 5 % longer.
DEPTH = 4


def division(inputs: int) -> Division:
    """Divide K among the warps of a program.

    Measured on an H200: with 12,288 inputs, 8 warps took 3 % longer than 4.
    """
    runs = cdiv(inputs, GROUP)
    warps = 4 if runs > 64 else min(8, next_power_of_2(cdiv(runs, 8)))
    blocks = cdiv(runs, 8 * warps)
    return Division(warps, cdiv(runs, warps * blocks), blocks)


def suits(x: Any, matrix: Fp8Matrix) -> bool:
    """Tell whether there is a single row that is not quantised, and the kernel knows the sizes."""
    row = x.stream.total if isinstance(x, Unnormed) else x
    inputs = matrix.codes.shape[1]
    return (
        isinstance(row, Tensor)
        and row.shape[0] == 1
        and row.dtype in (torch.bfloat16, torch.float16)
        and row.is_contiguous()
        and is_hopper(matrix.codes.device)
        and matrix.activations == "group"
        and matrix.group == GROUP
        and inputs % GROUP == 0
        and inputs <= 16384
        and matrix.codes.is_contiguous()
        and matrix.scales.is_contiguous()
    )


def linear(
    x: Tensor | Unnormed,
    matrix: Fp8Matrix,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    gelu: bool = False,
    residual: Tensor | None = None,
) -> Any:
    """Compute x @ weight.T + bias, or with `gated` the activated product: x [1, K] -> [1, N].

    `suits` must hold. No running kernel may write to the weights.
    residual: [1, N], what the result is added to; then a Stream is returned.
    """
    norm = x if isinstance(x, Unnormed) else None
    row = x.stream.total if isinstance(x, Unnormed) else x
    outputs, inputs = matrix.codes.shape
    if gated:
        outputs //= 2
    out = torch.empty(1, outputs, dtype=row.dtype, device=row.device)
    programs = cdiv(outputs, 8 if gated else 16)
    squares = None
    if residual is not None:
        squares = torch.empty(programs, dtype=torch.float32, device=row.device)
    warps, runs, blocks = division(inputs)
    _fp8_row_kernel[(programs,)](
        *(row, norm.stream.squares if norm else None, norm.weight if norm else None),
        *(matrix.codes.view(torch.int32), matrix.scales, bias, residual, out, squares),
        *(outputs, norm.eps if norm else 0.0, inputs // GROUP, matrix.block_rows),
        *(len(norm.stream.squares) if norm else 0, warps, runs, blocks, min(DEPTH, runs * blocks)),
        *(norm is not None and norm.zero_centered, gated, gelu),
        num_warps=warps,
        **overlap(row),
    )
    return out if squares is None else Stream(out, squares)


def multiplication() -> str:
    """Write the assembly that multiplies 16 outputs' codes of a run by the inputs of all columns.

    Outputs 0 to 3 are sums: of the first 8 outputs for two columns, and of the others. Then come
    eight words of each, and 16 pairs of inputs.
    """
    lines = [".reg .b32 a<4>;", ".reg .b16 l, h;", ".reg .f32 s<4>, none;"]
    lines.append("mov.f32 none, 0f00000000;")
    sums = "{none, none, none, none}"
    for step in range(8):  # of 16 columns
        for side in range(2):  # the first 8 outputs, and the others
            lines.append(f"mov.b32 {{l, h}}, ${4 + 8 * side + step};")
            lines.append(f"cvt.rn.f16x2.e4m3x2 a{side}, l;")
            lines.append(f"cvt.rn.f16x2.e4m3x2 a{2 + side}, h;")
        lines.append(product("f16", "{a0, a1, a2, a3}", step, 20, sums))
        sums = "{s0, s1, s2, s3}"
    return "{" + "\n".join(lines) + "}"


PRODUCT = gl.constexpr(multiplication())
CONSTRAINTS = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 32))
# Takes two numbers, rounds them to FP8, and returns them as two float16 in a word.
ROUND = gl.constexpr("""{
    .reg .b16 codes;
    cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1;
    cvt.rn.f16x2.e4m3x2 $0, codes;
}""")


@gluon.constexpr_function
def inputs_layout(warps):
    """Return the layout of inputs [R, 128]: a thread has those of the columns of its words."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 64]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    of_warps = [[8 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [8 * warps, 128])


@gluon.jit
def _fetch(codes_0, codes_1, r: gl.constexpr, last, EXISTS: gl.constexpr):
    """Ask for a thread's words [T, 4] of its run r: two of the first 8 outputs, two of the others.

    last: the place of the weight's last run, where the thread's first one is 0. EXISTS: whether r
    is known to be no later.
    """
    at = r * 32
    if EXISTS:
        return (
            gl.load(codes_0 + at),
            gl.load(codes_0 + (at + 16)),
            gl.load(codes_1 + at),
            gl.load(codes_1 + (at + 16)),
        )
    else:
        exists = gl.expand_dims(r <= last, 1)
        return (
            gl.load(codes_0 + at, mask=exists, other=0),
            gl.load(codes_0 + (at + 16), mask=exists, other=0),
            gl.load(codes_1 + at, mask=exists, other=0),
            gl.load(codes_1 + (at + 16), mask=exists, other=0),
        )


@gluon.jit
def _quantised(value, THREADS: gl.constexpr):
    """Quantise inputs [R, 128], whose rows are groups.

    Returns 16 pairs of float16 of each thread, [T], and the scale of its run [T].
    """
    R: gl.constexpr = value.shape[0]
    LAYOUT: gl.constexpr = gl.SliceLayout(1, value.type.layout)
    largest = gl.maximum(gl.max(gl.abs(value), axis=1), SMALLEST)
    # Divide as fp8_inputs.py does, so that no code differs.
    scale = gl.div_rn(largest, gl.full([R], LARGEST, gl.float32, LAYOUT))
    reciprocal = gl.div_rn(gl.full([R], 1.0, gl.float32, LAYOUT), scale)
    reciprocals, value = gl.broadcast(gl.expand_dims(reciprocal, 1), value)
    scales, value = gl.broadcast(gl.expand_dims(scale, 1), value)
    guess = value * reciprocals
    quotients = gl.fma(gl.fma(-guess, scales, value), reciprocals, guess)
    first, second = gl.split(quotients.reshape([R, 64, 2]))
    pairs = gl.inline_asm_elementwise(
        ROUND, "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )
    # [run, half, lane, pair], of which a thread has 16
    pairs = pairs.reshape([R, 2, 4, 2, 2, 2]).permute([0, 2, 5, 4, 3, 1])
    inputs = halved(pairs, 4, THREADS)
    FOURS: gl.constexpr = four_lanes(R)
    scale = gl.convert_layout(scale, gl.SliceLayout(1, FOURS), assert_trivial=True)
    four, scale = gl.broadcast(gl.zeros([R, 4], gl.float32, FOURS), gl.expand_dims(scale, 1))
    return inputs, gl.convert_layout(scale.reshape([R * 4]), THREADS, assert_trivial=True)


@gluon.constexpr_function
def four_lanes(runs):
    """Return the layout [R, 4] in which each thread has a number."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [], lanes, [[8 << i, 0] for i in range(runs.bit_length() - 4)], [], [runs, 4]
    )


@gluon.jit
def _of_lane(x, lane):
    """Return what another lane of the warp has."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
        "=f,f,r",
        [x, lane],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fp8_row_kernel(
    x,
    squares,
    norm_weight,
    codes,
    w_scales,
    bias,
    residual,
    out,
    out_squares,
    N,
    eps,
    ALL_RUNS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    PARTS: gl.constexpr,  # of the squares
    WARPS: gl.constexpr,
    RUNS: gl.constexpr,
    BLOCKS: gl.constexpr,
    DEPTH: gl.constexpr,
    ZERO_CENTERED: gl.constexpr,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    PDL: gl.constexpr,
):
    W: gl.constexpr = ALL_RUNS * 32
    EVEN: gl.constexpr = WARPS * RUNS * BLOCKS == ALL_RUNS
    # A thread holds twice four words of a run of an output. Eight outputs and four threads make a
    # warp.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    THREADS: gl.constexpr = gl.SliceLayout(1, WORDS)
    INPUTS: gl.constexpr = inputs_layout(WARPS)
    warp, row, lane = threads(THREADS, WARPS)
    n, second_n, rows = halves(N, GATED)
    row_0, row_1, codes_0, codes_1 = own_rows(
        *(codes, warp, row, lane, n, second_n, rows, W, RUNS * 32, WORDS)
    )
    last = ALL_RUNS - 1 - warp * RUNS
    words = gl.tuple(())
    for i in gl.static_range(DEPTH):
        words += _fetch(codes_0, codes_1, i // RUNS * WARPS * RUNS + i % RUNS, last, EVEN)
    # Rows of a block share scales: read those of its first row, which the cache has already. A
    # thread keeps the sums of two runs, the columns that tensor cores leave to it.
    scales_0 = w_scales + row_0 // BLOCK_ROWS * (BLOCK_ROWS * ALL_RUNS)
    scales_1 = w_scales + row_1 // BLOCK_ROWS * (BLOCK_ROWS * ALL_RUNS)
    kept = gl.tuple(())
    for b in gl.static_range(BLOCKS):
        even = gl.minimum((b * WARPS + warp) * RUNS + 2 * lane, ALL_RUNS - 1)
        odd = gl.minimum((b * WARPS + warp) * RUNS + 2 * lane + 1, ALL_RUNS - 1)
        kept += (
            (
                gl.load(scales_0 + even),
                gl.load(scales_0 + odd),
                gl.load(scales_1 + even),
                gl.load(scales_1 + odd),
            ),
        )
    if PDL:
        run("griddepcontrol.launch_dependents;")
        run("griddepcontrol.wait;")
    zero = gl.zeros([32 * WARPS], gl.float32, THREADS)
    total_0, total_1 = zero, zero
    at, second_at = places(zero, n, second_n, WARPS)
    stream = elements_at(residual, at, second_at, N)
    if squares is not None:
        factor = norm_factor(squares, PARTS, ALL_RUNS * 128, eps, WARPS)
    place = gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(1, INPUTS))
    own_run = place // 8 * RUNS + gl.minimum(place % 8, RUNS - 1)
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, INPUTS)), 0)
    for b in gl.static_range(BLOCKS):
        held = gl.minimum(own_run + b * WARPS * RUNS, ALL_RUNS - 1)
        inside = gl.expand_dims(held * 128, 1) + column
        value = gl.load(x + inside)
        if squares is not None:
            value = normed(value, factor, gl.load(norm_weight + inside), ZERO_CENTERED)
        inputs, scale = _quantised(value.to(gl.float32), THREADS)
        even_scale, odd_scale = _of_lane(scale, 8 * lane), _of_lane(scale, 8 * lane + 4)
        sums = (zero, zero, zero, zero)
        for r in gl.static_range(RUNS):
            own_words = gl.tuple(())
            for j in gl.static_range(4):
                own_words += _split(words[j], THREADS)
            following = gl.tuple(())
            for j in gl.static_range(4, len(words)):
                following += (words[j],)
            if b * RUNS + r + DEPTH < BLOCKS * RUNS:
                following += _fetch(
                    *(codes_0, codes_1),
                    (b * RUNS + r + DEPTH) // RUNS * WARPS * RUNS + (r + DEPTH) % RUNS,
                    *(last, EVEN),
                )
            words = following
            s0, s1, s2, s3 = gl.inline_asm_elementwise(
                PRODUCT,
                CONSTRAINTS,
                own_words + inputs,
                dtype=[gl.float32] * 4,
                is_pure=True,
                pack=1,
            )
            sums = keep(sums, (s0, s1, s2, s3), lane, r)
        total_0 += sums[0] * (kept[b][0] * even_scale) + sums[1] * (kept[b][1] * odd_scale)
        total_1 += sums[2] * (kept[b][2] * even_scale) + sums[3] * (kept[b][3] * odd_scale)
    finish(
        *(total_0, total_1, at, second_at, stream, bias, out, out_squares),
        *(N, rows, WARPS, GATED, GELU),
    )
