"""The experts of a single token in MXFP4, by two kernels that read weights as fast as Hopper's
memory delivers them.

The first kernel computes the gated products of the experts. The second one multiplies them by
`down`, and adds up the experts' results.

Weights are woven: see woven_experts.py. A record is 16 rows and 64 columns of weights, as the
registers of a warp take them for four instructions of the tensor cores. Those multiply by eight
columns of inputs: all eight are the token. The warps of a program share the records of a block of
16 rows. A warp asks for all its records of an expert at once, and waits for no other warp. At the
end the warps' sums are added up.

The kernels are written in Gluon, the part of Triton in which a kernel says which thread holds what.

Shapes: K experts of the token, E experts, N width of the token, F width of an expert, T threads of
a program.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.backends.cuda.triton.dispatch import next_power_of_2, overlap
from nanovllm.backends.cuda.triton.gluon_common import run
from nanovllm.backends.cuda.triton.moe_packed import WOVEN, woven_place
from nanovllm.backends.cuda.triton.woven_experts import (
    BLOCK_ROWS,
    DECODING_REGISTERS,
    UNIT,
    WovenExperts,
    decoding_of,
    gated,
)

# Of the numbers of warps tried on an H200 for gpt-oss-20b, 2 to 16, these were the fastest. Nor was
# it faster to load the records of two blocks, or of two experts, before the first is multiplied.
GATE_UP_WARPS, DOWN_WARPS = 4, 8
MOST_COLUMNS = 4096  # so that a warp's records fit its registers


def suits(gate_up: WovenExperts, down: WovenExperts) -> bool:
    """Tell whether the kernels take weights of these sizes."""
    return max(gate_up.shape[1], down.shape[1]) <= MOST_COLUMNS


def rows_for(x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """Make room for a token [1, N] in the order in which the first kernel takes it.

    Returns the row, and the arguments of `prepare_row`, which fills it, but for the row's number.
    """
    ordered, width = torch.empty_like(x), x.shape[1]
    block = next_power_of_2(width)
    return ordered, (x, ordered, None, width, WOVEN.value, width, 1, 1, block)


def gated_products(
    x: Tensor,
    gate_up: WovenExperts,
    bias: Tensor | None,
    runs: Tensor,
    hidden: Tensor,
    *,
    clamped: Any,
) -> None:
    """Compute the gated products of a token's experts, into `hidden` [K, F], for `sum_products`.

    x: what `rows_for` makes of the token.
    bias: [E, 2 F].
    runs: what sort_by_expert returns.
    """
    outputs, inputs = gate_up.shape
    alpha, limit = (clamped.alpha, clamped.limit) if clamped else (None, None)
    _woven_gate_up_kernel[(len(hidden) * outputs // BLOCK_ROWS,)](
        *(x, gate_up.codes, gate_up.scales, bias, runs, hidden, alpha, limit),
        *(outputs, inputs, GATE_UP_WARPS),
        num_warps=GATE_UP_WARPS,
        **overlap(x),
    )


def sum_products(
    hidden: Tensor,
    down: WovenExperts,
    bias: Tensor | None,
    runs: Tensor,
    weights: Tensor,
    added: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> None:
    """Compute the weighted sum of hidden @ down.T of a token's experts, into `out` [1, N].

    The kernel launched before must be that of `gated_products`.

    bias: [E, N].
    runs, weights: what sort_by_expert returns.
    added: gates [1, 1] and a result [1, N]; sigmoid(gates) * result is added to the sum.
    """
    outputs, inputs = down.shape
    _woven_down_kernel[(outputs // BLOCK_ROWS,)](
        *(hidden, down.codes, down.scales, bias, runs, weights, *(added or (None, None)), out),
        *(len(hidden), len(down.codes), outputs, inputs, DOWN_WARPS),
        num_warps=DOWN_WARPS,
        **overlap(out),
    )


@cache
def multiplication() -> str:
    """Write the assembly that multiplies a record by its inputs and adds the products to sums.

    Outputs 0 to 3 are the new sums. Then come the record's four words, a word of their scales,
    eight pairs of inputs, and the old sums.
    """
    lines = [DECODING_REGISTERS]
    lines.append(".reg .b32 a<16>; .reg .f32 s<4>;")
    for word in range(4):  # half of the rows, half of the columns
        pairs = [f"a{4 * word + pair}" for pair in range(4)]
        lines += decoding_of(f"${4 + word}", "$8", word, pairs)
    sums = "{$17, $18, $19, $20}"
    for step in range(4):  # of 16 columns
        low, high = 2 * step, 2 * step + 1  # its two pairs of a row
        rows = f"{{a{low}, a{8 + low}, a{high}, a{8 + high}}}"
        inputs = f"{{${9 + low}, ${9 + high}}}"
        # Outputs may have the registers of inputs: they are written last.
        new = "{$0, $1, $2, $3}" if step == 3 else "{s0, s1, s2, s3}"
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {new}, {rows}, {inputs}, {sums};"
        )
        sums = "{s0, s1, s2, s3}"
    return "{" + "\n".join(lines) + "}"


ASM = gl.constexpr(multiplication())
CONSTRAINTS = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 13 + ["f"] * 4))
# The assembler moves no load down past it.
WARP_BARRIER = gl.constexpr("bar.warp.sync 0xffffffff;")


@gluon.jit
def _fetch(codes, scales, record, thread, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """Ask for those of a block's records, from `record` on, that belong to a warp: every WARPS-th.

    Returns the words [T, 4] and the scales [T] of each.
    """
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    warp = thread // 32
    word = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS)), 0)
    codes_at = codes + record * 128 + gl.expand_dims(thread * 4, 1) + word
    scales_at = scales + record * 8 + thread // 4
    records = gl.tuple(())
    for i in gl.static_range((CHUNKS + WARPS - 1) // WARPS):
        if (i + 1) * WARPS <= CHUNKS:
            words = gl.load(codes_at + i * WARPS * 128)
            scale = gl.load(scales_at + i * WARPS * 8)
        else:
            exists = i * WARPS + warp < CHUNKS
            words = gl.load(codes_at + i * WARPS * 128, mask=gl.expand_dims(exists, 1), other=0)
            scale = gl.load(scales_at + i * WARPS * 8, mask=exists, other=0)
        records += ((words, scale),)
    return records


@gluon.jit
def _halves(x, LAYOUT: gl.constexpr):
    """Split pairs: x [T, 2 n] -> [T, n] of first ones, and of second ones."""
    if x.shape[1] == 2:
        first, second = gl.split(x)
        return (
            gl.convert_layout(first, LAYOUT, assert_trivial=True),
            gl.convert_layout(second, LAYOUT, assert_trivial=True),
        )
    else:
        return gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def _inputs_of(x_at, chunk, thread, WARPS: gl.constexpr):
    """Load a thread's eight pairs of inputs of a chunk of 64 columns: see `woven_place`."""
    LAYOUT: gl.constexpr = thread.type.layout
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    at = chunk * 32 + thread % 4 * 8
    at = gl.convert_layout(at, gl.SliceLayout(1, PAIRS), assert_trivial=True)
    pair = gl.arange(0, 8, layout=gl.SliceLayout(0, PAIRS))
    pairs = gl.load(x_at + gl.expand_dims(at, 1) + gl.expand_dims(pair, 0))
    even, odd = _halves(pairs, LAYOUT)
    p04, p26 = _halves(even, LAYOUT)
    p15, p37 = _halves(odd, LAYOUT)
    p0, p4 = _halves(p04, LAYOUT)
    p2, p6 = _halves(p26, LAYOUT)
    p1, p5 = _halves(p15, LAYOUT)
    p3, p7 = _halves(p37, LAYOUT)
    return p0, p1, p2, p3, p4, p5, p6, p7


