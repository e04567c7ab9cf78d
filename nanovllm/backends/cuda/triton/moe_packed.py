"""The products of a mixture of experts whose weights are packed: FP8, MXFP4 or INT4.

Their twins are `Fp8Weight`, `Fp4Weight` and `IntegerWeight` in backends/quantised. A program
multiplies some rows of an expert's weights by a tile of tokens. The weights are the left operand of
the tensor cores, which may come from registers. So codes are decoded there, right where the tensor
cores take them, and no decoded weight is ever written to memory.

A tensor core takes pairs of numbers that are neighbours in a register. Codes are read as words of
16 bits, each of which holds PARTS codes. Decoding code i of two words gives such a pair. So a
product is the sum of PARTS products: that of the words' first codes and the columns 0, PARTS,
2 PARTS... of the inputs, that of their second codes and the columns after those, and so on. Inputs
are reordered for it once: [rows, columns] becomes [rows, PARTS, columns / PARTS].

- FP8, with inputs in FP8: tensor cores multiply the codes, PARTS is 1. Hopper's tensor cores add up
  products of FP8 in few bits, so the sum of each BLOCK of columns is added to a total in float32,
  multiplied by the scales of weights and inputs.
- FP8 otherwise, or on a GPU without it: PARTS is 2. Codes become numbers of the inputs' dtype,
  which holds them without loss. Sums are multiplied by the scales.
- MXFP4 and INT4: PARTS is 4. The decoded numbers are multiplied by their scales.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.decoding import E2M1_UNIT, decoded, factor_of, offset_of
from nanovllm.backends.cuda.triton.dispatch import (
    cdiv,
    gpu,
    has_large_shared_memory,
    is_hopper,
    needs_register_limit,
    next_power_of_2,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.elementwise import gated
from nanovllm.backends.cuda.triton.fp8_inputs import encoded, has_fp8, scale_for, shrunk
from nanovllm.layers.moe import ClampedSwiGLU


class PackedExperts(NamedTuple):
    """The weights of all experts for one product: numbers [E, OUT, IN] in few bits."""

    kind: str  # "e4m3", "e2m1" or "int4"
    codes: Tensor  # [E, OUT, bytes or words of a row]
    scales: Tensor  # [E, OUT, groups of columns]
    group: int  # columns that share a scale
    # How many inputs share a scale, where they are quantised to FP8. None: they are not.
    sharing: int | None = None
    block_rows: int = 1  # rows that share scales, counted from the first
    zeros: Tensor | None = None  # [E, OUT, groups], uint8: the code of 0; None: 8

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs and inputs of an expert."""
        codes_per_item = {"e4m3": 1, "e2m1": 2, "int4": 8}[self.kind]
        return self.codes.shape[1], self.codes.shape[2] * codes_per_item

    @property
    def parts(self) -> int:
        """The number of codes in a word of 16 bits; 1: tensor cores take the codes as they are."""
        if self.kind != "e4m3":
            return 4
        return 1 if self.sharing and has_fp8(self.codes.device) else 2

    @property
    def words(self) -> Tensor:
        """The codes as the kernels take them."""
        return self.codes if self.parts == 1 else self.codes.view(torch.int16)


class Rows(NamedTuple):
    """Inputs as a product takes them."""

    numbers: Tensor  # [rows, PARTS, IN / PARTS]: FP8, or the dtype of the inputs
    scales: Tensor | None  # [rows, groups] float32, if the inputs are quantised


