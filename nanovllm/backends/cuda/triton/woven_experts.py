"""The products of experts in MXFP4 on Hopper's tensor cores, which take weights from registers.

Codes and scales are woven once, when the weights are loaded: see `weave`. Then a thread reads 16
neighbouring bytes, all that it needs of 16 rows and 64 columns, and few instructions turn them into
numbers that lie in registers as the tensor cores take them. The inputs stay as they are: each row
of a tile is copied to shared memory by its own address, so no kernel sorts them before.

Copies of several steps are on their way to shared memory at a time. While the tensor cores multiply
by some weights, the threads decode the next ones.

The two products of a mixture cut pairs into the same tiles. A tile of the second product needs no
other tile of the first, so it may begin before they end. On an H200, a decode step of gpt-oss-20b
took 2.6, 2.5 and 0.7 % less time with 64, 96 and 192 sequences than when the second product waited
for all of the first (PyTorch 2.11, Triton 3.6, 2026-11-26).

The kernel is written in Gluon, the part of Triton in which a kernel says which thread holds what.

Shapes: E experts, N rows of an expert's weight, K columns.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.backends.cuda.triton.dispatch import MAX_ROWS, cdiv, is_hopper, overlap
from nanovllm.backends.cuda.triton.gluon_common import barrier, run

# Triton 3.9 has another name for it than 3.6.
fetch = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

BLOCK_ROWS = 16  # of a record: what a warp decodes at a time, so many rows of 64 columns
# A pair of codes lies in both halves of a word of 32 bits. In bfloat16, the sign has place 15, and
# the magnitude has places 6 to 8. Rotated to the left by these numbers of places, the word has
# three pairs there. The last pair takes the bits that remain: see `_places`.
ROTATIONS = (4, 10, 14)
MASK = 0x81C081C0
LAST_MASK, LAST_BIT = 0x80C080C0, 0x01000100  # the latter is 8 places to the right
DECODING_REGISTERS = ".reg .b32 t, u, f, none; mov.b32 none, 0x80008000;"
# With this scale, 2^34, the kernel's numbers are infinite. No weights have it, or a larger one,
# which would not fit into the exponent of a factor.
LARGEST_SCALE = 161


class WovenExperts(NamedTuple):
    """The weights of all experts for one product, woven."""

    codes: Tensor  # int32 [E, N, K / 8], the memory of [E, N / 16, K / 64, 32, 4]
    scales: Tensor  # int32 [E N K / 128], the memory of [E, N / 16, K / 64, 8]

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs and inputs of an expert."""
        return self.codes.shape[1], self.codes.shape[2] * 8


class Tile(NamedTuple):
    """The tiling of a product: how it is cut into programs."""

    rows: int  # pairs of token and expert: a power of 2
    warps: int
    units: int  # a tile has 16 outputs a warp for each unit
    stages: int  # steps that are in shared memory or on their way
    splits: int = 1  # programs that share the columns of the second product
    registers: int | None = None  # at most, of a thread
    few: int = 0  # 0, or a power of 2: tiles of fewer pairs are rounded up to it, twice it, ...
    late: bool = False  # whether the next kernel starts only when programs end


# Tiles by the greatest number of pairs for each expert. They were measured (Triton 3.6) with
# gpt-oss-20b's shape: at 1 to 256 pairs on an H200, at 0.125, 0.5 and 2,048 pairs on an H100. Whole
# decode steps chose those for 3 to 80 pairs, with even and with uneven routing. 5 and 9 stages
# divide the shape's 45 steps; with 6, three more would be computed with weights of 0. `late` was
# measured by decode steps, too: with it, steps of 2 and 4 tokens took 11 and 2 % less time, those
# of 8 tokens 1 % more. (At that time a kernel without `late` let the next one start at once. Now it
# waits for the kernels before it first.)
TILES = (
    (0.2, Tile(8, warps=4, units=1, stages=6, splits=2, late=True)),
    (0.5, Tile(8, warps=4, units=1, stages=9, late=True)),
    (3, Tile(8, warps=4, units=1, stages=9)),
    (10, Tile(16, warps=4, units=1, stages=5, few=8)),
    (16, Tile(32, warps=4, units=2, stages=5, few=8)),
    (24, Tile(32, warps=4, units=2, stages=5, few=16)),
    (80, Tile(64, warps=4, units=2, stages=5, registers=168, few=16)),
    (512, Tile(128, warps=8, units=1, stages=5, registers=128)),
    (float("inf"), Tile(256, warps=8, units=1, stages=5)),
)