@gluon.jit
def _multiply(records, x_at, thread, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """Multiply a warp's records by their inputs: return four sums [T], as tensor cores leave them.

    The second and the fourth repeat the first and the third, those of the first 8 rows and of the
    others, and so do neighbouring threads: they are of columns that are the same.
    """
    LAYOUT: gl.constexpr = thread.type.layout
    zero = gl.zeros([32 * WARPS], gl.float32, LAYOUT)
    sums = gl.tuple((zero, zero, zero, zero))
    for i in gl.static_range(len(records)):
        chunk = thread // 32 + i * WARPS
        if (i + 1) * WARPS > CHUNKS:
            chunk = gl.minimum(chunk, CHUNKS - 1)
        inputs = _inputs_of(x_at, chunk, thread, WARPS)
        even, odd = _halves(records[i][0], LAYOUT)
        a, c = _halves(even, LAYOUT)
        b, d = _halves(odd, LAYOUT)
        sums = gl.inline_asm_elementwise(
            ASM,
            CONSTRAINTS,
            (a, b, c, d, records[i][1]) + inputs + sums,
            dtype=[gl.float32] * 4,
            is_pure=True,
            pack=1,
        )
    return sums


@gluon.jit
def _add_up(sums, WARPS: gl.constexpr):
    """Add up the sums of all warps: return those of the first 8 rows, and of the others, [8, 4].

    The four numbers of a row are the same.
    """
    both = gl.join(sums[0], sums[2]).reshape([WARPS, 8, 4, 2])
    return gl.split(gl.sum(both, axis=0) * UNIT)


@gluon.jit
def _rows_of(sums):
    """Return the rows of sums [8, 4], and which of the four numbers of a row are the first."""
    LAYOUT: gl.constexpr = sums.type.layout
    row = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT)), 1)
    copy = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT)), 0)
    row, copy = gl.broadcast(row, copy)
    return row, copy == 0


