"""Products of one row with woven 4-bit weights, as fast as Hopper's memory can deliver these.

A program computes 16 outputs, or 8 gates and their ups, and its warps share the runs of each. Most
of the words that a warp needs, up to 8 KB, are asked for before the inputs are ready.

The tensor cores' instruction multiplies 16 outputs' weights by eight columns of inputs. Each column
has the inputs of another run, so that a warp loads the inputs of eight runs once, into the
registers where all its products find them. Of the sums that a run's weights yield, those of the
run's own column are kept. They are in the registers of one thread of four, which knows the factors
of that run and of one more.

A code becomes a number by one shift and one logical operation: in the lowest bits of 128, or in
float16 of 64 with a step of 1, it adds itself. What it was added to, and the zero, are subtracted
from a run's sum, once, as multiples of the sum of its inputs. The tensor cores compute that sum by
multiplying the inputs by ones.

The inputs go through shared memory, if a program takes them all at once: to load them in the order
of the tensor cores takes fewer instructions from there. The program may norm them on their way, and
may add its outputs to the residual stream: see unnormed.py.

The kernel is written in Gluon, the part of Triton in which a kernel says which thread holds what.

Shapes: K inputs, N outputs, W words in a row, T threads of a program.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.backends.cuda.triton.dispatch import cdiv, next_power_of_2, overlap
from nanovllm.backends.cuda.triton.gluon_common import run
from nanovllm.backends.cuda.triton.unnormed import Stream, Unnormed
from nanovllm.backends.cuda.triton.woven_linear import COLUMNS, gated_product


class Division(NamedTuple):
    """The division of K among the warps of a program."""

    warps: int
    runs: int  # that a warp multiplies at a time, at most 8
    blocks: int  # of so many runs, that a warp takes


def division(inputs: int) -> Division:
    """Divide K among up to eight warps, in blocks of equally many runs."""
    runs = cdiv(inputs, COLUMNS)
    warps = min(8, next_power_of_2(cdiv(runs, 8)))
    blocks = cdiv(runs, 8 * warps)
    return Division(warps, cdiv(runs, warps * blocks), blocks)


def norms(inputs: int) -> bool:
    """Tell whether `linear` takes an Unnormed row of so many inputs."""
    return inputs % COLUMNS == 0 and division(inputs).blocks == 1


def linear(
    x: Tensor | Unnormed,
    codes: Tensor,
    factors: Tensor,
    bias: Tensor | None,
    division: Division,
    *,
    group: int,
    gated: bool = False,
    gelu: bool = False,
    residual: Tensor | None = None,
) -> Any:
    """Compute x @ weight.T + bias, or with `gated` the activated product: x [1, K] -> [1, N].

    codes: woven. group: columns that share a factor, a multiple of 128. No running kernel may write
    to the weights.
    residual: [1, N], what the result is added to; then a Stream is returned.
    """
    norm = x if isinstance(x, Unnormed) else None
    row = x.stream.total if isinstance(x, Unnormed) else x
    inputs, outputs = row.shape[1], codes.shape[0]
    if gated:
        outputs //= 2
    out = torch.empty(1, outputs, dtype=row.dtype, device=row.device)
    warps, runs, blocks = division
    programs = cdiv(outputs, 8 if gated else 16)
    squares = None
    if residual is not None:
        squares = torch.empty(programs, dtype=torch.float32, device=row.device)
    _woven_row_kernel[(programs,)](
        *(row, norm.stream.squares if norm else None, norm.weight if norm else None),
        *(codes, factors, bias, residual, out, squares, outputs, norm.eps if norm else 0.0),
        *(inputs // COLUMNS, group // COLUMNS, len(norm.stream.squares) if norm else 0),
        *(warps, runs, blocks, norm is not None and norm.zero_centered, gated, gelu),
        num_warps=warps,
        **overlap(row),
    )
    return out if squares is None else Stream(out, squares)


def multiplication(is_bfloat16: bool) -> str:
    """Write the assembly that multiplies 16 outputs' words of a run by the inputs of all columns.

    Outputs 0 to 3 are sums: of the first 8 outputs for two columns, and of the others. Then come
    four words of each, and 16 pairs of inputs.
    """
    kind, mask, magic, first = (
        ("bf16", "000f000f", "43004300", 0) if is_bfloat16 else ("f16", "00f000f0", "54005400", -4)
    )
    lines = [".reg .b32 t, a<4>;", ".reg .f32 s<4>, none;", "mov.f32 none, 0f00000000;"]
    sums = "{none, none, none, none}"
    for step in range(8):  # of 16 columns
        word, half = divmod(step, 2)
        for pair in range(2):
            shift = first + 4 * (2 * half + pair)
            for side in range(2):  # the first 8 outputs, and the others
                source = f"${4 + 4 * side + word}"
                if shift:
                    kind_of_shift = "shr.u32" if shift > 0 else "shl.b32"
                    lines.append(f"{kind_of_shift} t, {source}, {abs(shift)};")
                    source = "t"
                lines.append(f"lop3.b32 a{2 * pair + side}, {source}, 0x{mask}, 0x{magic}, 0xea;")
        lines.append(product(kind, "{a0, a1, a2, a3}", step, 12, sums))
        sums = "{s0, s1, s2, s3}"
    return "{" + "\n".join(lines) + "}"


def summation(is_bfloat16: bool) -> str:
    """Write the assembly that sums the inputs of each column, of which 16 pairs are given.

    Outputs 0 to 3 are sums, as those of `multiplication`, but equal for all 16 outputs.
    """
    kind, one = ("bf16", "3f803f80") if is_bfloat16 else ("f16", "3c003c00")
    lines = [".reg .b32 one;", f"mov.b32 one, 0x{one};"]
    lines += [".reg .f32 s<4>, none;", "mov.f32 none, 0f00000000;"]
    sums = "{none, none, none, none}"
    for step in range(8):
        lines.append(product(kind, "{one, one, one, one}", step, 4, sums))
        sums = "{s0, s1, s2, s3}"
    return "{" + "\n".join(lines) + "}"


def product(kind: str, weights: str, step: int, first: int, sums: str) -> str:
    """Write the instruction for a step of 16 columns, whose inputs are operands from `first` on."""
    # Outputs may have the registers of inputs: they are written last.
    new = "{$0, $1, $2, $3}" if step == 7 else "{s0, s1, s2, s3}"
    inputs = f"{{${first + 2 * step}, ${first + 2 * step + 1}}}"
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {new}, {weights}, {inputs}, "
        f"{sums};"
    )


BFLOAT16_PRODUCT = gl.constexpr(multiplication(True))
FLOAT16_PRODUCT = gl.constexpr(multiplication(False))
BFLOAT16_SUM = gl.constexpr(summation(True))
FLOAT16_SUM = gl.constexpr(summation(False))
PRODUCT_CONSTRAINTS = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 24))
SUM_CONSTRAINTS = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 16))


@gluon.jit
def _fetch(codes_0, codes_1, r: gl.constexpr, last, EXISTS: gl.constexpr):
    """Ask for a thread's words [T, 4] of its run r: of the first 8 outputs, and of the others.

    last: the place of the weight's last run, where the thread's first one is 0. EXISTS: whether r
    is known to be no later.
    """
    at = r * 16
    if EXISTS:
        return (gl.load(codes_0 + at), gl.load(codes_1 + at))
    else:
        exists = gl.expand_dims(r <= last, 1)
        return (
            gl.load(codes_0 + at, mask=exists, other=0),
            gl.load(codes_1 + at, mask=exists, other=0),
        )


@gluon.jit
def _fetch_factors(factors_0, factors_1, run, last, rows, SHARING: gl.constexpr):
    """Ask for the factors [T] of `run` and the next one: of the first 8 outputs, of the others."""
    even = gl.minimum(run, last) // SHARING * rows
    odd = gl.minimum(run + 1, last) // SHARING * rows
    return (
        gl.load(factors_0 + even),
        gl.load(factors_0 + odd),
        gl.load(factors_1 + even),
        gl.load(factors_1 + odd),
    )


@gluon.jit
def _split(words, LAYOUT: gl.constexpr):
    """Split words [T, 4] into four times [T]."""
    even, odd = gl.split(words.reshape([words.shape[0], 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return (
        gl.convert_layout(a, LAYOUT, assert_trivial=True),
        gl.convert_layout(b, LAYOUT, assert_trivial=True),
        gl.convert_layout(c, LAYOUT, assert_trivial=True),
        gl.convert_layout(d, LAYOUT, assert_trivial=True),
    )


@gluon.constexpr_function
def parts_layout(parts, warps):
    """Return the layout in which each warp holds all of `parts` numbers, a power of 2."""
    registers = [[32 << i] for i in range(max(0, parts.bit_length() - 6))]
    lanes = [[1 << i] if 1 << i < parts else [0] for i in range(5)]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0]] * (warps.bit_length() - 1), [], [parts]
    )


@gluon.jit
def norm_factor(squares, PARTS: gl.constexpr, N: gl.constexpr, eps, WARPS: gl.constexpr):
    """Compute what a norm multiplies a row of N elements by, from sums of squares."""
    PADDED: gl.constexpr = power_of_2_from(PARTS)
    part = gl.arange(0, PADDED, layout=parts_layout(PADDED, WARPS))
    return gl.rsqrt(gl.sum(gl.load(squares + part, mask=part < PARTS, other=0.0)) / N + eps)


@gluon.constexpr_function
def power_of_2_from(number):
    return 1 << (number - 1).bit_length()


@gluon.jit
def normed(value, factor, weight, ZERO_CENTERED: gl.constexpr):
    """Norm elements, and round as elementwise.py does."""
    dtype: gl.constexpr = value.dtype
    wide = value.to(gl.float32) * factor
    if ZERO_CENTERED:
        wide *= 1.0 + weight.to(gl.float32)
    else:
        wide = wide.to(dtype).to(gl.float32) * weight.to(gl.float32)
    return wide.to(dtype)


@gluon.constexpr_function
def fragment_layout(warps):
    """Return the layout of inputs [8 WARPS, 64], in pairs, that the tensor cores want."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    of_warps = [[8 << i, 0] for i in range(warps.bit_length() - 1)]
    registers = [[0, 4], [0, 8], [0, 16], [0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [8 * warps, 64])


@gluon.jit
def halved(x, TIMES: gl.constexpr, LAYOUT: gl.constexpr):
    """Split [A, B, 2, 2, ...] into a tuple of [A B], by the last axis first."""
    parts = gl.tuple((x,))
    for _ in gl.static_range(TIMES):
        halves = gl.tuple(())
        for i in gl.static_range(len(parts)):
            first, second = gl.split(parts[i])
            halves += (first, second)
        parts = halves
    flat = gl.tuple(())
    for i in gl.static_range(len(parts)):
        part = parts[i].reshape([parts[i].shape[0] * parts[i].shape[1]])
        flat += (gl.convert_layout(part, LAYOUT, assert_trivial=True),)
    return flat


@gluon.jit
def _staged_inputs(
    x,
    squares,
    weight,
    eps,
    ALL_RUNS: gl.constexpr,
    PARTS: gl.constexpr,
    WARPS: gl.constexpr,
    RUNS: gl.constexpr,
    ZERO_CENTERED: gl.constexpr,
    THREADS: gl.constexpr,
):
    """Load a program's inputs, and norm them if there are squares: 16 pairs of each thread, [T].

    In shared memory there is room for eight runs of each warp.
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    staged = gl.allocate_shared_memory(
        gl.int32, [8 * WARPS, 64], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    place = gl.expand_dims(gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(1, COPY)), 1)
    run = place // 8 * RUNS + place % 8
    column = run * 128 + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, COPY)), 0)
    exists = (place % 8 < RUNS) & (column < ALL_RUNS * 128)
    value = gl.load(x + column, mask=exists, other=0)
    if squares is not None:
        gain = gl.load(weight + column, mask=exists, other=0)
        factor = norm_factor(squares, PARTS, ALL_RUNS * 128, eps, WARPS)
        value = normed(value, factor, gain, ZERO_CENTERED)
    first, second = gl.split(value.to(gl.int16, bitcast=True).reshape([8 * WARPS, 64, 2]))
    pairs = (first.to(gl.int32) & 0xFFFF) | (second.to(gl.int32) << 16)
    staged.store(gl.convert_layout(pairs, PAIRS, assert_trivial=True))
    pairs = staged.load(fragment_layout(WARPS))
    pairs = pairs.reshape([8 * WARPS, 2, 2, 2, 2, 4]).permute([0, 5, 4, 3, 2, 1])
    return halved(pairs, 4, THREADS)


@gluon.jit
def _scaled(sums, plain, factor, dtype: gl.constexpr):
    """Subtract what codes were added to and their zeros from a run's sums, and scale these.

    plain: the sum of the run's inputs.
    """
    zero = (factor & 255).to(gl.float32) + (128.0 if dtype == gl.bfloat16 else 64.0)
    scale = (factor >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return scale * (sums - zero * plain)


@gluon.jit
def halves(N, GATED: gl.constexpr):
    """Return where the halves of a program's outputs begin, and the number of rows of the weight.

    The halves are neighbours, or gates and ups.
    """
    n = gl.program_id(0) * (8 if GATED else 16)
    return n, n + (N if GATED else 8), 2 * N if GATED else N


@gluon.jit
def threads(LAYOUT: gl.constexpr, WARPS: gl.constexpr):
    """Return each thread's warp, its row of eight and its place among four: [T] each."""
    thread = gl.arange(0, 32 * WARPS, layout=LAYOUT)
    return thread // 32, thread % 32 // 4, thread % 4


@gluon.jit
def own_rows(
    codes,
    warp,
    row,
    lane,
    n,
    second_n,
    rows,
    WIDTH: gl.constexpr,  # words in a row
    SPAN: gl.constexpr,  # words that a warp takes at once
    WORDS: gl.constexpr,
):
    """Return a thread's row in both halves, twice [T], and where its words begin, twice [T, 4].

    What lies outside is computed from what lies inside, and not stored.
    """
    row_0, row_1 = gl.minimum(n + row, rows - 1), gl.minimum(second_n + row, rows - 1)
    word = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS)), 0)
    own = gl.expand_dims(warp * SPAN + lane * 4, 1) + word
    codes_0 = codes + gl.expand_dims(row_0.to(gl.int64) * WIDTH, 1) + own
    codes_1 = codes + gl.expand_dims(row_1.to(gl.int64) * WIDTH, 1) + own
    return row_0, row_1, codes_0, codes_1