def woven_tile(pairs: float) -> Tile:
    """Choose the tile for so many pairs for each expert."""
    return next(tile for limit, tile in TILES if pairs <= limit)


def warmup_sizes(experts: int, top_k: int, most: int) -> list[int]:
    """List the numbers of tokens, up to `most`, from which on products launch other kernels."""
    ends = [int(limit * experts / top_k) for limit, _ in TILES[:-1]]
    # One token has kernels of its own, in woven_token.py.
    return sorted({end + 1 for end in (0, 1, *ends, MAX_ROWS) if end < most})


def is_woven(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Tell whether the kernel takes weights of a size, and inputs of a dtype."""
    return is_hopper(device) and dtype == torch.bfloat16 and rows % 64 == columns % 64 == 0


def view_woven(codes: Tensor, scales: Tensor) -> WovenExperts:
    """View woven codes [E, N, K / 2] and scales [E, N, K / 32], uint8, as the kernel reads them."""
    return WovenExperts(codes.view(torch.int32), scales.view(-1).view(torch.int32))


def _places() -> list[list[list[int]]]:
    """Return the places of the bits of eight codes in a word: [pair][half][bit, lowest first]."""
    wanted = (6, 7, 8, 15)
    pairs = [[[(16 * half + to - by) % 32 for to in wanted] for half in (0, 1)] for by in ROTATIONS]
    return [*pairs, [[16 * half + place for place in (6, 7, 0, 15)] for half in (0, 1)]]


def _ordered(x: Tensor, gated: bool) -> Tensor:
    """Bring the rows of an expert into blocks: [N, ...] -> [blocks, halves, 8, ...].

    gated: the halves of a block are gates and their ups.
    """
    if gated:
        return x.view(2, -1, 8, *x.shape[1:]).transpose(0, 1)
    return x.view(-1, 2, 8, *x.shape[1:])


def _tables(device: torch.device) -> Tensor:
    """Make the bits that a code sets in a word: int32 [pair, half, code]."""
    tables = torch.zeros(4, 2, 16, dtype=torch.int64)
    for pair, halves in enumerate(_places()):
        for half, bits in enumerate(halves):
            for code in range(16):
                tables[pair, half, code] = sum((code >> i & 1) << bit for i, bit in enumerate(bits))
    return tables.to(torch.uint32).view(torch.int32).to(device)


def weave(codes: Tensor, scales: Tensor, *, gated: bool) -> None:
    """Reorder the bits of codes [E, N, K / 2] and scales [E, N, K / 32], uint8, in place.

    gated: the first half of an expert's rows are gates, the second half their ups.
    """
    tables = _tables(codes.device)
    for mine, own in zip(codes, scales):  # one expert at a time takes little memory
        numbers = torch.stack((mine & 15, mine >> 4), dim=-1).flatten(1)
        # [blocks, half of rows, row, chunk, word, pair, lane, half of the word]
        numbers = _ordered(numbers, gated).unflatten(-1, (-1, 2, 4, 4, 2))
        # [blocks, chunk, row, lane, half of rows, word, pair, half of the word]
        numbers = numbers.permute(0, 3, 2, 6, 1, 4, 5, 7).int()
        words = torch.zeros_like(numbers[..., 0, 0])
        for pair in range(4):
            for half in (0, 1):
                words |= tables[pair, half][numbers[..., pair, half]]
        mine.view(-1).copy_(words.contiguous().view(torch.uint8).view(-1))
        parts = _ordered(own.clamp(max=LARGEST_SCALE), gated).unflatten(-1, (-1, 2))
        # [blocks, chunk, row, half of rows, word]
        own.view(-1).copy_(parts.permute(0, 3, 2, 1, 4).reshape(-1))


def unweave(codes: Tensor, scales: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
    """Undo `weave` for one expert: return codes [N, K / 2] and scales [N, K / 32]."""
    rows, width = codes.shape

    def in_rows(x: Tensor) -> Tensor:
        """Undo `_ordered`: [blocks, halves, 8, K] -> [N, K]."""
        return (x.transpose(0, 1) if gated else x).reshape(rows, -1)

    words = codes.view(-1).view(torch.int32).view(rows // BLOCK_ROWS, -1, 8, 4, 2, 2)
    numbers = torch.zeros(*words.shape, 4, 2, dtype=torch.uint8, device=codes.device)
    for pair, halves in enumerate(_places()):
        for half, bits in enumerate(halves):
            for i, bit in enumerate(bits):
                numbers[..., pair, half] |= ((words >> bit & 1) << i).to(torch.uint8)
    numbers = in_rows(numbers.permute(0, 4, 2, 1, 5, 6, 3, 7).flatten(3))
    parts = scales.view(rows // BLOCK_ROWS, -1, 8, 2, 2).permute(0, 3, 2, 1, 4)
    return numbers[:, ::2] | numbers[:, 1::2] << 4, in_rows(parts.flatten(3))


def multiply_woven(
    x: Tensor,
    weight: WovenExperts,
    bias: Tensor | None,
    out: Tensor,
    *,
    pairs: Any,
    top_k: int,
    tile: Tile,
    is_gated: bool = False,
    clamped: Any = None,
) -> None:
    """Multiply each pair's row by its expert's weights, into `out`.

    x: [tokens, K], or with is_gated false [pairs, K].
    out: [pairs, N / 2] with is_gated, else [pairs * splits, N], where a pair has `splits` rows.
    pairs: the pairs in the order of their experts, the list of tiles, and how many tiles there may
        be at most.
    is_gated: rows are those of the tokens, and results are gated and in sorted order. Otherwise
        rows are in sorted order, and results in that of the tokens.
    clamped: a ClampedSwiGLU; None: the gating is SwiGLU.
    """
    order, runs, max_tiles = pairs
    outputs, inputs = weight.shape
    alpha, limit = (clamped.alpha, clamped.limit) if clamped else (None, None)
    splits = 1 if is_gated else tile.splits
    few = tile.few or tile.rows
    parts = cdiv(outputs, BLOCK_ROWS * tile.warps * tile.units)
    compiled = _woven_experts_kernel[(max_tiles * parts, splits)](
        *(x, weight.codes, weight.scales, bias, order, runs, out, alpha, limit),
        *(top_k, outputs, inputs, is_gated, few, (tile.rows // few).bit_length()),
        *(tile.warps, tile.units, tile.stages, splits, not tile.late),
        num_warps=tile.warps,
        maxnreg=tile.registers,
        **overlap(out, top_k * splits),
    )
    if is_gated and compiled is None:
        # The launch was put off (see precompile.py). The second product would wait for it forever.
        runs.zero_()


@cache
def decoding() -> str:
    """Write the assembly that decodes two words of a row, whose codes become 8 pairs.

    Outputs 0 to 7 are the pairs, 8 and 9 the words, 10 a word whose lowest bytes are their scales.
    A factor multiplies by the scale, the difference of biases, 2^126, and 2^-32: with it, scales
    from 2^-100 to 2^33 are exact.
    """
    lines = [DECODING_REGISTERS]
    for word in range(2):
        pairs = [f"${4 * word + pair}" for pair in range(4)]
        lines += decoding_of(f"${8 + word}", "$10", word, pairs)
    return "{" + "\n".join(lines) + "}"


def decoding_of(word: str, scales: str, byte: int, pairs: list[str]) -> list[str]:
    """Write the assembly that decodes a word to four pairs; its scale is a byte of `scales`."""
    lines = [
        f"prmt.b32 f, {scales}, 0, 0x444{byte};",
        "mad.lo.u32 f, f, 0x00800080, 0x2f002f00;",  # 94 << 7
    ]
    for pair, target in enumerate(pairs):
        if pair == 3:
            lines.append(f"shl.b32 u, {word}, 8;")
            lines.append(f"and.b32 t, {word}, {LAST_MASK:#x};")
            lines.append(f"lop3.b32 t, u, {LAST_BIT:#x}, t, 0xea;")
        else:
            by = ROTATIONS[pair]
            # The lower half's highest bits may also come to the upper half's lowest places.
            if by <= 6:
                lines.append(f"shl.b32 t, {word}, {by};")
            else:
                lines.append(f"shf.l.wrap.b32 t, {word}, {word}, {by};")
            lines.append(f"and.b32 t, t, {MASK:#x};")
        lines.append(f"fma.rn.bf16x2 {target}, t, f, none;")
    return lines


ASM = gl.constexpr(decoding())
UNIT = gl.constexpr(2.0**32)  # sums are multiplied by it, because the factors have 2^-32


@gluon.jit
def _weights(words, scale, WARPS: gl.constexpr, A: gl.constexpr):
    """Decode words [32 WARPS, 4] with their scales [32 WARPS] -> [16 WARPS, 64]."""
    words = words.reshape([WARPS * 32, 2, 2])  # half of rows, word
    scale = gl.join(scale, scale >> 16)
    scale = gl.convert_layout(gl.join(scale, scale), words.type.layout, assert_trivial=True)
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        ASM,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, scale],
        dtype=[gl.bfloat16] * 8,
        is_pure=True,
        pack=2,
    )
    even = gl.join(gl.join(a, e), gl.join(c, g))
    odd = gl.join(gl.join(b, f), gl.join(d, h))
    numbers = gl.join(even, odd)
    # [warp, row, lane, half of rows, half of a pair, word, pair's two bits]
    numbers = numbers.reshape([WARPS, 8, 4, 2, 2, 2, 2, 2])
    numbers = numbers.permute([0, 3, 1, 5, 6, 7, 2, 4]).reshape([16 * WARPS, 64])
    return gl.convert_layout(numbers, A, assert_trivial=True)


@gluon.jit
def _fetch(codes_at, scales_at, exists, x_at, inside, step, is_wanted, codes, scales, inputs):
    """Begin to copy the codes, scales and inputs of a step to shared memory.

    What does not exist or is not wanted becomes 0.
    """
    exists = exists & is_wanted
    fetch(codes, codes_at + step * 128, mask=gl.expand_dims(exists, 1))
    fetch(scales, scales_at + step * 8, mask=exists)
    fetch(inputs, x_at + step * 64, mask=inside & is_wanted)
    async_copy.commit_group()


@gluon.jit
def _sources(first, end, order, x, row, column, K: gl.constexpr, IN: gl.constexpr):
    """Return where the rows of a tile are, and which of them belong to it.

    K: a token's pairs, if rows are those of tokens; 0: they are those of pairs in sorted order.
    """
    place = first + row
    inside = place < end
    source = place
    if K > 0:
        source = gl.load(order + place, mask=inside, other=0) // K
    at = x + gl.expand_dims(source.to(gl.int64) * IN, 1) + gl.expand_dims(column, 0)
    return at, gl.expand_dims(inside, 1)


@gluon.jit
def _wait(sums, weights):
    """Wait for the products that were begun, which read the weights from registers."""
    waited = warpgroup_mma_wait(0, deps=sums + (weights,))
    done = gl.tuple(())
    for i in gl.static_range(len(sums)):
        done += (waited[i],)
    return done


@gluon.jit
def _multiply(weights, inputs, sums, UNIT_: gl.constexpr):
    """Begin to add weights [16 W, 64] times inputs [M, 64] to a unit's sums [16 W, M]."""
    new = gl.tuple(())
    for i in gl.static_range(len(sums)):
        if i == UNIT_:
            new += (warpgroup_mma(weights, inputs.permute((1, 0)), sums[i], is_async=True),)
        else:
            new += (sums[i],)
    return new


@gluon.jit
def gated(gate, up, alpha, limit, dtype: gl.constexpr):
    """Compute swiglu or, if there is a limit, ClampedSwiGLU, rounding as the plain layer does."""
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    if limit is not None:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit) + 1.0
        return (gate / (1.0 + gl.exp(-alpha * gate)) * up).to(dtype)
    else:
        silu = (gate / (1.0 + gl.exp(-gate))).to(dtype)
        return (silu.to(gl.float32) * up).to(dtype)