@gluon.jit
def _woven_gate_up_kernel(
    x,
    codes,
    w_scales,
    bias,
    runs,
    hidden,
    alpha,
    limit,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute 8 results of an expert: their gates, their ups, and the gated product."""
    if PDL:  # the next kernel reads the router's choice before its own wait
        run("griddepcontrol.wait;")
        run("griddepcontrol.launch_dependents;")
    F: gl.constexpr = OUT // 2
    BLOCKS: gl.constexpr = OUT // 16
    CHUNKS: gl.constexpr = IN // 64
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    pair, block = gl.program_id(0) // BLOCKS, gl.program_id(0) % BLOCKS
    expert, count = gl.load(runs + 4 + 4 * pair).to(gl.int64), gl.load(runs)
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, WORDS))
    record = (expert * BLOCKS + block) * CHUNKS
    records = _fetch(codes, w_scales, record, thread, CHUNKS, WARPS)
    run(WARP_BARRIER)
    # A branch, which is always taken, since the assembler would move arithmetic before the loads.
    if count > 0:
        x_at = x.to(gl.pointer_type(gl.int32))
        gate, up = _add_up(_multiply(records, x_at, thread, CHUNKS, WARPS), WARPS)
        row, is_first = _rows_of(gate)
        result = block * 8 + row
        if bias is not None:
            gate += gl.load(bias + expert * OUT + result).to(gl.float32)
            up += gl.load(bias + expert * OUT + F + result).to(gl.float32)
        value = gated(gate, up, alpha, limit, hidden.dtype.element_ty)
        gl.store(hidden + pair * F + woven_place(result), value, mask=is_first)


@gluon.jit
def _woven_down_kernel(
    hidden,
    codes,
    w_scales,
    bias,
    runs,
    weights,
    gates,
    added,
    out,
    K: gl.constexpr,
    E: gl.constexpr,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute 16 outputs of all experts of the token, and their weighted sum."""
    if PDL:
        run("griddepcontrol.launch_dependents;")
    BLOCKS: gl.constexpr = OUT // 16
    CHUNKS: gl.constexpr = IN // 64
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    dtype: gl.constexpr = out.dtype.element_ty
    block = gl.program_id(0)
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, WORDS))
    x_at = hidden.to(gl.pointer_type(gl.int32))
    # The kernel before lets this one start only when the router's choice is there: no wait is
    # needed to read it. Whatever it reads, it stays in bounds.
    count = gl.load(runs, volatile=True)
    experts = gl.tuple(())
    for k in gl.static_range(K):
        expert = gl.load(runs + 4 + 4 * k, volatile=True)
        experts += (gl.minimum(gl.maximum(expert, 0), E - 1).to(gl.int64),)
    record = (experts[0] * BLOCKS + block) * CHUNKS
    fetched = gl.tuple((_fetch(codes, w_scales, record, thread, CHUNKS, WARPS),))
    if PDL:
        run("griddepcontrol.wait;")
    for k in gl.static_range(K):
        if k + 1 < K:
            record = (experts[k + 1] * BLOCKS + block) * CHUNKS
            fetched += (_fetch(codes, w_scales, record, thread, CHUNKS, WARPS),)
        run(WARP_BARRIER)
        zero = gl.zeros([32 * WARPS], gl.float32, gl.SliceLayout(1, WORDS))
        sums = gl.tuple((zero, zero, zero, zero))
        # A branch, which is always taken, since the assembler would move arithmetic before loads.
        if count > 0:
            sums = _multiply(fetched[k], x_at + k * (IN // 2), thread, CHUNKS, WARPS)
        low, high = _add_up(sums, WARPS)
        row, is_first = _rows_of(low)
        at = block * 16 + row
        if bias is not None:
            low += gl.load(bias + experts[k] * OUT + at).to(gl.float32)
            high += gl.load(bias + experts[k] * OUT + 8 + at).to(gl.float32)
        # Round where separate kernels for the products and their sum would round.
        weight = gl.load(weights + k)
        low = low.to(dtype).to(gl.float32) * weight
        high = high.to(dtype).to(gl.float32) * weight
        if k == 0:
            first, second = low, high
        else:
            first += low
            second += high
    if added is not None:
        factor = 1.0 / (1.0 + gl.exp(-gl.load(gates).to(gl.float32)))
        first += gl.load(added + at).to(gl.float32) * factor
        second += gl.load(added + 8 + at).to(gl.float32) * factor
    gl.store(out + at, first.to(dtype), mask=is_first)
    gl.store(out + 8 + at, second.to(dtype), mask=is_first)
