"""Attention of decoding sequences over the paged KV cache: split-KV flash decoding in Triton.

The twin of `decode_attention` is the function of that name in layers/attention.py. For few rows,
`decode_attention_of_qkv` lets the same kernel do the work of qk_norm_rope_store first, so that no
kernel waits for another there.
attention_tiles.py explains tile, split and page. The host does not wait for the device. The shape
of a launch depends on B and W alone, so that a CUDA graph may replay it with other lengths.

Shapes: B sequences, H query heads, G KV heads, D head size, W block-table width.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.attention_tiles import (
    EMPTY,
    attend,
    load_tiles,
    padded_head_dim,
    score_factors,
    seen_of,
    slots_of,
    split_span,
    with_sink,
)
from nanovllm.backends.cuda.triton.dispatch import (
    admit_next,
    arrivals,
    cdiv,
    has_large_shared_memory,
    is_hopper,
    launch,
    next_power_of_2,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.e4m3 import PLAIN, how_to_decode
from nanovllm.backends.cuda.triton.elementwise import (
    columns_of_pairs,
    encode_scaled,
    head_norm_factor,
    normed_elements,
    rotated_elements,
)
from nanovllm.backends.cuda.triton.fp8_inputs import Rows, encoded, padded_rows, scale_for, shrunk
from nanovllm.backends.cuda.triton.prefix_attention import cut_prefix, prefix_kernel
from nanovllm.layers.attention import AttentionOptions, KVCache, PagedKV

MAX_SPLITS = 32
# The most rows that decode_attention_of_qkv takes. Measured on an H200, steps of Qwen3-0.6B with 8,
# 32 and 64 sequences take 5.5, 0.6 and 0.9 % less time than with two kernels. A layer of 8B with 96
# or 128 rows is as fast as with two, and with 160 and 256 it takes 1.6 and 3.4 us more.
MAX_QKV_ROWS = 64
HAS_TUPLES = hasattr(tl, "tuple")  # since Triton 3.3; decode_attention_of_qkv needs them
# With up to so many rows, a program holds its first tile before the queries are ready. On an H200,
# a layer of 8B with one row and 500 tokens then takes 27 us, and 30 without. With four rows it is
# as fast as without, and with eight, or with longer contexts, it is slower.
EARLY_ROWS = 2


class NormRopeStore(NamedTuple):
    """The arguments of qk_norm_rope_store that decode_attention_of_qkv takes, too."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos_sin: Tensor
    positions: Tensor
    slot_mapping: Tensor
    zero_centered: bool = False
    interleaved: bool = False