@gluon.jit
def _store(
    acc,
    bias,
    expert,
    order,
    out,
    first,
    end,
    block,
    split,
    alpha,
    limit,
    OUT: gl.constexpr,
    GATED: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """Store sums [16 W, M] of the rows of W blocks, the pairs from `first` on."""
    BLOCK_M: gl.constexpr = acc.shape[1]
    WARPS: gl.constexpr = acc.shape[0] // 16
    MMA: gl.constexpr = acc.type.layout
    RESULTS: gl.constexpr = OUT // 2 if GATED else OUT
    dtype: gl.constexpr = out.dtype.element_ty
    r = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA))
    acc *= UNIT
    if bias is not None:
        if GATED:
            own = gl.minimum(block * 8 + r // 16 * 8 + r % 8, RESULTS - 1) + r // 8 % 2 * RESULTS
        else:
            own = gl.minimum(block * 16 + r, RESULTS - 1)
        added = gl.load(bias + expert * OUT + own).to(gl.float32)
        if SPLITS > 1:  # one of the programs adds it
            added = gl.where(split == 0, added, 0.0)
        acc += gl.expand_dims(added, 1)
    WIDTH: gl.constexpr = 8 * WARPS if GATED else 16 * WARPS
    if GATED:
        gate, up = gl.split(acc.reshape([WARPS, 2, 8, BLOCK_M]).permute([0, 2, 3, 1]))
        result = gated(gate, up, alpha, limit, dtype).reshape([WIDTH, BLOCK_M])
    else:
        result = acc.to(dtype)
    # Let a thread store neighbours.
    EACH: gl.constexpr = 4 if dtype == gl.float32 else 8
    LANES: gl.constexpr = min(32, WIDTH // EACH)
    STORE: gl.constexpr = gl.BlockedLayout([EACH, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    result = gl.convert_layout(result, STORE)
    column = block * (8 if GATED else 16) + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, STORE))
    place = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, STORE))
    target = place
    if not GATED:
        target = gl.load(order + place, mask=place < end, other=0)
    at = (target * SPLITS + split).to(gl.int64) * RESULTS
    gl.store(
        out + gl.expand_dims(at, 0) + gl.expand_dims(column, 1),
        result,
        mask=gl.expand_dims(place < end, 0) & gl.expand_dims(column < RESULTS, 1),
    )