@gluon.jit
def keep(sums, products, lane, r: gl.constexpr):
    """Keep a run's products in the threads that keep its sums, and their other sums as they are.

    sums: of the first half's even and odd runs, then of the second half's. products: of the first
    half for two columns of inputs, then of the second half. A thread keeps runs 2 lane, 2 lane + 1.
    """
    wanted = lane == r // 2
    even_0, odd_0, even_1, odd_1 = sums
    if r % 2 == 0:
        even_0 = gl.where(wanted, products[0], even_0)
        even_1 = gl.where(wanted, products[2], even_1)
    else:
        odd_0 = gl.where(wanted, products[1], odd_0)
        odd_1 = gl.where(wanted, products[3], odd_1)
    return (even_0, odd_0, even_1, odd_1)


@gluon.jit
def elements_at(residual, at, second_at, N):
    """Load the elements of a residual stream at a program's outputs: a tuple of two, or empty."""
    if residual is None:
        return gl.tuple(())
    else:
        first = gl.load(residual + at, mask=at < N, other=0)
        return gl.tuple((first, gl.load(residual + second_at, mask=second_at < N, other=0)))


@gluon.jit
def _sums_of_warps(total_0, total_1, WARPS: gl.constexpr):
    """Add up what the threads [T] of a program have of the same outputs: twice [8]."""
    both = gl.join(total_0, total_1).reshape([WARPS, 8, 4, 2])
    return gl.split(gl.sum(gl.sum(both, axis=2), axis=0))