def decode_attention(
    q: Tensor,
    kv: PagedKV,
    options: AttentionOptions,
    *,
    shared_prefix_len: Tensor | None = None,
    out: Tensor | Rows | None = None,
    before: NormRopeStore | None = None,
) -> Any:
    """Attend with one query a sequence to its cached tokens: q [B, H, D] -> [B, H, D].

    Args:
        shared_prefix_len: [1] int32, the number of tokens in the leading blocks that all sequences
            share. These tokens are read once for all sequences.
        out: receives the result, if given. The row of a sequence of length 0 is not written. Rows
            [B, H D] in FP8 receive what `fp8_inputs.quantise` makes of the result, with a scale for
            each head.
        before: given if each row of q begins a row of qkv; what is done to that row first.
    """
    k_cache, v_cache, scales = kv.cache.k, kv.cache.v, kv.cache.scales
    lens, tables = kv.context_lens, kv.block_tables
    window = options.window
    # Windows see different parts of a prefix.
    shared = shared_prefix_len if window is None else None
    batch, num_heads, head_dim = q.shape
    page, groups = k_cache.shape[1:3]
    group = num_heads // groups
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    results, out_scales, in_whole_tiles = out, None, False
    if isinstance(out, Rows):
        results, out_scales = out.codes, out.scales
        assert out_scales is not None, "each head has a scale"
        in_whole_tiles = out_scales.shape[1] == padded_rows.fn(batch, True)
    longest = min(tables.shape[1] * page, window or tables.shape[1] * page)
    block_n, splits = _cut_contexts(q, kv.cache, longest, shared is not None)
    factors = score_factors(options)
    block_d = padded_head_dim(head_dim)
    how, warps, stages = PLAIN.value, 4, 2 if splits <= 8 else 3
    if scales is not None:
        block_d = max(block_d, 32)
        # With more warps, two of them would decode the same columns of V.
        how, warps, stages = how_to_decode(q.device), block_d // 32, 2
        if is_hopper(q.device) and head_dim == 128:
            stages = 3
            # Measured on an H200: of 256 sequences of 560 tokens, 128 of 800 and 64 of 4,000, one
            # warp that fetches two small tiles ahead takes 6 to 24 % less time than larger tiles.
            # As the block table is fetched before them, that takes five stages.
            if splits <= 4 and shared is None:
                block_n, warps, stages = 32, 1, 5
    sizes = (head_dim, block_d, page, block_n)
    strides = (q.stride(0), k_cache.stride(1), v_cache.stride(1), tables.stride(0))
    block_m, tiles, prefix_splits, prefix_warps = (
        cut_prefix(q, groups, scales is not None) if shared is not None else (0, 0, 0, 0)
    )
    parts = part_lse = None
    if splits + prefix_splits > 1:
        rows = (batch, groups, splits + prefix_splits, group)
        parts = torch.empty((*rows, head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    if shared is not None:
        prefix_kernel[(tiles, prefix_splits, groups)](
            *(q, k_cache, v_cache, scales, shared, tables, parts, part_lse),
            *(*factors, *strides[:3]),
            *(batch, splits, groups, group, block_m, *sizes, how),
            num_warps=prefix_warps,
            num_stages=3,
        )
    if scales is not None:
        v_cache = v_cache.view(torch.int32)  # words of four codes
        strides = (*strides[:2], v_cache.stride(1), strides[3])
    counters = arrivals(q.device) if splits > 1 else None
    assert counters is None or batch * groups <= len(counters)
    turning = (0, False, False)
    if before is not None:
        turning = before.cos_sin.shape[1], before.interleaved, before.zero_centered
    early = before is not None and scales is None and batch <= EARLY_ROWS
    # The product in FP8 that follows asks for its first weights when it starts. On an H200, a layer
    # of 8B with 4 to 128 rows takes 2 to 10 us less if it starts when keys and values are read.
    # Probably these drive the weights from the cache. With one row, and with weights in bfloat16 or
    # INT4, it costs up to 1.5 us.
    late = out_scales is not None and batch > EARLY_ROWS
    launch(
        _decode_kernel,
        (groups, splits, batch),
        *(q, k_cache, v_cache, scales, lens, shared, tables, results, out_scales, options.sinks),
        *(parts, part_lse, counters),
        *(before[:6] if before else (None, None, 0.0, None, None, None)),
        *(*factors, *strides, window or 0),
        *(
            groups,
            group,
            _tile_rows(group),
            *sizes,
            splits,
            prefix_splits,
            how,
            *turning,
            early,
            late,
            in_whole_tiles,
        ),
        num_warps=warps,
        num_stages=stages,
        **overlap(q),
    )
    return out


def decode_attention_of_qkv(
    qkv: Tensor,
    kv: PagedKV,
    options: AttentionOptions,
    before: NormRopeStore,
    out: Rows | None = None,
) -> Any:
    """Norm and rotate q and k, store k and v, and attend: [B, (H + 2G) D] -> [B, H, D].

    The result and the cache are those of qk_norm_rope_store and decode_attention, to the bit, if
    takes_qkv is true. qkv stays as it is.
    """
    groups, head_dim = kv.cache.k.shape[2:]
    q = qkv.view(len(qkv), -1, head_dim)[:, : -2 * groups]
    return decode_attention(q, kv, options, before=before, out=out)


def takes_qkv(rows: int, group: int, cache: KVCache, before: NormRopeStore) -> bool:
    """Tell whether decode_attention_of_qkv serves so many rows and so many queries a KV head."""
    fits = rows <= MAX_QKV_ROWS and group + 2 <= _tile_rows(group)  # a key and a value beside them
    # Otherwise a norm would sum the squares in another order than qk_norm_rope_store does, because
    # other threads would hold them.
    is_alike = before.q_weight is None or not before.interleaved
    is_alike &= cache.scales is None or cache.k.shape[3] > 64
    return HAS_TUPLES and fits and is_alike


def _tile_rows(group: int) -> int:
    """Return the rows of a tile of a group's queries: tensor cores take 16 at least."""
    return max(16, next_power_of_2(group))


def _cut_contexts(
    q: Tensor, cache: KVCache, longest: int, is_prefix_shared: bool
) -> tuple[int, int]:
    """Choose the tokens of a tile, and the number of splits of up to `longest` tokens."""
    block_n = 64 if q.shape[2] * q.element_size() <= 256 else 32
    splits = num_splits(len(q) * cache.k.shape[2], cdiv(longest, block_n), q.device)
    # Measured on an H200: with few splits, large tiles are read 1 to 3 % faster. Of many sequences,
    # most are short, and a large tile would be half empty.
    is_one_of_few = splits <= 4 and len(q) <= 256 and not is_prefix_shared
    if is_one_of_few and block_n == 64 and has_large_shared_memory(q.device):
        block_n = 128
    return block_n, splits


def num_splits(rows: int, tiles: int, device: torch.device) -> int:
    """Choose how many programs share the tiles of a row (a KV head of a sequence): a power of 2.

    Measured on an H200: four programs a multiprocessor hide the memory's latency. If there are so
    many rows already, up to 8 splits still even out sequences of different lengths, until there are
    8 programs a multiprocessor. There are never more splits than tiles. Rows are split only if
    there are at most 4 rows a multiprocessor, so each of them has a counter in `arrivals`.
    """
    processors = num_processors(device)
    splits = max(4 * processors // rows, min(8, 8 * processors // rows), 1)
    return min(1 << splits.bit_length() - 1, MAX_SPLITS, next_power_of_2(tiles))


# As of _qk_norm_rope_store_kernel, positions and slots are rows of one tensor.
@triton.jit(do_not_specialize=["positions", "slots"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    scales,
    lens,
    shared,
    tables,
    out,
    out_scales,
    sinks,
    parts,
    part_lse,
    arrivals,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    positions,
    slots,
    scale,
    cap,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
    HOW: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with one sequence's queries to one split of its tokens.

    The splits cover the tokens behind a shared prefix or within a window, else all tokens. The last
    program of a row that ends merges the row's parts, those of the prefix included.

    With `slots`, q is a row of qkv. Each program norms and rotates its queries. The program whose
    split has the newest token also stores the token's key and value, before it reads them. EARLY:
    before q is ready, the first tile of the split is loaded to registers. LATE: the next kernel may
    start when programs have read their last tiles. WHOLE: as in padded_rows.
    """
    group, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The query heads of a group share K and V. They are the rows of one tile, padded to the least
    # number of rows that tl.dot takes.
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    inside = (row < GROUP)[:, None] & (dim < D)[None, :]
    at = row[:, None] * D + dim[None, :]
    WIDTH: tl.constexpr = D if scales is None else D // 4  # of a head in v_cache
    q += seq.to(tl.int64) * q_stride
    k_cache += group * D
    v_cache += group * WIDTH
    tables += seq * table_stride
    if slots is None:
        wait_for_inputs(PDL, LATE)
    length, prefix = tl.load(lens + seq), 0
    if shared is not None:
        prefix = tl.load(shared)
    first_seen = 0
    if WINDOW:
        first_seen = tl.maximum(length - WINDOW, 0)
        prefix = first_seen // BLOCK_N * BLOCK_N  # skip the tiles that lie before the window
    span = split_span(length - prefix, SPLITS, BLOCK_N)
    begin = prefix + split * span
    end = tl.minimum(begin + span, length)
    tile = None
    if slots is None:
        query = tl.load(q + group * GROUP * D + at, mask=inside, other=0.0)
    else:
        # The rows after those of the queries are the newest token's key and its value.
        after = row - GROUP
        head = tl.where(after < 0, group * GROUP + row, (GROUP + after) * G + group)[:, None]
        is_head, is_q = (after < 2)[:, None], (after < 0)[:, None]
        # Ask for all but q, k and v while the kernel before computes them: see dispatch.py.
        slot, angles = tl.load(slots + seq), cos_sin + tl.load(positions + seq) * R
        weights, turn = None, None
        if q_weight is not None:
            weights = _load_norms(
                q_weight, k_weight, is_head, is_q, D, BLOCK_D, R, INTERLEAVED, BLOCK_M
            )
        if R > 0:
            turn = _load_turn(angles, is_head, BLOCK_D, R, INTERLEAVED, BLOCK_M)
        if EARLY:
            start = tl.where(begin < end, begin, 0)  # a split without tokens may have no page
            tile_slots = slots_of(tables, start, 0, length, PAGE, BLOCK_N)
            seen = seen_of(start, end, first_seen, BLOCK_N)
            key, value = load_tiles(
                k_cache, v_cache, tile_slots, seen, k_stride, v_stride, D, BLOCK_D
            )
        wait_for_inputs(PDL, LATE)
        heads, turned = _load_heads(
            q + head * D, is_head, weights, turn, eps, D, BLOCK_D, R, INTERLEAVED, ZERO_CENTERED
        )
        query = tl.where(inside, turned, 0.0)
    pair = seq.to(tl.int64) * G + group
    PARTS: tl.constexpr = SPLITS + PREFIX_SPLITS
    first = (pair * PARTS + split) * GROUP
    out += pair * GROUP * D
    scale_stride = padded_rows(tl.num_programs(2), WHOLE)  # from head to head
    if out_scales is not None:
        out_scales += group * GROUP * scale_stride + seq
    if begin < end:
        if slots is not None:
            if end == length:
                if slot >= 0:
                    is_v = (after == 1)[:, None]
                    newest = tl.where(is_v, heads, turned)
                    v_at = v_cache + slot * v_stride
                    if scales is not None:
                        v_at = v_at.to(k_cache.dtype)  # to bytes
                        scale_kv = tl.where(is_v, tl.load(scales + 1), tl.load(scales))
                        _, newest = encode_scaled(newest, scale_kv, HOW)
                    to = tl.where(is_v, v_at, k_cache + slot * k_stride) + dim[None, :]
                    tl.store(to, newest, mask=is_head & (after >= 0)[:, None] & (dim < D)[None, :])
                tl.debug_barrier()  # other threads load what was stored
                if EARLY:
                    is_newest = begin + tl.arange(0, BLOCK_N) == length - 1
                    new_key, new_value = load_tiles(
                        k_cache, v_cache, tile_slots, is_newest, k_stride, v_stride, D, BLOCK_D
                    )
                    key = tl.where(is_newest[None, :], new_key, key)  # loaded too early there
                    value = tl.where(is_newest[:, None], new_value, value)
        if EARLY:
            tile = key, value
        total, peak, acc = attend(
            query,
            k_cache,
            v_cache,
            scales,
            tables,
            begin,
            end,
            first_seen,
            scale,
            cap,
            k_stride,
            v_stride,
            D,
            PAGE,
            BLOCK_N,
            HOW,
            scales is not None,
            tile,
        )
        admit_next(0, LATE, PDL)
        if PARTS > 1:
            tl.store(parts + first * D + at, acc / total[:, None], mask=inside)
            tl.store(part_lse + first + row, peak + tl.log2(total), mask=row < GROUP)
        else:
            total = with_sink(total, peak, sinks, group * GROUP + row, row < GROUP)
            result = (acc / total[:, None]).to(query.dtype)
            _store_heads(result, out, out_scales, scale_stride, GROUP, D)
    if PARTS > 1:
        # Programs of splits without tokens end here, unless the prefix alone is to be merged.
        used = tl.cdiv(tl.maximum(length - prefix, 0), tl.maximum(span, 1))
        if split < tl.maximum(used, 1):
            tl.debug_barrier()  # wait until all threads have stored: other threads load the values
            is_last = True
            if SPLITS > 1:
                # The program that arrives last sees what the others wrote. It merges all parts in
                # the order of splits, so the order of arrival does not change the result.
                arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel")
                is_last = arrived == tl.maximum(used, 1) - 1
                tl.debug_barrier()
            if is_last:
                if SPLITS > 1:
                    tl.store(arrivals + pair, 0)
                if length > 0:
                    parts += pair * PARTS * GROUP * D
                    part_lse += pair * PARTS * GROUP
                    merged = _merge(
                        sinks,
                        group * GROUP,
                        parts,
                        part_lse,
                        used,
                        GROUP,
                        D,
                        BLOCK_D,
                        SPLITS,
                        PARTS,
                    )
                    merged = merged.to(query.dtype)
                    _store_heads(merged, out, out_scales, scale_stride, GROUP, D)


@triton.jit
def _store_heads(result, out, out_scales, scale_stride, GROUP: tl.constexpr, D: tl.constexpr):
    """Store a group's results, in FP8 if there is room for scales. Columns behind D are 0."""
    head = tl.arange(0, result.shape[0])
    # A thread stores 8 codes at a time. If it stored 16, it would load as many elements of a head,
    # and the head's norm would be summed in another order.
    dim = tl.max_contiguous(tl.arange(0, result.shape[1]), 8)
    if out_scales is not None:
        FP8: tl.constexpr = out.dtype.element_ty == tl.float8e4nv
        wide = result.to(tl.float32)
        scale = scale_for(tl.max(tl.abs(wide), axis=1))
        tl.store(out_scales + head * scale_stride, scale, mask=head < GROUP)
        result = encoded(shrunk(wide, scale[:, None], FP8), FP8)
    inside = (head < GROUP)[:, None] & (dim < D)[None, :]
    tl.store(out + head[:, None] * D + dim[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load_norms(
    q_weight,
    k_weight,
    is_head,
    is_q,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Load the weights of the norms of heads, by their columns and by their `_rotated_with`.

    is_head, is_q: [BLOCK_M, 1], which rows are heads, and which of them are queries.
    """
    col = _columns(BLOCK_M, BLOCK_D)
    weights = tl.where(is_q, q_weight, k_weight)
    other, _, _ = _rotated_with(col, R, INTERLEAVED)
    return (
        tl.load(weights + col, mask=is_head & (col < D), other=0.0),
        tl.load(weights + other, mask=is_head & (col < R), other=0.0),
    )


@triton.jit
def _load_turn(
    angles,
    is_head,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Load the cosine and sine of each column's angle. angles: the position's row of cos_sin."""
    col = _columns(BLOCK_M, BLOCK_D)
    turns = is_head & (col < R)
    _, angle, _ = _rotated_with(col, R, INTERLEAVED)
    return (
        tl.load(angles + angle, mask=turns, other=1.0),
        tl.load(angles + R // 2 + angle, mask=turns, other=0.0),
    )


@triton.jit
def _load_heads(
    at,
    is_head,
    weights,
    turn,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Load heads of a token, [BLOCK_M, BLOCK_D], and norm and rotate them. Returns both forms.

    The result is that of _qk_norm_rope_store_kernel, to the bit. That kernel holds pairs of
    elements. Here a thread also loads the elements that its own are rotated with, so that whole
    heads lie as tl.dot takes them, and no data goes from thread to thread.

    Args:
        at: [BLOCK_M, 1], where heads begin.
        is_head: [BLOCK_M, 1]; other rows are 0.
        weights: what _load_norms returns; None: there are no norms.
        turn: what _load_turn returns; None: R is 0.
    """
    col = _columns(at.shape[0], BLOCK_D)
    x = tl.load(at + col, mask=is_head & (col < D), other=0.0)
    y = x.to(tl.float32)
    if turn is not None:
        other, _, is_first = _rotated_with(col, R, INTERLEAVED)
        other_x = tl.load(at + other, mask=is_head & (col < R), other=0.0)
        other_y = other_x.to(tl.float32)
    if weights is not None:
        # The first elements of all pairs, then the second ones: in another order, sums may differ.
        HALF: tl.constexpr = BLOCK_D // 2
        is_col1 = col < HALF
        pair = tl.where(is_col1, col, col - HALF)
        col1, col2 = columns_of_pairs(pair, D, R, INTERLEAVED)
        in_half = is_head & (pair < D // 2)
        elements = tl.load(at + tl.where(is_col1, col1, col2), mask=in_half, other=0.0)
        x1, x2 = tl.where(is_col1, elements, 0.0), tl.where(is_col1, 0.0, elements)
        factor = head_norm_factor(x1, x2, D, eps)
        y = normed_elements(x, factor, weights[0], ZERO_CENTERED)
        if turn is not None:
            other_y = normed_elements(other_x, factor, weights[1], ZERO_CENTERED)
    if turn is not None:
        y = rotated_elements(y, other_y, turn[0], tl.where(is_first, -turn[1], turn[1]))
    return x, y.to(x.dtype)


@triton.jit
def _columns(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the column of each element of a tile. Loads at all of a tile's columns are alike."""
    return tl.broadcast_to(tl.arange(0, BLOCK_D)[None, :], [BLOCK_M, BLOCK_D])


@triton.jit
def _rotated_with(col, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the column that each column is rotated with, their angle, and whether it is first."""
    if INTERLEAVED:
        return col ^ 1, col // 2, col % 2 == 0
    else:
        is_first = col < R // 2
        angle = tl.where(is_first, col, col - R // 2)
        return tl.where(is_first, col + R // 2, angle), angle, is_first


@triton.jit
def _merge(
    sinks,
    first_head,
    parts,
    part_lse,
    used,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge a row's parts, each weighted by its share of the softmax's denominator.

    used: the number of splits that have parts. Those of a shared prefix may be empty.
    """
    head = tl.arange(0, triton.next_power_of_2(GROUP))
    dim = tl.arange(0, BLOCK_D)
    peak = tl.full(head.shape, EMPTY, tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    acc = tl.zeros([head.shape[0], BLOCK_D], tl.float32)
    # In this form no load waits for another one, and no sum crosses threads. Measured on an H200, a
    # sum over the parts, head by head, took 10 us of 16 parts of 4 heads of 256, and a sum part by
    # part, under the peak so far, 1.3 us.
    for part in tl.static_range(PARTS):
        lse, _ = _load_lse(part_lse, part, head, used, GROUP, SPLITS)
        peak = tl.maximum(peak, lse)
    for part in tl.static_range(PARTS):
        lse, is_part = _load_lse(part_lse, part, head, used, GROUP, SPLITS)
        at = (part * GROUP + head)[:, None] * D + dim[None, :]
        value = tl.load(parts + at, mask=is_part[:, None] & (dim < D)[None, :], other=0.0)
        weight = tl.exp2(lse - peak)
        total += weight
        acc += value * weight[:, None]
    total = with_sink(total, peak, sinks, first_head + head, head < GROUP)
    return acc / total[:, None]


@triton.jit
def _load_lse(part_lse, part: tl.constexpr, head, used, GROUP: tl.constexpr, SPLITS: tl.constexpr):
    """Load the logarithms of a part's denominators, and tell whether the part exists."""
    is_part = head < GROUP
    if part < SPLITS:
        is_part &= part * GROUP + head < used * GROUP
    lse = tl.load(part_lse + part * GROUP + head, mask=is_part, other=EMPTY)
    if part >= SPLITS:
        is_part &= lse > EMPTY
    return lse, is_part