@gluon.jit
def _multiply_tile(
    x,
    codes,
    scales,
    bias,
    order,
    out,
    alpha,
    limit,
    expert,
    first,
    end,
    part,
    K: gl.constexpr,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr,
    UNITS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """Multiply 16 * WARPS * UNITS rows of an expert's weights by at most BLOCK_M pairs."""
    BLOCKS: gl.constexpr = OUT // 16
    STEPS: gl.constexpr = IN // 64
    AHEAD: gl.constexpr = STAGES - 2
    THREADS: gl.constexpr = 32 * WARPS
    dtype: gl.constexpr = x.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    # A thread copies the words and scales that it reads later.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    IN_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Each stage has memory of its own: then the compiler knows that copies of different stages do
    # not meet, and adds no barriers.
    codes_of = gl.tuple(())
    scales_of = gl.tuple(())
    inputs = gl.tuple(())
    for _ in gl.static_range(STAGES):
        codes_of += (gl.allocate_shared_memory(gl.int32, [UNITS * THREADS, 4], FLAT),)
        scales_of += (gl.allocate_shared_memory(gl.int32, [UNITS * THREADS], LINE),)
        inputs += (gl.allocate_shared_memory(dtype, [BLOCK_M, 64], IN_SHARED),)
    block = part * (WARPS * UNITS)
    thread = gl.arange(0, UNITS * THREADS, layout=gl.SliceLayout(1, WORDS))
    record = (expert * BLOCKS + block + thread // 32) * STEPS
    exists = block + thread // 32 < BLOCKS
    word = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS)), 0)
    codes_at = codes + gl.expand_dims(record * 128 + thread % 32 * 4, 1) + word
    scales_at = scales + record * 8 + thread % 32 // 4
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))
    OF_TOKENS: gl.constexpr = K if GATED else 0
    x_at, inside = _sources(first, end, order, x, row, column, OF_TOKENS, IN)
    sums = gl.tuple(())
    for _ in gl.static_range(UNITS):
        sums += (gl.zeros([16 * WARPS, BLOCK_M], gl.float32, MMA),)
    split = gl.program_id(1) if SPLITS > 1 else 0
    begin = split * STEPS // SPLITS
    end_step = (split + 1) * STEPS // SPLITS
    for i in gl.static_range(AHEAD):
        step = begin + i
        _fetch(
            *(codes_at, scales_at, exists, x_at, inside, step, step < end_step),
            *(codes_of[i], scales_of[i], inputs[i]),
        )
    weights = gl.zeros([16 * WARPS, 64], gl.bfloat16, A)
    for start in range(begin, end_step, STAGES):
        for i in gl.static_range(STAGES):
            async_copy.wait_group(AHEAD - 1)
            # All threads are done with the step before the last one, so its place is free.
            fence_async_shared()
            step = start + i + AHEAD
            _fetch(
                *(codes_at, scales_at, exists, x_at, inside, step, step < end_step),
                *(codes_of[(i + AHEAD) % STAGES], scales_of[(i + AHEAD) % STAGES]),
                inputs[(i + AHEAD) % STAGES],
            )
            for u in gl.static_range(UNITS):
                words = codes_of[i].slice(u * THREADS, THREADS).load(WORDS)
                scale = scales_of[i].slice(u * THREADS, THREADS)
                new = _weights(words, scale.load(gl.SliceLayout(1, WORDS)), WARPS, A)
                sums = _wait(sums, weights)
                weights = new
                sums = _multiply(weights, inputs[i], sums, u)
    sums = _wait(sums, weights)
    async_copy.wait_group(0)  # results pass through the memory that the last copies fill with 0
    for u in gl.static_range(UNITS):
        _store(
            *(sums[u], bias, expert, order, out, first, end, block + u * WARPS, split),
            *(alpha, limit, OUT, GATED, SPLITS),
        )


