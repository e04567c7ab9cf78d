"""A mixture of experts in five kernels: route, sort, gate and up, down, sum.

A pair is a token and one of its experts. Pairs are sorted by expert, so that the pairs of an expert
are a run of rows. A run is cut into tiles of BLOCK_M rows. A program multiplies one tile by some
columns of its expert's weights. Only the device knows how many tiles there are. So the launch has
programs for the greatest possible number, and programs without a tile end at once. The host never
waits for the device, and a CUDA graph can hold the kernels.

Tiles of a single token would be nearly empty. For experts in FP8 and in MXFP4, moe_token.py and
woven_token.py have kernels for it, unless it shall get the bits that it gets among others.

Sizes need not be powers of two. Rows of a multiple of 16 bytes are read at full speed, others
slower.

Shapes: T tokens, K experts of a token, P = T K pairs, E experts, N width of a row, F width of an
expert.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton import moe_token
from nanovllm.backends.cuda.triton.dispatch import (
    cdiv,
    gpu,
    has_large_shared_memory,
    next_power_of_2,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.elementwise import gated
from nanovllm.backends.cuda.triton.moe_packed import (
    PackedExperts,
    SortedPairs,
    Tile,
    invariant_tile,
    multiply_packed,
    packed_tile,
    prepare_row,
    rows_for,
)
from nanovllm.backends.cuda.triton.router import PartialLogits
from nanovllm.layers.moe import ClampedSwiGLU

if TYPE_CHECKING:
    from nanovllm.backends.cuda.triton.woven_experts import WovenExperts

woven_experts: Any
woven_token: Any
try:
    from nanovllm.backends.cuda.triton import woven_experts, woven_token
except ImportError:  # older releases of Triton lack Gluon, or parts of it
    woven_experts = woven_token = None

# A program routes and sorts a chunk of tokens, by passes of 4 or 8 tokens.
MAX_CHUNKS = 256
COUNTED_CHUNKS = 32  # whose pairs a program counts at a time
# Tiles by the greatest number of pairs for each expert, measured on an H200.
TILES = (
    (4, Tile(16, 64, 128, 2, 4)),
    (16, Tile(32, 128, 128, 4, 3)),
    (64, Tile(64, 128, 64, 4, 4)),
    (float("inf"), Tile(128, 256, 64, 8, 4)),
)
SMALL_BLOCK_N = 128  # the most outputs of a tile on a GPU without large shared memory
# Bytes of shared memory that a program leaves to its other needs than its stages.
OTHER_BYTES = 2048
FLOAT32_TILE = Tile(16, 64, 32, 4, 3)  # tensor cores do not compute products of float32


def moe(
    x: Tensor,
    logits: Tensor | PartialLogits,
    *,
    gate_up: "Tensor | PackedExperts | WovenExperts",
    down: "Tensor | PackedExperts | WovenExperts",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    top_k: int,
    renormalize: bool,
    clamped: ClampedSwiGLU | None = None,
    added: tuple[Tensor, Tensor] | None = None,
    is_invariant: bool = False,
) -> Tensor:
    """Compute a mixture of experts as MixtureOfExperts does: x [T, N] -> [T, N].

    Args:
        logits: [T, E], the router's, which `partial_logits` may have computed.
        gate_up: [E, 2 F, N], plain, packed or woven.
        down: [E, N, F], of the same kind.
        gate_up_bias: [E, 2 F].
        down_bias: [E, N].
        top_k: experts of a token.
        renormalize: whether the weights of a token's experts are scaled to a sum of 1.
        clamped: the experts' gating; None: swiglu.
        added: gates [T, 1] and a result [T, N]; sigmoid(gates) * result is added to the sum.
        is_invariant: whether a token's result must not depend on the number of tokens.
    """
    out = torch.empty_like(x)
    (num_tokens, width), num_experts, expert_width = x.shape, logits.shape[-1], down.shape[-1]
    pairs = num_tokens * top_k
    if not pairs:
        return out
    # The kernels of no other kind of weights were shown to be invariant.
    assert not is_invariant or isinstance(gate_up, (Tensor, PackedExperts))
    is_alone = num_tokens == 1 and not is_invariant
    is_woven = not isinstance(gate_up, (Tensor, PackedExperts))
    if is_alone and is_woven and woven_token.suits(gate_up, down):
        row, preparation = woven_token.rows_for(x)
        weights, _, runs, _ = sort_by_expert(
            logits, x, top_k=top_k, renormalize=renormalize, block_m=1, preparation=preparation
        )
        hidden = x.new_empty(top_k, expert_width)
        woven_token.gated_products(row, gate_up, gate_up_bias, runs, hidden, clamped=clamped)
        woven_token.sum_products(hidden, down, down_bias, runs, weights, added, out)
        return out
    inputs: Any = x
    preparation = None
    tile: Any
    product: Any
    if isinstance(gate_up, PackedExperts):
        tile = packed_tile(gate_up, pairs / num_experts, x)
        if is_invariant:
            tile = invariant_tile(gate_up, tile)
        inputs, preparation = rows_for(x, gate_up)
    elif isinstance(gate_up, Tensor):
        tile = plain_tile(pairs / num_experts, x)
    else:
        tile = woven_experts.woven_tile(pairs / num_experts)
    weights, order, runs, max_tiles = sort_by_expert(
        logits,
        x,
        top_k=top_k,
        renormalize=renormalize,
        block_m=tile.rows,
        few=tile.rows // 2 if is_woven and tile.few else 0,
        preparation=preparation,
    )
    # The rows of `hidden` are in sorted order, those of `results` in the order of tokens.
    splits = tile.splits
    hidden = x.new_empty(pairs, expert_width)
    results = x.new_empty(pairs * splits, width, dtype=torch.float32 if splits > 1 else x.dtype)
    options: dict[str, Any] = dict(pairs=(order, runs, max_tiles), top_k=top_k, tile=tile)
    if isinstance(gate_up, PackedExperts) and isinstance(down, PackedExperts):
        if is_alone and moe_token.suits(x, gate_up):
            moe_token.gated_products(
                inputs, gate_up, gate_up_bias, runs, hidden, clamped=clamped, follows=down
            )
        else:
            multiply_packed(
                inputs, gate_up, gate_up_bias, hidden, clamped=clamped, follows=down, **options
            )
        multiply_packed(hidden, down, down_bias, results, **options)
    else:
        product = multiply if isinstance(gate_up, Tensor) else woven_experts.multiply_woven
        product(x, gate_up, gate_up_bias, hidden, clamped=clamped, is_gated=True, **options)
        product(hidden, down, down_bias, results, **options)
    _sum_kernel[(num_tokens, cdiv(width, 512))](
        results, weights, *(added or (None, None)), out, width, top_k, splits, 512, **overlap(x)
    )
    return out


def plain_tile(pairs: float, x: Tensor) -> Tile:
    """Choose the tile for so many pairs for each expert."""
    if x.dtype == torch.float32:
        return FLOAT32_TILE
    tile = next(tile for limit, tile in TILES if pairs <= limit)
    if not has_large_shared_memory(x.device):
        tile = tile._replace(outputs=min(tile.outputs, SMALL_BLOCK_N))
    return tile


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    pairs: SortedPairs,
    top_k: int,
    tile: Tile,
    is_gated: bool = False,
    clamped: ClampedSwiGLU | None = None,
) -> None:
    """Multiply each pair's row by its expert's weights [E, OUT, IN], into `out`.

    is_gated: whether rows are those of the tokens, and results are gated and in sorted order.
        Otherwise rows are in sorted order, and results in that of the tokens.
    """
    alpha, limit = (clamped.alpha, clamped.limit) if clamped else (None, None)
    block_k = min(tile.inputs, max(16, next_power_of_2(weight.shape[2])))
    stage = (tile.rows + tile.outputs) * block_k * x.element_size()
    stages = min(tile.stages, (gpu(x.device).shared_memory - OTHER_BYTES) // stage)
    order, runs, max_tiles = pairs
    _product_kernel[(max_tiles * cdiv(weight.shape[1], tile.outputs),)](
        *(x, weight, bias, order, runs, out, alpha, limit),
        *(top_k, *weight.shape[1:], is_gated, tile.rows, tile.outputs, block_k),
        num_warps=tile.warps,
        num_stages=stages,
        **overlap(x),
    )


def sort_by_expert(
    logits: Tensor | PartialLogits,
    x: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    block_m: int,
    few: int = 0,
    preparation: tuple[Any, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pick each token's experts, and sort the pairs by expert, those of an expert by token.

    The pairs of a single token stay in the order of their scores: each is a run.

    few: tiles of more pairs come first.
    preparation: the arguments of `rows_for`, whose rows are filled meanwhile.

    Returns:
        weights: [P] float32, of the pairs.
        order: [P] int32, the pairs in sorted order.
        runs: [1 + max_tiles, 4] int32. The first row begins with the number of tiles. Each further
            row has a tile's expert, its first index in `order`, the end of its run, and 0, where
            programs that have multiplied by the tile may be counted.
        max_tiles: the greatest possible number of tiles.
    """
    num_tokens, num_experts = logits.shape
    bias, splits = None, 0
    if isinstance(logits, PartialLogits):
        logits, bias = logits
        splits = len(logits)
    pairs = num_tokens * top_k
    max_tiles = (pairs + min(pairs, num_experts) * (block_m - 1)) // block_m
    chunk_tokens = 4 if num_tokens <= 4 * COUNTED_CHUNKS else 8
    passes = cdiv(num_tokens, chunk_tokens * MAX_CHUNKS)
    chunks = cdiv(num_tokens, chunk_tokens * passes)
    weights = torch.empty(pairs, dtype=torch.float32, device=x.device)
    places, order, counts, runs = (
        torch.empty(size, dtype=torch.int32, device=x.device)
        for size in (pairs, pairs, (chunks, num_experts), (1 + max_tiles, 4))
    )
    is_alone = num_tokens == 1
    block_e = next_power_of_2(num_experts)
    _route_kernel[(chunks + (num_tokens if preparation else 0),)](
        *(logits, bias, weights, places, counts, order, runs, num_tokens, passes, chunks),
        *(preparation or (x, *(None,) * 8)),
        *(splits, num_experts, top_k, renormalize, is_alone),
        1 if is_alone else chunk_tokens,
        block_e,
        next_power_of_2(top_k),
        **overlap(x),
    )
    if not is_alone:
        _sort_kernel[(chunks + 1,)](
            *(places, counts, order, runs, pairs, passes, chunks),
            *(num_experts, chunk_tokens * top_k, block_m, few),
            block_e,
            next_power_of_2(chunk_tokens * top_k),
            COUNTED_CHUNKS,
            num_warps=4,
            **overlap(x),
        )
    return weights, order, runs, max_tiles