def rows_for(x: Tensor, weight: PackedExperts) -> tuple[Rows, tuple[Any, ...]]:
    """Make room for inputs [rows, IN] as a product with the weight takes them.

    Returns the rows, and the arguments of `prepare_row`, which fills them, but for the row.
    """
    count, width = x.shape
    parts, sharing = weight.parts, weight.sharing
    dtype = torch.float8_e4m3fn if parts == 1 else x.dtype
    numbers = torch.empty(count, parts, width // parts, dtype=dtype, device=x.device)
    groups = cdiv(width, sharing or width)
    scales = None
    if sharing:
        scales = torch.empty(count, groups, dtype=torch.float32, device=x.device)
    block = next_power_of_2(sharing or width)
    sizes = width, parts, sharing or width, groups, next_power_of_2(groups), block
    return Rows(numbers, scales), (x, numbers, scales, *sizes)


def prepare(x: Tensor, weight: PackedExperts, top_k: int = 1) -> Rows:
    """Quantise and reorder inputs [rows, IN] as a product with the weight takes them.

    top_k: how many rows belong to a token.
    """
    rows, arguments = rows_for(x, weight)
    _prepare_kernel[(len(x),)](*arguments, **overlap(x, top_k))
    return rows


@triton.jit
def _prepare_kernel(
    x,
    numbers,
    scales,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    SHARING: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    prepare_row(row, x, numbers, scales, IN, PARTS, SHARING, GROUPS, BLOCK_G, BLOCK)


WOVEN = tl.constexpr(0)  # PARTS of inputs in the order of woven_token.py


@triton.jit
def woven_place(column):
    """Return the place of an input for woven_token.py: what a thread needs lies side by side.

    Of 64 columns, a thread needs two neighbours of every eight.
    """
    return column // 64 * 64 + column % 8 // 2 * 16 + column % 64 // 8 * 2 + column % 2


@triton.jit
def prepare_row(
    row,
    x,
    numbers,
    scales,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    SHARING: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = row.to(tl.int64)
    group, inside = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK)
    column = group[:, None] * SHARING + inside[None, :]
    mask = (inside < SHARING)[None, :] & (column < IN)
    value = tl.load(x + row * IN + column, mask=mask, other=0.0)
    if scales is not None:
        value = value.to(tl.float32)
        scale = scale_for(tl.max(tl.abs(value), axis=1))
        # A maximum may pass over NaN, and values that are NaN stay NaN.
        tl.store(scales + row * GROUPS + group, scale, mask=group < GROUPS)
        FP8: tl.constexpr = numbers.dtype.element_ty == tl.float8e4nv
        value = encoded(shrunk(value, scale[:, None], FP8), FP8).to(numbers.dtype.element_ty)
    if PARTS == WOVEN:
        place = woven_place(column)
    else:
        place = column if PARTS == 1 else column % PARTS * (IN // PARTS) + column // PARTS
    tl.store(numbers + row * IN + place, value, mask=mask)


# The order, runs and max_tiles of sort_by_expert.
SortedPairs = Sequence[Any]


class Tile(NamedTuple):
    """The tiling of a product: how it is cut into programs."""

    rows: int  # pairs of token and expert
    outputs: int
    inputs: int  # that a step takes
    warps: int
    stages: int
    splits: int = 1  # programs that share the inputs of a product
    least_outputs: int = 32  # outputs are halved down to these while programs are too few


# Tiles by kind and by the greatest number of pairs for each expert, measured on an H200.
TILES = {
    "e4m3": (
        (1, Tile(16, 64, 128, 4, 6)),
        (14, Tile(16, 128, 128, 4, 4)),
        (32, Tile(32, 128, 128, 4, 3)),
        (float("inf"), Tile(64, 128, 128, 4, 3)),
    ),
    "e2m1": (
        (0.2, Tile(16, 64, 256, 4, 3, 3)),
        (12, Tile(16, 64, 256, 4, 3)),
        (28, Tile(32, 128, 256, 4, 3)),
        (64, Tile(64, 128, 128, 4, 3)),
        (float("inf"), Tile(128, 128, 128, 4, 3)),
    ),
    "int4": (
        (0.1, Tile(16, 64, 256, 4, 3, 2)),
        (1, Tile(16, 64, 256, 4, 4)),
        (8, Tile(16, 64, 256, 4, 3)),
        (32, Tile(32, 128, 256, 4, 4)),
        (float("inf"), Tile(128, 128, 128, 4, 3)),
    ),
}
SMALL_TILE = Tile(64, 128, 128, 8, 4, 8)  # the most on a GPU without large shared memory
OTHER_BYTES = 4096  # of shared memory that a program leaves to its other needs than its stages
LARGEST_BLOCK = 128  # the most outputs of a tile
LEAST = 32  # words that a step takes, as tensor cores take so many codes of FP8
FLOAT32_TILE = Tile(16, 32, 64, 4, 2)  # tensor cores do not compute products of float32


def packed_tile(weight: PackedExperts, pairs: float, x: Tensor) -> Tile:
    """Choose the tile for so many pairs for each expert."""
    if x.dtype == torch.float32:
        return FLOAT32_TILE
    tile = next(tile for limit, tile in TILES[weight.kind] if pairs <= limit)
    if weight.kind == "int4" and not is_hopper(x.device):
        tile = tile._replace(splits=1)  # elsewhere, programs that share columns spill (Triton 3.6)
    if not has_large_shared_memory(x.device):
        tile = Tile(*map(min, tile, SMALL_TILE))
        if tile.rows == SMALL_TILE.rows:
            tile = tile._replace(warps=SMALL_TILE.warps)
    elif weight.parts == 1 and tile.rows == 32 and not is_hopper(x.device):
        # Blackwell's tensor cores leave their sums elsewhere: the registers of 4 warps do not
        # suffice for two of them (48 bytes a thread are spilled; Triton 3.6).
        tile = tile._replace(warps=8)
    return tile


def invariant_tile(weight: PackedExperts, tile: Tile) -> Tile:
    """Change a tile so that every tile of the weight sums in the same order.

    A step's inputs decide the order of a sum. Tiles of fewer than 64 outputs cannot multiply in
    FP8: Triton converts their numbers to float16, and sums have more bits.
    """
    least = 64 if weight.kind == "e4m3" else tile.least_outputs
    return tile._replace(inputs=128, splits=1, least_outputs=least)


def multiply_packed(
    x: Tensor | Rows,
    weight: PackedExperts,
    bias: Tensor | None,
    out: Tensor,
    *,
    pairs: SortedPairs,
    top_k: int,
    tile: Tile,
    follows: PackedExperts | None = None,
    clamped: ClampedSwiGLU | None = None,
) -> None:
    """Multiply each pair's row by its expert's weights, into `out`.

    x: inputs, or what `prepare` makes of them.
    follows: the weights of the second product, in the first. Then rows are those of the tokens, and
        results are gated and in sorted order. Otherwise rows are in sorted order, and results in
        that of the tokens.
    """
    is_gated = follows is not None
    parts_of_out = follows.parts if follows is not None and not follows.sharing else 1
    order, runs, max_tiles = pairs
    outputs, inputs = weight.shape
    results = outputs // 2 if is_gated else outputs
    parts, group, sharing = weight.parts, weight.group, weight.sharing
    if isinstance(x, Tensor):
        # The first product wrote its results as the second takes them, but for what is quantised.
        x = prepare(x, weight, top_k) if is_gated or sharing else Rows(x, None)
    rows = x
    words = min(tile.inputs // parts, max(LEAST, next_power_of_2(inputs // parts)))
    # A step's columns are a part of a group, or whole groups if the numbers have the scales.
    for size in (group, sharing):
        is_power = size is not None and size & -size == size
        if size and size < inputs and not (is_power and weight.kind != "e4m3"):
            words = min(words, (size & -size) // parts)
    # There shall be enough programs to keep the device busy.
    block_n, enough = tile.outputs, 2 * num_processors(out.device)
    while (
        block_n > tile.least_outputs and tile.splits * max_tiles * cdiv(outputs, block_n) < enough
    ):
        block_n //= 2
    block = block_n // 2 if is_gated else block_n
    # The scales of all tiles are multiplied in the same order, so that a row's result does not
    # depend on the tile.
    largest = LARGEST_BLOCK // 2 if is_gated else LARGEST_BLOCK
    uniform = weight.block_rows % largest == 0 and results % weight.block_rows == 0
    # The tensor cores' left operand has 64 rows or more, their right one as few as 8. And a thread
    # has many columns of a sum, of few rows: few scales, if the columns' are the same.
    swapped = parts > 1 or tile.rows < 64
    code_bytes, number_bytes = weight.words.element_size(), rows.numbers.element_size()
    stage = words * (block_n * code_bytes + tile.rows * parts * number_bytes)
    stages = max(1, min(tile.stages, (gpu(out.device).shared_memory - OTHER_BYTES) // stage))
    registers = None
    if weight.kind == "int4" and tile.rows == 16 and needs_register_limit(out.device):
        registers = 96  # with so many, five programs fit a multiprocessor
    alpha, limit = (clamped.alpha, clamped.limit) if clamped else (None, None)
    splits = tile.splits
    sums = out
    if splits > 1:
        assert weight.kind != "e4m3"
        if is_gated:
            sums = torch.empty(len(out) * splits, outputs, dtype=torch.float32, device=out.device)
    _packed_product_kernel[(max_tiles * cdiv(results, block), splits)](
        *(rows.numbers, rows.scales, weight.words, weight.scales, weight.zeros, bias),
        *(order, runs, sums, alpha, limit),
        *(top_k, outputs, inputs, weight.kind, parts, group, weight.scales.shape[-1]),
        *(sharing or 0, is_gated, parts_of_out, uniform, swapped, tile.rows, block_n, words),
        splits,
        num_warps=tile.warps if block_n >= 64 else 4,
        num_stages=stages,
        maxnreg=registers,
        **overlap(out, top_k),
    )
    if splits > 1 and is_gated:
        _gate_kernel[(len(out), cdiv(results, 512))](
            *(sums, out, alpha, limit, results, splits, parts_of_out, 512), **overlap(out, top_k)
        )


@triton.jit
def _packed_product_kernel(
    x,
    x_scales,
    codes,
    scales,
    zeros,
    bias,
    order,
    runs,
    out,
    alpha,
    limit,
    K: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARING: tl.constexpr,
    GATED: tl.constexpr,
    PARTS_OF_OUT: tl.constexpr,
    UNIFORM: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_N rows of an expert's weights by a tile of BLOCK_M pairs.

    With GATED, the first half of an expert's rows are gates, the second half ups. A program takes
    as many of both, and writes their gated product.

    With SPLITS above 1, as many programs share the columns of the inputs. Each writes its sums as
    they are: rows pair * SPLITS + split, and with GATED the gates before the ups.
    """
    wait_for_inputs(PDL)
    RESULTS: tl.constexpr = OUT // 2 if GATED else OUT
    BLOCK: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # results of a program
    WORDS: tl.constexpr = IN // PARTS
    # Neighbouring programs share their tokens, or else their expert, so that shared data are read
    # from memory once.
    tile, part = (
        tl.program_id(0) // tl.cdiv(RESULTS, BLOCK),
        tl.program_id(0) % tl.cdiv(RESULTS, BLOCK),
    )
    if tile < tl.load(runs):
        runs += (1 + tile) * 4
        expert, first, end = tl.load(runs).to(tl.int64), tl.load(runs + 1), tl.load(runs + 2)
        place = first + tl.arange(0, BLOCK_M)
        inside = place < end
        pair = tl.load(order + place, mask=inside, other=0)
        source, target = ((pair // K) if GATED else place).to(tl.int64), place if GATED else pair
        n = tl.arange(0, BLOCK_N)
        # Eight gates come before their eight ups: then one thread holds a gate and its up.
        result = part * BLOCK + (n // 16 * 8 + n % 8 if GATED else n)
        result = tl.minimum(result, RESULTS - 1)
        row = expert * OUT + result + (n // 8 % 2 * RESULTS if GATED else 0)
        # A block of rows has the same scales, of which one is read.
        first_row = expert * OUT + part * BLOCK
        scale_at = scales + (first_row if UNIFORM else row) * GROUPS
        HAS_ZEROS: tl.constexpr = zeros is not None
        if HAS_ZEROS:
            zero_at = zeros + row * GROUPS
        X_GROUPS: tl.constexpr = (IN + SHARING - 1) // SHARING if SHARING > 0 else 1
        if SHARING > 0:
            x_scale_at = x_scales + source * X_GROUPS
        SHARE: tl.constexpr = tl.cdiv(tl.cdiv(WORDS, BLOCK_W), SPLITS) * BLOCK_W
        split = tl.program_id(1) if SPLITS > 1 else 0
        begin = split * SHARE
        word = begin + tl.arange(0, BLOCK_W)
        at = codes + row[:, None] * WORDS + word[None, :]
        x_at = x + source[None, :] * IN + word[:, None]
        total = tl.zeros([BLOCK_N, BLOCK_M] if SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
        # Scales are loaded before they are needed: those of numbers two steps, others one.
        if KIND != "e4m3":
            scale = _load_groups(scale_at, begin, PARTS, GROUP, GROUPS, BLOCK_W)
            factor = factor_of(scale, KIND, x.dtype.element_ty)
            scale = _load_groups(scale_at, begin + BLOCK_W, PARTS, GROUP, GROUPS, BLOCK_W)
            if HAS_ZEROS:
                zero = _load_groups(zero_at, begin, PARTS, GROUP, GROUPS, BLOCK_W)
                offset = offset_of(zero, x.dtype.element_ty)
                zero = _load_groups(zero_at, begin + BLOCK_W, PARTS, GROUP, GROUPS, BLOCK_W)
        else:
            scale = _scales_of_rows(scale_at, 0, GATED, UNIFORM, RESULTS * GROUPS, BLOCK_N)
            if SHARING > 0:
                x_scale = tl.load(x_scale_at, mask=inside, other=0.0)
        for step in range(0, SHARE if SPLITS > 1 else WORDS, BLOCK_W):
            start = begin + step
            in_row = word < WORDS - step
            if WORDS % (BLOCK_W * SPLITS) == 0:
                words = tl.load(at)
            else:
                # A float, since integers have no cast to FP8.
                words = tl.load(at, mask=in_row[None, :], other=0.0)
            factors, offsets = None, None
            if KIND == "int4" and not HAS_ZEROS:
                offsets = offset_of(tl.full([1, BLOCK_W], 8, tl.int32), x.dtype.element_ty)
            if KIND != "e4m3":
                factors = _spread(factor, BLOCK_W)
                factor = factor_of(scale, KIND, x.dtype.element_ty)
                following = start + 2 * BLOCK_W
                scale = _load_groups(scale_at, following, PARTS, GROUP, GROUPS, BLOCK_W)
                if HAS_ZEROS:
                    offsets = _spread(offset, BLOCK_W)
                    offset = offset_of(zero, x.dtype.element_ty)
                    zero = _load_groups(zero_at, following, PARTS, GROUP, GROUPS, BLOCK_W)
                sum = total
            else:
                sum = tl.zeros_like(total)
            for i in tl.static_range(PARTS):
                numbers = tl.load(
                    x_at + i * WORDS, mask=in_row[:, None] & inside[None, :], other=0.0
                )
                weights = decoded(words, factors, offsets, i, KIND, PARTS, x.dtype.element_ty)
                if SWAPPED:
                    sum = tl.dot(weights, numbers, sum, input_precision="ieee")
                else:
                    sum = tl.dot(numbers.T, weights.T, sum, input_precision="ieee")
            if KIND == "e4m3":
                column = tl.minimum(start + BLOCK_W, WORDS - 1) * PARTS
                if X_GROUPS > 1:
                    sum *= x_scale[None, :] if SWAPPED else x_scale[:, None]
                    x_scale = tl.load(x_scale_at + column // SHARING, mask=inside, other=0.0)
                if GROUPS > 1:
                    sum *= scale[:, None] if SWAPPED else scale[None, :]
                    scale = _scales_of_rows(
                        scale_at, column // GROUP, GATED, UNIFORM, RESULTS * GROUPS, BLOCK_N
                    )
                total += sum
            else:
                total = sum
            at += BLOCK_W
            x_at += BLOCK_W
        if X_GROUPS == 1 and SHARING > 0:
            total *= x_scale[None, :] if SWAPPED else x_scale[:, None]
        if GROUPS == 1 and KIND == "e4m3":
            total *= scale[:, None] if SWAPPED else scale[None, :]
        if not SWAPPED:
            total = total.T
        if KIND == "e2m1" and x.dtype.element_ty == tl.bfloat16:
            total *= 1 / E2M1_UNIT
        if bias is not None:
            added = tl.load(bias + row).to(tl.float32)
            if SPLITS > 1:  # one of the programs adds it
                added = tl.where(split == 0, added, 0.0)
            total += added[:, None]
        value = total.to(out.dtype.element_ty)
        if GATED and SPLITS > 1:
            out_at = out + (target * SPLITS + split).to(tl.int64)[None, :] * OUT
            tl.store(out_at + (row - expert * OUT)[:, None], value, mask=inside[None, :])
        else:
            if GATED:
                pairs = value.reshape(BLOCK_N // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1)
                gate, up = tl.split(pairs)
                value = gated(gate, up, alpha, limit).reshape(BLOCK, BLOCK_M)
            result = part * BLOCK + tl.arange(0, BLOCK)
            at = result % PARTS_OF_OUT * (RESULTS // PARTS_OF_OUT) + result // PARTS_OF_OUT
            out_at = out + (target * SPLITS + split).to(tl.int64)[None, :] * RESULTS + at[:, None]
            tl.store(out_at, value, mask=inside[None, :] & (result < RESULTS)[:, None])


@triton.jit
def _gate_kernel(
    sums,
    out,
    alpha,
    limit,
    RESULTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS_OF_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up what SPLITS programs wrote of a row, and gate it."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    result = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = result < RESULTS
    gate, up = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = sums + (row * SPLITS + split) * 2 * RESULTS + result
        gate += tl.load(at, mask=inside, other=0.0)
        up += tl.load(at + RESULTS, mask=inside, other=0.0)
    dtype = out.dtype.element_ty
    value = gated(gate.to(dtype), up.to(dtype), alpha, limit)
    at = result % PARTS_OF_OUT * (RESULTS // PARTS_OF_OUT) + result // PARTS_OF_OUT
    tl.store(out + row * RESULTS + at, value, mask=inside)


@triton.jit
def _scales_of_rows(
    at,
    group,
    GATED: tl.constexpr,
    UNIFORM: tl.constexpr,
    UPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Load the scales of a group of columns: at [rows] -> [rows].

    UNIFORM: the rows share their scales, those of gates and those of ups: `at` is one address.
    UPS: how far the scales of ups are from those of gates.
    """
    if not UNIFORM:
        return tl.load(at + group)
    scale = tl.load(at + group)
    if GATED:
        is_up = tl.arange(0, BLOCK_N) // 8 % 2 == 1
        return tl.where(is_up, tl.load(at + group + UPS), scale)
    return tl.full([BLOCK_N], 1.0, tl.float32) * scale


@triton.jit
def _load_groups(
    at,
    start,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Load what the groups of BLOCK_W words have: at [rows] -> [rows, groups]."""
    # If there is but one group, it may be shorter than a step.
    COUNT: tl.constexpr = 1 if GROUPS == 1 else (BLOCK_W * PARTS + GROUP - 1) // GROUP
    group = (0 if GROUPS == 1 else start * PARTS // GROUP) + tl.arange(0, COUNT)
    return tl.load(at[:, None] + group[None, :], mask=(group < GROUPS)[None, :], other=0)


@triton.jit
def _spread(values, BLOCK_W: tl.constexpr):
    """Give each word the value of its group: [rows, groups] -> [rows, BLOCK_W]."""
    ROWS: tl.constexpr = values.shape[0]
    COUNT: tl.constexpr = values.shape[1]
    spread = tl.broadcast_to(values[:, :, None], (ROWS, COUNT, BLOCK_W // COUNT))
    return spread.reshape(ROWS, BLOCK_W)