@gluon.jit
def _woven_experts_kernel(
    x,
    codes,
    scales,
    bias,
    order,
    runs,
    out,
    alpha,
    limit,
    K: gl.constexpr,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    GATED: gl.constexpr,
    FEW: gl.constexpr,
    SIZES: gl.constexpr,
    WARPS: gl.constexpr,
    UNITS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    BY_TILE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply 16 * WARPS * UNITS rows of an expert's weights by a tile of pairs.

    The tile has FEW pairs, or twice as many, and so on: one of SIZES sizes.

    BY_TILE: programs of the second product start where those of the first have ended. They wait
    until the FIRST_PARTS programs of their own tile have stored their results and counted
    themselves in `runs`. The first product waits for the kernels before it, and only then lets the
    second start. So this one may read what they wrote.
    """
    if PDL:
        if GATED or not BY_TILE:
            run("griddepcontrol.wait;")
        if BY_TILE:
            run("griddepcontrol.launch_dependents;")
    PARTS: gl.constexpr = (OUT // 16 + WARPS * UNITS - 1) // (WARPS * UNITS)
    # Those of the first product, whose outputs are gates and ups of the second one's inputs.
    FIRST_PARTS: gl.constexpr = (2 * IN // 16 + WARPS * UNITS - 1) // (WARPS * UNITS)
    tile, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    if tile < gl.load(runs, volatile=True):
        runs += (1 + tile) * 4
        expert = gl.load(runs, volatile=True).to(gl.int64)
        first, end = gl.load(runs + 1, volatile=True), gl.load(runs + 2, volatile=True)
        # With uneven routing, some experts fill large tiles, and the tensor cores need not multiply
        # by the rows that others lack.
        given = (x, codes, scales, bias, order, out, alpha, limit, expert, first, end, part)
        pairs = end - first
        if PDL and BY_TILE and not GATED:
            while gl.atomic_add(runs + 3, 0, sem="acquire") < FIRST_PARTS:
                pass
            barrier()
        for i in gl.static_range(SIZES):
            least = FEW * 2**i // 2 if i > 0 else 0
            most = FEW * 2**i if i < SIZES - 1 else pairs
            if (pairs > least) & (pairs <= most):
                _multiply_tile(*given, K, OUT, IN, GATED, FEW * 2**i, WARPS, UNITS, STAGES, SPLITS)
        if PDL and BY_TILE and GATED:
            barrier()  # wait until all threads have stored
            gl.atomic_add(runs + 3, 1, sem="acq_rel")
    if PDL and BY_TILE and not GATED:
        # The kernels after this one rely on it that all before it have ended.
        run("griddepcontrol.wait;")