@triton.jit(do_not_specialize=["T", "passes", "chunks"])
def _route_kernel(
    logits,
    bias,
    weights,
    places,
    counts,
    order,
    runs,
    T,
    passes,
    chunks,
    x,
    numbers,
    scales,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    SHARING: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Route a chunk of tokens; in programs after those of the chunks, prepare a row of inputs."""
    wait_for_inputs(PDL)
    chunk = tl.program_id(0)
    if chunk < chunks:
        # fmt: off
        _route(
            logits, bias, weights, places, counts, order, runs, T, passes, chunk,
            x.dtype.element_ty, SPLITS, E, K, RENORMALIZE, ALONE, BLOCK_T, BLOCK_E, BLOCK_K,
        )
        # fmt: on
    elif numbers is not None:
        prepare_row(chunk - chunks, x, numbers, scales, IN, PARTS, SHARING, GROUPS, BLOCK_G, BLOCK)


@triton.jit
def _route(
    logits,
    bias,
    weights,
    places,
    counts,
    order,
    runs,
    T,
    passes,
    chunk,
    dtype: tl.constexpr,
    SPLITS: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Pick experts for a chunk of tokens, and number the pairs of each expert within the chunk.

    A pair's place is its expert, and 2^16 times its number. ALONE: there is one token, whose pairs
    are sorted at once.

    SPLITS: the parts of the logits, which are added up and rounded as a linear layer does; 0: the
    logits are whole.
    """
    expert, pick = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    count = tl.zeros([BLOCK_E], tl.int32)
    for i in range(passes):
        token = ((chunk * passes + i) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
        inside = (token < T) & (expert < E)
        at = token * E + expert
        if SPLITS > 0:
            scores = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
            for split in tl.static_range(SPLITS):
                scores += tl.load(logits + split * T * E + at, mask=inside, other=float("-inf"))
            if bias is not None:
                scores += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)
            scores = scores.to(dtype)
        else:
            scores = tl.load(logits + at, mask=inside, other=float("-inf"))
        # Rows of padding may be NaN (see cuda/padded_forward.py). They get experts, too.
        keys = _keys(tl.where(scores == scores, scores, float("-inf")), expert)
        NONE: tl.constexpr = -(2**31) if keys.dtype == tl.int32 else -(2**63)
        best_scores = tl.full([BLOCK_T, BLOCK_K], float("-inf"), tl.float32)
        best_experts = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
        for k in tl.static_range(K):
            best = tl.max(keys, axis=1)[:, None]
            keys = tl.where(keys == best, NONE, keys)
            score, picked = _score_and_expert(best, scores.dtype)
            best_scores = tl.where(pick == k, score, best_scores)
            best_experts = tl.where(pick == k, picked, best_experts)
        scores = scores.to(tl.float32)
        peak = tl.max(best_scores, axis=1)[:, None]
        peak = tl.where(token < T, peak, 0.0)
        weight = tl.exp(best_scores - peak)
        weight /= _exact_sum(weight if RENORMALIZE else tl.exp(scores - peak))
        has_nan = tl.max((scores != scores).to(tl.int32), axis=1)[:, None] > 0
        weight = tl.where(has_nan, float("nan"), weight)
        is_pair = (token < T) & (pick < K)
        tl.store(weights + token * K + pick, weight, mask=is_pair)
        if ALONE:
            tl.store(order + pick, pick, mask=is_pair)
            tl.store(runs, K)
            tl.store(runs + 4 + 4 * pick, best_experts, mask=is_pair)
            tl.store(runs + 5 + 4 * pick, pick, mask=is_pair)
            tl.store(runs + 6 + 4 * pick, pick + 1, mask=is_pair)
            tl.store(runs + 7 + 4 * pick, 0, mask=is_pair)
        else:
            mine = ((keys == NONE) & (token < T)).to(tl.int32)
            number = tl.cumsum(mine, axis=0) - mine + count[None, :]
            place = best_experts
            for k in tl.static_range(K):
                picked = tl.sum(tl.where(pick == k, best_experts, 0), axis=1)[:, None]
                nth = tl.sum(tl.where(expert == picked, number, 0), axis=1)[:, None]
                place += tl.where(pick == k, nth << 16, 0)
            tl.store(places + token * K + pick, place, mask=is_pair)
            count += tl.sum(mine, axis=0)
    if not ALONE:
        at = counts + chunk * E + tl.arange(0, BLOCK_E)
        tl.store(at, count, mask=tl.arange(0, BLOCK_E) < E)


@triton.jit
def _exact_sum(numbers):
    """Sum each row of numbers from 0 to 1, in units of 2^-32.

    Sums of integers have no order. So a token gets the same weights, to the bit, by a tile of one
    token and by one of many.
    """
    units = (numbers * 4294967296.0).to(tl.int64)
    return tl.sum(units, axis=1)[:, None].to(tl.float32) / 4294967296.0


@triton.jit
def _keys(scores, expert):
    """Make integers that have the order of scores, and of equal ones that of experts, backwards."""
    if scores.dtype == tl.float32:
        bits = scores.to(tl.int32, bitcast=True)
        # The magnitude of negative numbers is inverted.
        key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        return (key << 32) | (0xFFFF - expert).to(tl.int64)
    else:
        bits = scores.to(tl.int16, bitcast=True).to(tl.int32)
        return ((bits ^ ((bits >> 31) & 0x7FFF)) << 16) | (0xFFFF - expert)


@triton.jit
def _score_and_expert(key, dtype: tl.constexpr):
    """Return the float32 score and the expert that a key was made of."""
    expert = 0xFFFF - (key & 0xFFFF).to(tl.int32)
    if dtype == tl.float32:
        bits = (key >> 32).to(tl.int32)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), expert
    else:
        bits = key >> 16
        bits = (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16)
        return bits.to(dtype, bitcast=True).to(tl.float32), expert


