"""Linear layers whose weights are codes of 4 or 8 bits in int32 words, with scales for groups.

weight = (code - zero) * scale. A word holds codes of neighbours in a row, the first in its lowest
bits. Rows of a step decide how the product is computed:

- Few: each program asks for all of its words at once, as in gemv.py, and sums in float32.
- Those of a decode step: tensor cores, which take the weights from registers, where they were
  dequantised, and the inputs from shared memory.
- Many: one kernel dequantises the whole weight, then cuBLAS multiplies.

On Hopper, woven_row.py and woven_linear.py have faster kernels for one row and for those of a
decode step. They take weights of 4 bits in groups of 128 columns, whose codes they want in another
order.

Tensor cores sum over columns in any order, as long as weights and inputs agree. Neighbours in a
word would have to move from thread to thread to become neighbours in a product. So the weights stay
in the order in which shifts yield them, first the first codes of RUN words, then their second
codes, and the inputs are brought into this order by `transpose_runs`.

Shapes: M rows, K inputs, N outputs, W words in a row, G groups in a row.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    arrivals,
    ask_for,
    cdiv,
    is_hopper,
    needs_register_limit,
    next_power_of_2,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.elementwise import activated
from nanovllm.backends.cuda.triton.unnormed import Unnormed

woven_linear: Any
woven_row: Any
try:
    from nanovllm.backends.cuda.triton import woven_linear, woven_row
except ImportError:  # older releases of Triton lack Gluon, or parts of it
    woven_linear = woven_row = None

# Words of a run, whose codes go to tensor cores together: a step of these takes 16 columns.
RUN = 16
# With so many rows, sums of single products take less time than tensor cores do.
FEW_ROWS = 1
BLOCK_N = 64  # rows of the weight in a tile: those of one instruction of Hopper's tensor cores
# Words that a program of the kernel for few rows asks for at once. If it takes a row in parts, its
# registers hold no more than these.
WORDS_PER_PROGRAM, WORDS_PER_PART = 8192, 4096
PREFETCH = tl.constexpr(1024)  # words of each row that are prefetched


class PackedTensors(NamedTuple):
    """A weight [N, K] in codes.

    A factor holds a scale in its upper half, and a zero in its lowest byte. The factors of a group
    are neighbours, so that a tile loads them together, ahead of time.
    """

    codes: Tensor  # int32 [N, W]
    factors: Tensor  # int32 [G, N]
    bits: int
    group: int  # columns that share a factor
    inputs: int  # K
    woven: bool = False  # whether the codes are in the order of woven_linear.py

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]


class Tiling(NamedTuple):
    """The tiling of a product on tensor cores."""

    block_n: int  # outputs of a tile
    block_m: int  # rows of a tile
    block_w: int  # words of a row that are fetched at a time
    splits: int  # programs that share a tile
    stages: int
    warps: int
    registers: int | None = None  # at most, of a thread


def takes_woven(device: torch.device, bits: int, group: int, outputs: int, inputs: int) -> bool:
    """Tell whether a weight's codes shall be woven: for woven_row.py and woven_linear.py."""
    in_runs = group % 128 == 0 or group >= inputs
    return (
        woven_linear is not None
        and is_hopper(device)
        and (bits == 4 and outputs % 2 == 0 and inputs % 128 == 0 and in_runs)
    )


def woven_product(
    x: Tensor | Unnormed,
    weight: PackedTensors,
    bias: Tensor | None,
    *,
    gated: bool = False,
    gelu: bool = False,
    residual: Tensor | None = None,
) -> Any:
    """Compute x @ weight.T + bias, or with `gated` the activated product, of woven codes.

    residual: what the result of one row is added to; then a Stream is returned.
    """
    if isinstance(x, Tensor):
        x = x.contiguous()
    tensors = x, weight.codes, weight.factors, bias
    group = min(weight.group, weight.inputs)
    if len(x) == 1:
        division = woven_row.division(weight.inputs)
        return woven_row.linear(
            *tensors, division, group=group, gated=gated, gelu=gelu, residual=residual
        )
    outputs = weight.outputs // 2 if gated else weight.outputs
    tiling = woven_linear.tiling(x, outputs, gated=gated)
    return woven_linear.linear(*tensors, tiling, group=group, gated=gated, gelu=gelu)