@gluon.jit
def places(zero, n, second_n, WARPS: gl.constexpr):
    """Return the places of a program's outputs, twice [8], in the layout that `finish` wants.

    zero: [T], of the same layout as the threads' sums.
    """
    like, _ = _sums_of_warps(zero, zero, WARPS)
    at = gl.arange(0, 8, layout=like.type.layout)
    return n + at, second_n + at


@gluon.jit
def finish(
    total_0,
    total_1,
    at,
    second_at,
    stream,
    bias,
    out,
    out_squares,
    N,
    rows,
    WARPS: gl.constexpr,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
):
    """Make a program's outputs of its threads' sums [T], and store them.

    stream: the elements of the residual stream that the outputs are added to, from `elements_at`.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    result, second = _sums_of_warps(total_0, total_1, WARPS)
    if bias is not None:
        result += gl.load(bias + gl.minimum(at, rows - 1)).to(gl.float32)
        second += gl.load(bias + gl.minimum(second_at, rows - 1)).to(gl.float32)
    if len(stream) > 0:
        result = added(result, stream[0], dtype)
        second = added(second, stream[1], dtype)
        squares = gl.where(at < N, result * result, 0.0)
        squares += gl.where(second_at < N, second * second, 0.0)
        gl.store(out_squares + gl.program_id(0), gl.sum(squares))
    if GATED:
        result = gated_product(result, second, GELU, dtype)
    else:
        gl.store(out + second_at, second.to(dtype), mask=second_at < N)
    gl.store(out + at, result.to(dtype), mask=at < N)


@gluon.jit
def added(result, stream, dtype: gl.constexpr):
    """Add results to the residual stream, rounded where separate kernels would round."""
    return (result.to(dtype).to(gl.float32) + stream.to(gl.float32)).to(dtype).to(gl.float32)


@gluon.jit
def _woven_row_kernel(
    x,
    squares,
    norm_weight,
    codes,
    factors,
    bias,
    residual,
    out,
    out_squares,
    N,
    eps,
    ALL_RUNS: gl.constexpr,
    SHARING: gl.constexpr,  # runs that share a factor
    PARTS: gl.constexpr,  # of the squares
    WARPS: gl.constexpr,
    RUNS: gl.constexpr,
    BLOCKS: gl.constexpr,
    ZERO_CENTERED: gl.constexpr,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    PDL: gl.constexpr,
):
    W: gl.constexpr = ALL_RUNS * 16
    EVEN: gl.constexpr = WARPS * RUNS * BLOCKS == ALL_RUNS
    # A thread holds four words of a run of an output. Eight outputs and four threads make a warp.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    THREADS: gl.constexpr = gl.SliceLayout(1, WORDS)
    dtype: gl.constexpr = out.dtype.element_ty
    warp, row, lane = threads(THREADS, WARPS)
    n, second_n, rows = halves(N, GATED)
    row_0, row_1, codes_0, codes_1 = own_rows(
        *(codes, warp, row, lane, n, second_n, rows, W, RUNS * 16, WORDS)
    )
    last = ALL_RUNS - 1 - warp * RUNS
    words = gl.tuple(())
    for r in gl.static_range(RUNS):
        words += _fetch(codes_0, codes_1, r, last, EVEN)
    # A thread keeps the sums of two runs, the columns that tensor cores leave to it.
    factors_0, factors_1 = factors + row_0, factors + row_1
    kept = gl.tuple(())
    for b in gl.static_range(BLOCKS):
        own_run = (b * WARPS + warp) * RUNS + 2 * lane
        kept += (_fetch_factors(factors_0, factors_1, own_run, ALL_RUNS - 1, rows, SHARING),)
    if PDL:
        run("griddepcontrol.launch_dependents;")
        run("griddepcontrol.wait;")
    zero = gl.zeros([32 * WARPS], gl.float32, THREADS)
    total_0, total_1 = zero, zero
    at, second_at = places(zero, n, second_n, WARPS)
    stream = elements_at(residual, at, second_at, N)
    if BLOCKS == 1:
        staged = _staged_inputs(
            *(x, squares, norm_weight, eps),
            *(ALL_RUNS, PARTS, WARPS, RUNS, ZERO_CENTERED, THREADS),
        )
    for b in gl.static_range(BLOCKS):
        first = (b * WARPS + warp) * RUNS
        # Each of the eight columns has the inputs of a run.
        if BLOCKS == 1:
            inputs = staged
        else:
            pairs = x.to(gl.pointer_type(gl.int32)) + (first + row) * 64 + lane
            exists = (row < RUNS) & (first + row < ALL_RUNS)
            inputs = gl.tuple(())
            for i in gl.static_range(16):
                inputs += (gl.load(pairs + i * 4, mask=exists, other=0),)
        plain_even, plain_odd, _, _ = gl.inline_asm_elementwise(
            BFLOAT16_SUM if dtype == gl.bfloat16 else FLOAT16_SUM,
            SUM_CONSTRAINTS,
            inputs,
            dtype=[gl.float32] * 4,
            is_pure=True,
            pack=1,
        )
        following = gl.tuple(())
        sums = (zero, zero, zero, zero)
        for r in gl.static_range(RUNS):
            low, high = _split(words[2 * r], THREADS), _split(words[2 * r + 1], THREADS)
            s0, s1, s2, s3 = gl.inline_asm_elementwise(
                BFLOAT16_PRODUCT if dtype == gl.bfloat16 else FLOAT16_PRODUCT,
                PRODUCT_CONSTRAINTS,
                low + high + inputs,
                dtype=[gl.float32] * 4,
                is_pure=True,
                pack=1,
            )
            sums = keep(sums, (s0, s1, s2, s3), lane, r)
            if b + 1 < BLOCKS:
                ahead = (b + 1) * WARPS * RUNS + r
                following += _fetch(codes_0, codes_1, ahead, last, EVEN)
        total_0 += _scaled(sums[0], plain_even, kept[b][0], dtype)
        total_0 += _scaled(sums[1], plain_odd, kept[b][1], dtype)
        total_1 += _scaled(sums[2], plain_even, kept[b][2], dtype)
        total_1 += _scaled(sums[3], plain_odd, kept[b][3], dtype)
        words = following
    finish(
        *(total_0, total_1, at, second_at, stream, bias, out, out_squares),
        *(N, rows, WARPS, GATED, GELU),
    )