@triton.jit(do_not_specialize=["P", "passes", "chunks"])
def _sort_kernel(
    places,
    counts,
    order,
    runs,
    P,
    passes,
    chunks,
    E: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a chunk's pairs to their places in the order, or the tiles of all runs.

    There is a program for each chunk, which places at most PAIRS pairs a pass. One more program
    writes the tiles, those of more than FEW pairs before the others.
    """
    wait_for_inputs(PDL)
    chunk = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)  # pairs of the expert in earlier chunks
    for start in range(0, chunks, BLOCK_C):
        c = (start + tl.arange(0, BLOCK_C))[:, None]
        count = tl.load(
            counts + c * E + expert[None, :], mask=(c < chunks) & (expert < E)[None, :], other=0
        )
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where(c < chunk, count, 0), axis=0)
    run = tl.cumsum(total, axis=0) - total
    if chunk < chunks:
        first = run + before
        for i in range(passes):
            offset = tl.arange(0, BLOCK_P)
            pair = (chunk * passes + i) * PAIRS + offset
            inside = (offset < PAIRS) & (pair < P)
            place = tl.load(places + pair, mask=inside, other=0)
            mine = (place & 0xFFFF)[:, None] == expert[None, :]
            at = tl.sum(tl.where(mine, first[None, :], 0), axis=1) + (place >> 16)
            tl.store(order + at, pair, mask=inside)
    else:
        tiles = (total + BLOCK_M - 1) // BLOCK_M
        large = (total + BLOCK_M - 1 - FEW) // BLOCK_M
        small = tiles - large  # 0 or 1
        first_large = tl.cumsum(large, axis=0) - large
        first_small = tl.sum(large, axis=0) + tl.cumsum(small, axis=0) - small
        tl.store(runs, tl.sum(tiles, axis=0))
        for i in range(tl.max(tiles, axis=0)):
            at = runs + (1 + tl.where(i < large, first_large + i, first_small)) * 4
            tl.store(at, expert, mask=i < tiles)
            tl.store(at + 1, run + i * BLOCK_M, mask=i < tiles)
            tl.store(at + 2, run + total, mask=i < tiles)
            tl.store(at + 3, 0, mask=i < tiles)


@triton.jit
def _product_kernel(
    x,
    weight,
    bias,
    order,
    runs,
    out,
    alpha,
    limit,
    K: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a tile of rows by some columns of its expert's weights.

    With GATED, the rows are those of the tokens. The first half of the outputs are gates, the
    second half ups, and their gated product is written.
    """
    wait_for_inputs(PDL)
    # Neighbouring programs share their rows, or else their expert, so that shared data are read
    # from memory once.
    tile, part = tl.program_id(0) // tl.cdiv(OUT, BLOCK_N), tl.program_id(0) % tl.cdiv(OUT, BLOCK_N)
    if tile < tl.load(runs):
        runs += (1 + tile) * 4
        expert, first, end = tl.load(runs).to(tl.int64), tl.load(runs + 1), tl.load(runs + 2)
        place = first + tl.arange(0, BLOCK_M)
        inside = (place < end)[:, None]
        pair = tl.load(order + place, mask=place < end, other=0)
        source, target = (pair // K, place) if GATED else (place, pair)
        column = part * BLOCK_N + tl.arange(0, BLOCK_N)
        # Each gate's column comes right before that of its up, so that one thread holds both.
        row = column // 2 + column % 2 * (OUT // 2) if GATED else column
        k = tl.arange(0, BLOCK_K)
        x_at = x + source.to(tl.int64)[:, None] * IN + k[None, :]
        weight_at = weight + expert * OUT * IN + row[None, :] * IN + k[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, IN, BLOCK_K):
            if IN % BLOCK_K == 0 and OUT % BLOCK_N == 0:
                rows, weights = tl.load(x_at, mask=inside, other=0.0), tl.load(weight_at)
            else:
                in_row = start + k < IN
                rows = tl.load(x_at, mask=inside & in_row[None, :], other=0.0)
                weights = tl.load(
                    weight_at, mask=(column < OUT)[None, :] & in_row[:, None], other=0.0
                )
            total = tl.dot(rows, weights, total, input_precision="ieee")
            x_at += BLOCK_K
            weight_at += BLOCK_K
        if bias is not None:
            added = tl.load(bias + expert * OUT + row, mask=column < OUT, other=0.0)
            total += added.to(tl.float32)[None, :]
        result = total.to(out.dtype.element_ty)
        if GATED:
            gate, up = tl.split(result.reshape(BLOCK_M, BLOCK_N // 2, 2))
            result = gated(gate, up, alpha, limit)
            column = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        width = OUT // 2 if GATED else OUT
        out_at = out + target.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(out_at, result, mask=inside & (column < width)[None, :])


@triton.jit
def _sum_kernel(
    results,
    weights,
    gates,
    added,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        result = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            at = results + ((token * K + k) * SPLITS + split) * N + column
            result += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        total += result * tl.load(weights + token * K + k)
    if added is not None:
        more = tl.load(added + token * N + column, mask=inside, other=0.0).to(tl.float32)
        total += more * tl.sigmoid(tl.load(gates + token).to(tl.float32))
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=inside)