def few_rows_linear(
    x: Tensor,
    weight: PackedTensors,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    gelu: bool = False,
) -> Tensor:
    """Compute x @ weight.T + bias, or with `gated` the activated product: x [M, K] -> [M, N].

    No running kernel may write to the weights.
    """
    assert not weight.woven
    rows, inputs = x.shape
    outputs = weight.outputs // 2 if gated else weight.outputs
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    per_row = weight.codes.shape[1]
    chunks = min(128, next_power_of_2(cdiv(per_row, 4)))
    words = WORDS_PER_PROGRAM if per_row <= 4 * chunks else WORDS_PER_PART
    block_n = max(2 if gated else 1, words // (4 * chunks))
    own = block_n // 2 if gated else block_n
    _few_rows_kernel[(cdiv(outputs, own),)](
        *(x, weight.codes, weight.factors, bias, out),
        *(outputs, inputs, per_row, weight.group, weight.bits),
        *(rows, block_n, chunks, gated, gelu, x.device.type != "cpu"),
        num_warps=4,
        **overlap(x),
    )
    return out


@triton.jit
def _few_rows_kernel(
    x,
    codes,
    factors,
    bias,
    out,
    N,
    K: tl.constexpr,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    OWN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    TIMES: tl.constexpr = 2 if GATED else 1
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    n = _rows(tl.program_id(0), N, BLOCK_N, GATED)
    chunk = tl.arange(0, CHUNKS)
    # Ask for the words of the first part, if not for all, before the inputs are ready.
    words, scale, zero = _chunks(codes, factors, n, 0, chunk, TIMES * N, W, GROUP, BITS, x)
    wait_for_inputs(PDL)
    dtype = out.dtype.element_ty
    for row in tl.static_range(ROWS):
        total = _product(x + row * K, words, scale, zero, chunk, W, BITS, ASM)
        for part in tl.static_range(1, (W + 4 * CHUNKS - 1) // (4 * CHUNKS)):
            at = part * CHUNKS
            more, more_scale, more_zero = _chunks(
                codes, factors, n, at, chunk, TIMES * N, W, GROUP, BITS, x
            )
            total += _product(x + row * K, more, more_scale, more_zero, at + chunk, W, BITS, ASM)
        result = tl.sum(total, axis=1)
        if bias is not None:
            result += tl.load(bias + n).to(tl.float32)
        if GATED:
            gate, up = result.reshape(OWN, 2).split()
            # Round where separate kernels for the product and the activation would round.
            gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
            result = activated(gate, GELU).to(dtype).to(tl.float32) * up
        tl.store(out + row * N + own, result.to(dtype), mask=own < N)


@triton.jit
def _rows(tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return the rows of the weight that a tile computes: N outputs, or N gates and N ups.

    With GATED, every other row is one of gate's, and the next one is up's. Instead of rows outside
    of the weight, which would be computed in vain, there are rows that are inside.
    """
    r = tl.arange(0, BLOCK_N)
    if GATED:
        n = tl.minimum(tile * (BLOCK_N // 2) + r // 2, N - 1) + r % 2 * N
    else:
        n = tl.minimum(tile * BLOCK_N + r, N - 1)
    return n


@triton.jit
def _chunks(codes, factors, n, first, chunk, rows, W, GROUP: tl.constexpr, BITS: tl.constexpr, x):
    """Load words [N, C, 4] of rows, and the scale and zero [N, C] of each chunk of 4 words."""
    C: tl.constexpr = chunk.shape[0]
    at = first * 4 + tl.arange(0, 4 * C)
    words = tl.load(
        codes + n.to(tl.int64)[:, None] * W + at[None, :], mask=(at < W)[None, :], other=0
    )
    words = words.reshape(n.shape[0], C, 4)
    chunk += first
    group = (chunk * (128 // BITS) // GROUP)[None, :]
    factor = tl.load(factors + group * rows + n[:, None], mask=(chunk * 4 < W)[None, :], other=0)
    scale = (factor >> 16).to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)
    return words, scale, (factor & 255).to(tl.float32)


@triton.jit
def _product(
    x,
    words,
    scale,
    zero,
    chunk,
    W: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Multiply words [N, C, 4] by the inputs of their columns, and sum inside chunks: [N, C].

    A code of 4 bits, put into the bits of the number 128, adds itself if it ends at bit 16, its
    16th if it ends at bit 12, and its 256th if it ends at bit 8. A code of 8 bits that ends at bit
    8 adds itself to 32768. What was added to codes is subtracted from sums.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    at = chunk[:, None] * 4 + tl.arange(0, 4)[None, :]
    fours = x.to(tl.pointer_type(tl.int64)) + at * (PER_WORD // 4)  # four inputs at a time
    low = tl.load(fours, mask=at < W, other=0)
    high = low
    if BITS == 4:
        high = tl.load(fours + 1, mask=at < W, other=0)
    total = tl.zeros(words.shape, tl.float32)
    plain = tl.zeros(at.shape, tl.float32)
    added = tl.zeros(at.shape, tl.float32)
    for j in tl.static_range(PER_WORD):
        bits = ((low if j < 4 else high) >> (16 * (j % 4))).to(tl.int16)
        inputs = bits.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        plain += inputs
        if BITS == 4:
            # Two shifts bring each code to one of three places.
            near = words << 12 if j < 2 else words if j < 5 else words >> 12
            if j == 1 or j == 4 or j == 7:
                number = _merged(near, 0xF0000, 0x43000000, ASM)
            elif j == 0 or j == 3 or j == 6:
                inputs *= 16
                number = _merged(near, 0xF000, 0x43000000, ASM)
            else:
                inputs *= 256
                number = _merged(near, 0xF00, 0x43000000, ASM)
            added += inputs * 128
        else:
            added += inputs * 32768
            near = words << 8 if j == 0 else words >> (8 * j - 8)
            number = _merged(near, 0xFF00, 0x47000000, ASM)
        total += number * inputs[None, :, :]
    sums = tl.sum(total, axis=2) - tl.sum(added, axis=1)[None, :]
    return scale * (sums - zero * tl.sum(plain, axis=1)[None, :])


@triton.jit
def _merged(words, MASK: tl.constexpr, NUMBER: tl.constexpr, ASM: tl.constexpr):
    """Put the bits of words that a mask has into those of a float's number."""
    if ASM:
        # One instruction, which the compiler does not find: it takes one constant at most.
        bits = tl.inline_asm_elementwise(
            "{.reg .b32 n; mov.b32 n, $3; lop3.b32 $0, $1, $2, n, 0xea;}",
            "=r,r,n,n",
            [words, MASK, NUMBER],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        bits = words & MASK | NUMBER
    return bits.to(tl.float32, bitcast=True)


def tiling(x: Tensor, weight: PackedTensors) -> Tiling:
    """Choose how to cut a product into one wave of programs, if it is not too large for that."""
    rows, processors = len(x), num_processors(x.device)
    columns = cdiv(weight.outputs, BLOCK_N)
    words = weight.codes.shape[1]
    if rows <= 16:
        block_m, block_w, wanted = 8 if rows <= 8 else 16, 4 * RUN, 4 * processors
    elif rows <= 64:
        block_m, block_w, wanted = 32 if rows <= 32 else 64, RUN, 3 * processors
    else:
        block_m, block_w, wanted = 128, RUN, 2 * processors
    tiles = columns * cdiv(rows, block_m)
    splits = max(1, min(wanted // tiles, words // (2 * block_w)))
    stages = 3
    if rows > 64 and tiles > wanted or 8 < rows <= 16 and splits > 1:
        stages = 2  # leave room for more programs
    # With 168 registers a thread, the three programs that are wanted fit a multiprocessor.
    registers = 168 if 16 < rows <= 64 and needs_register_limit(x.device) else None
    return Tiling(BLOCK_N, block_m, block_w, splits, stages, 4, registers)


def transpose_runs(x: Tensor, bits: int) -> Tensor:
    """Return inputs in the order of the tiled kernel: x [M, K] -> [M, K'].

    The inputs of a run, [RUN, codes of a word], are transposed. K' is K, rounded up to whole runs.
    """
    rows, inputs = x.shape
    per_word = 32 // bits
    runs = cdiv(inputs, per_word * RUN)
    out = torch.empty(rows, runs * per_word * RUN, dtype=x.dtype, device=x.device)
    block = min(next_power_of_2(runs), 16)
    _transpose_runs_kernel[(rows, cdiv(runs, block))](
        x, out, inputs, runs, per_word, RUN, block, num_warps=4, **overlap(x)
    )
    return out


@triton.jit
def _transpose_runs_kernel(
    x,
    out,
    K,
    runs,
    PER_WORD: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    WIDTH: tl.constexpr = RUN * PER_WORD
    run = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = run[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    wait_for_inputs(PDL)
    values = tl.load(x + row.to(tl.int64) * K + at, mask=at < K, other=0.0)
    result = values.reshape(BLOCK, RUN, PER_WORD).permute(0, 2, 1).reshape(BLOCK, WIDTH)
    tl.store(out + row.to(tl.int64) * runs * WIDTH + at, result, mask=at < runs * WIDTH)


def tiled_linear(
    x: Tensor,
    weight: PackedTensors,
    bias: Tensor | None,
    tiling: Tiling,
    *,
    gated: bool = False,
    gelu: bool = False,
) -> Tensor:
    """Compute x @ weight.T + bias, or with `gated` the activated product: x [M, K] -> [M, N].

    No running kernel may write to the weights.
    """
    rows, inputs = x.shape
    outputs = weight.outputs // 2 if gated else weight.outputs
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    block_n, block_m, block_w, splits, stages, warps, registers = tiling
    steps = cdiv(weight.codes.shape[1], block_w)
    span = cdiv(steps, splits) * block_w
    own = block_n // 2 if gated else block_n
    grid = (cdiv(rows, block_m), cdiv(outputs, own), splits)
    parts = counters = None
    if splits > 1:
        parts = torch.empty(*grid, block_n, block_m, dtype=torch.float32, device=x.device)
        counters = arrivals(x.device)
    x = transpose_runs(x, weight.bits)
    _tiled_linear_kernel[grid](
        *(x, weight.codes, weight.factors, bias, out, parts, counters),
        *(rows, outputs, inputs, x.shape[1], weight.codes.shape[1], weight.factors.shape[0]),
        *(span, weight.group, weight.bits, block_n, block_m, block_w, splits, RUN),
        *(gated, gelu, inputs % (32 // weight.bits * block_w) == 0),
        x.device.type != "cpu" and x.dtype != torch.float32,
        num_warps=warps,
        num_stages=stages,
        maxnreg=registers,
        **overlap(x),
    )
    return out


@triton.jit(do_not_specialize=["M"])
def _tiled_linear_kernel(
    x,
    codes,
    factors,
    bias,
    out,
    parts,
    arrivals,
    M,
    N,
    K,
    X,  # the width of x
    W,
    G,
    span,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLITS: tl.constexpr,
    RUN: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    PER_WORD: tl.constexpr = 32 // BITS
    OWN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # What lies outside is computed from what lies inside, and not stored.
    x_rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * X
    n = _rows(tl.program_id(1), N, BLOCK_N, GATED)
    i = tl.arange(0, BLOCK_W)
    begin = split * span
    end = tl.minimum(begin + span, W)
    row_words = codes + n.to(tl.int64)[:, None] * W
    if PDL and tl.program_id(0) == 0:
        line = tl.arange(0, 4)[None, :] * 32
        for w in range(begin, tl.minimum(end, begin + PREFETCH), 128):
            ask_for(row_words + tl.minimum(w + line, W - 1))
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    column = tl.arange(0, BLOCK_W * PER_WORD)
    for w in range(begin, end, BLOCK_W):
        if EVEN:
            words = tl.load(row_words + (w + i)[None, :])
        else:
            words = tl.load(row_words + (w + i)[None, :], mask=(w + i < W)[None, :], other=0)
        factor = _factors(factors, n, w, N * (2 if GATED else 1), G, GROUP, BITS, BLOCK_W)
        weights = _transposed_weights(words, factor, x.dtype.element_ty, BITS, RUN, ASM)
        at = w * PER_WORD + column
        if EVEN:
            inputs = tl.load(x_rows + at[None, :])
        else:
            inputs = tl.load(x_rows + at[None, :], mask=(at < X)[None, :], other=0.0)
        acc = tl.dot(weights, inputs.T, acc)
    is_last = True
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts += tile * SPLITS * BLOCK_M * BLOCK_N
        tl.store(parts + split * BLOCK_M * BLOCK_N + place, acc)
        # The program that arrives last sees what the others wrote before they arrived.
        tl.debug_barrier()  # wait until all threads have stored
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrivals + tile, 0)
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in range(SPLITS):  # not unrolled, which would take many registers
                acc += tl.load(parts + part * BLOCK_M * BLOCK_N + place)
    if is_last:
        if bias is not None:
            acc += tl.load(bias + n).to(tl.float32)[:, None]
        own = tl.program_id(1) * OWN + tl.arange(0, OWN)
        dtype = out.dtype.element_ty
        result = acc.T
        if GATED:
            gate, up = result.reshape(BLOCK_M, OWN, 2).split()
            # Round where separate kernels for the product and the activation would round.
            gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
            result = activated(gate, GELU).to(dtype).to(tl.float32) * up
        tl.store(
            out + m.to(tl.int64)[:, None] * N + own[None, :],
            result.to(dtype),
            mask=(m < M)[:, None] & (own < N)[None, :],
        )


@triton.jit
def _factors(
    factors, n, w, rows, G, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Load the factors of BLOCK_W words from w on: [N, BLOCK_W], or [N, 1] if they are equal."""
    WORDS: tl.constexpr = GROUP * BITS // 32  # of a group
    if WORDS % BLOCK_W == 0:
        group = tl.minimum(w // WORDS, G - 1) + tl.arange(0, 1)
    elif BLOCK_W % WORDS == 0:
        group = tl.minimum(w // WORDS + tl.arange(0, BLOCK_W // WORDS), G - 1)
    else:
        group = tl.minimum((w + tl.arange(0, BLOCK_W)) * (32 // BITS) // GROUP, G - 1)
    factor = tl.load(factors + group[None, :] * rows + n[:, None])
    if BLOCK_W > WORDS and BLOCK_W % WORDS == 0:
        factor = _spread(factor, WORDS)
    return factor


@triton.jit
def _spread(x, TIMES: tl.constexpr):
    """Give each word the value of its group: [N, g] -> [N, TIMES g]."""
    N: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    return tl.broadcast_to(x[:, :, None], N, G, TIMES).reshape(N, G * TIMES)


@cache
def unpacking(is_bfloat16: bool) -> str:
    """Write the assembly that dequantises two words, in pairs of equal place.

    Outputs 0 to 7 are pairs of weights; 8 and 9 are the words; 10 and 11 pairs of what to subtract
    from a code, and of scales. A code in the lowest bits of a number that is 128 in bfloat16, or
    1024 in float16, adds itself.
    """
    kind, magic, one = ("bf16x2", "43004300", "3f803f80") if is_bfloat16 else (
        "f16x2", "64006400", "3c003c00",
    )  # fmt: skip
    lines = [
        ".reg .b32 low, high, t, none, one;",
        "mov.b32 none, 0x80008000;",
        f"mov.b32 one, 0x{one};",
        "prmt.b32 low, $8, $9, 0x5410;",
        "prmt.b32 high, $8, $9, 0x7632;",
    ]
    for j in range(8):
        source = "low" if j < 4 else "high"
        if j % 4:
            lines.append(f"shr.u32 t, {source}, {4 * (j % 4)};")
            source = "t"
        lines.append(f"lop3.b32 t, {source}, 0x000f000f, 0x{magic}, 0xea;")
        lines.append(f"fma.rn.{kind} t, t, one, $10;")
        lines.append(f"fma.rn.{kind} ${j}, t, $11, none;")
    return "{" + "\n".join(lines) + "}"


BFLOAT16_ASM = tl.constexpr(unpacking(True))
FLOAT16_ASM = tl.constexpr(unpacking(False))


@triton.jit
def _transposed_weights(
    words, factor, dtype: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr
):
    """Dequantise words, and transpose their runs: [N, W] -> [N, 32 / BITS * W]."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if dtype == tl.float32:
        scale = (factor & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        scale = (factor >> 16).to(tl.int16).to(dtype, bitcast=True)
    zero = factor & 255
    if BITS == 4:
        if ASM:
            # The negative of the number that a code of zero becomes.
            bits = zero | (0xC300 if dtype == tl.bfloat16 else 0xE400)
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                BFLOAT16_ASM if dtype == tl.bfloat16 else FLOAT16_ASM,
                "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
                [words, bits.to(tl.int16).to(dtype, bitcast=True), scale],
                dtype=[scale.dtype] * 8,
                is_pure=True,
                pack=2,
            )
        else:
            a, b = _weights(words, zero, scale, 0, 4), _weights(words, zero, scale, 4, 4)
            c, d = _weights(words, zero, scale, 8, 4), _weights(words, zero, scale, 12, 4)
            e, f = _weights(words, zero, scale, 16, 4), _weights(words, zero, scale, 20, 4)
            g, h = _weights(words, zero, scale, 24, 4), _weights(words, zero, scale, 28, 4)
        even = tl.join(tl.join(a, e), tl.join(c, g))
        odd = tl.join(tl.join(b, f), tl.join(d, h))
        # [N, W, fourth, second, first]: the bits of a code's place, the highest first.
        all = tl.join(even, odd).reshape(N, W // RUN, RUN, 2, 2, 2)
        return all.permute(0, 1, 3, 4, 5, 2).reshape(N, 8 * W)
    else:
        a, b = _weights(words, zero, scale, 0, 8), _weights(words, zero, scale, 8, 8)
        c, d = _weights(words, zero, scale, 16, 8), _weights(words, zero, scale, 24, 8)
        all = tl.join(tl.join(a, c), tl.join(b, d)).reshape(N, W // RUN, RUN, 2, 2)
        return all.permute(0, 1, 3, 4, 2).reshape(N, 4 * W)


@triton.jit
def _weights(words, zero, scale, shift: tl.constexpr, BITS: tl.constexpr):
    """Dequantise the codes at one place of each word.

    A code in the lowest bits of 2^23, a float, adds itself.
    """
    bits = (words >> shift) & ((1 << BITS) - 1) | 0x4B000000
    number = bits.to(tl.float32, bitcast=True) - (8388608.0 + zero.to(tl.float32))
    return number.to(scale.dtype) * scale


def dequantise(weight: PackedTensors, dtype: torch.dtype) -> Tensor:
    """Write a weight as numbers: [N, K]."""
    codes = weight.codes
    out = codes.new_empty(weight.outputs, weight.inputs, dtype=dtype)
    block_w = min(next_power_of_2(codes.shape[1]), 128)
    block_n = 2048 // block_w
    grid = cdiv(weight.outputs, block_n), cdiv(codes.shape[1], block_w)
    tensors = codes, weight.factors, out, weight.outputs, weight.inputs, codes.shape[1]
    if weight.woven:
        _dequantise_woven_kernel[grid](*tensors, weight.group, block_n, block_w // 4, num_warps=4)
    else:
        _dequantise_kernel[grid](
            *(*tensors, weight.group, weight.bits, block_n, block_w), num_warps=4
        )
    return out


@triton.jit
def _dequantise_kernel(
    codes,
    factors,
    out,
    N,
    K,
    W,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    PER_WORD: tl.constexpr = 32 // BITS
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (n < N)[:, None] & (w < W)[None, :]
    words = tl.load(codes + n[:, None] * W + w[None, :], mask=inside, other=0)
    group = (w * PER_WORD // GROUP)[None, :]
    factor = tl.load(factors + group * N + n[:, None], mask=inside, other=0)[:, :, None]
    scale = (factor >> 16).to(tl.int16).to(out.dtype.element_ty, bitcast=True)
    place = tl.arange(0, PER_WORD)
    column = w[:, None] * PER_WORD + place[None, :]
    code = (words[:, :, None] >> (place * BITS)[None, None, :]) & ((1 << BITS) - 1)
    tl.store(
        out + n[:, None, None] * K + column[None, :, :],
        (code - (factor & 255)).to(scale.dtype) * scale,
        mask=inside[:, :, None] & (column < K)[None, :, :],
    )


@triton.jit
def _dequantise_woven_kernel(
    codes, factors, out, N, K, W, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr
):
    """Write BLOCKS blocks of 32 columns: the codes of a block are in four words, 4 apart."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (n < N)[:, None] & (block < W // 4)[None, :]
    group = (block * 32 // GROUP)[None, :]
    factor = tl.load(factors + group * N + n[:, None], mask=inside, other=0)
    first = codes + n[:, None] * W + (block // 4 * 16 + block % 4)[None, :]
    a, b = tl.load(first, mask=inside, other=0), tl.load(first + 4, mask=inside, other=0)
    c, d = tl.load(first + 8, mask=inside, other=0), tl.load(first + 12, mask=inside, other=0)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [N, block, 2, 2]: two bits of the word's number
    zero = (factor & 255)[:, :, None, None]
    scale = (factor >> 16).to(tl.int16).to(out.dtype.element_ty, bitcast=True)[:, :, None, None]
    # A word's lower half has the first columns of four pairs, its upper half the second ones.
    even = tl.join(
        tl.join(_column(words, zero, scale, 0), _column(words, zero, scale, 8)),
        tl.join(_column(words, zero, scale, 4), _column(words, zero, scale, 12)),
    )
    odd = tl.join(
        tl.join(_column(words, zero, scale, 16), _column(words, zero, scale, 24)),
        tl.join(_column(words, zero, scale, 20), _column(words, zero, scale, 28)),
    )
    # In the order of columns, the bits of a code's number in its half come before its word's.
    numbers = tl.join(even, odd).permute(0, 1, 4, 5, 2, 3, 6).reshape(BLOCK_N, BLOCKS * 32)
    column = tl.program_id(1) * BLOCKS * 32 + tl.arange(0, BLOCKS * 32)
    tl.store(
        out + n[:, None] * K + column[None, :],
        numbers,
        mask=(n < N)[:, None] & (column < K)[None, :],
    )


@triton.jit
def _column(words, zero, scale, shift: tl.constexpr):
    return ((words >> shift & 15) - zero).to(scale.dtype) * scale
