"""Attention whose result for a token does not depend on the step that computes it.

Two kernels, one for prompt chunks and one for decoding sequences, compute a token's result by the
same operations in the same order:

- A sequence's keys are cut into segments of SEGMENT tokens, from its first token on. Each segment
  has an online softmax of its own, over tiles of keys at fixed places. The segments' results are
  merged in order. So it does not matter which segments one program reads.
- Both kernels use tiles of as many keys. Tensor cores add up products in an order that does not
  depend on the rows of a tile (see invariant_linear.py). The weights of the softmax are added up as
  integers, whose sum does not depend on the order. A row is a token and one of the query heads that
  share a KV head.
- A tile whose keys a query does not see changes nothing in its sums, to the bit: its weights are 0,
  and the sums are multiplied by 1.

Prefixes that several sequences share are read once for each of them.

Shapes: B sequences, P tokens of N prompt chunks, H query heads, G KV heads, D head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.attention_tiles import (
    EMPTY,
    load_tiles,
    padded_head_dim,
    score_factors,
    score_tile,
    slot_of,
    slots_of,
    with_sink,
)
from nanovllm.backends.cuda.triton.decode_attention import num_splits
from nanovllm.backends.cuda.triton.dispatch import (
    arrivals,
    cdiv,
    launch,
    next_power_of_2,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.prefill_attention import (
    TILED_KEYS,
    TiledPrefill,
    describe_keys,
    suits_tiles,
)
from nanovllm.layers.attention import AttentionOptions, PackedKV, PagedKV
from nanovllm.layers.context import PrefillMetadata

BLOCK_M = 64  # rows of a tile of a chunk's queries
# Keys of a segment, a multiple of any tile of keys. In a decode step of one sequence, a program has
# one segment: with 128, a layer of Qwen3-0.6B took 21.9 us on an H200 (930 tokens), and 23.6 us
# with 256. Attention in prompts of 1,024 and 4,096 tokens took 4 to 5 % longer.
SEGMENT = 128
# A tile is asked for when its slots are known, so 5 stages fetch two tiles ahead, and 3 only one.
# Measured on an H100: in a decode step of Qwen3-0.6B's shape, whose keys are no longer in the cache
# of the GPU, 5 save 2.7 us a layer for one sequence of 400 tokens, and 3.1 us for 64 of 3,100.
DECODE_STAGES = 5


def prefill_attention(
    q: Tensor,
    kv: PagedKV | PackedKV,
    metadata: PrefillMetadata,
    options: AttentionOptions,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attend within prompt chunks, causally: q [P, H, D] -> [P, H, D].

    The function of that name in prefill_attention.py explains the arguments.
    """
    num_heads, head_dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tables, page = None, 0
    if isinstance(kv, PagedKV):
        tables, page = kv.block_tables, kv.cache.k.shape[1]
        k, v = kv.cache.k.flatten(0, 1), kv.cache.v.flatten(0, 1)  # [slots, G, D]
    else:
        k, v = kv.k, kv.v
    groups = k.shape[1]
    group = num_heads // groups
    heads, blocks = _cut_heads(group)
    tokens = BLOCK_M // heads
    block_n, warps, stages = _choose_tiles(q)
    is_tiled = bool(page) or metadata.max_seqlen_k >= TILED_KEYS
    is_tiled = is_tiled and suits_tiles(k, v, page, block_n)
    k_tiles = describe_keys(k, block_n) if is_tiled else None
    v_tiles = describe_keys(v, block_n) if is_tiled else None
    query_tiles = metadata.query_tiles if isinstance(metadata, TiledPrefill) else None
    if query_tiles is not None:
        programs = len(query_tiles) * heads, groups * blocks, 1
    else:
        chunks = len(metadata.cu_seqlens_q) - 1
        programs = cdiv(metadata.max_seqlen_q, tokens), groups * blocks, chunks
    launch(
        _prefill_kernel,
        programs,
        *(q, k, v, k_tiles, v_tiles, out, options.sinks),
        *(metadata.cu_seqlens_q, metadata.cu_seqlens_k, tables, query_tiles),
        *score_factors(options),
        *(q.stride(0), k.stride(0), v.stride(0), out.stride(0)),
        tables.stride(0) if tables is not None else 0,
        *(options.window or 0, group, heads, head_dim, padded_head_dim(head_dim), page),
        *(BLOCK_M, block_n, SEGMENT),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def decode_attention(
    q: Tensor,
    kv: PagedKV,
    options: AttentionOptions,
    *,
    shared_prefix_len: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with one query a sequence to its cached tokens: q [B, H, D] -> [B, H, D].

    Each sequence reads a prefix that it shares by itself: `shared_prefix_len` is not used. The row
    of a sequence of length 0 is not written to `out`.
    """
    k, v = kv.cache.k.flatten(0, 1), kv.cache.v.flatten(0, 1)  # [slots, G, D]
    lens, tables, page = kv.context_lens, kv.block_tables, kv.cache.k.shape[1]
    batch, num_heads, head_dim = q.shape
    groups = k.shape[1]
    group = num_heads // groups
    heads, blocks = _cut_heads(group)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    block_n, warps, _ = _choose_tiles(q)
    longest = tables.shape[1] * page
    if options.window is not None:
        longest = min(longest, options.window + 2 * SEGMENT)
    segments = cdiv(longest, SEGMENT)
    splits = num_splits(batch * groups * blocks, segments, q.device)  # changes no bit
    parts = sums = counters = None
    if splits > 1:
        rows = batch * groups * blocks, segments, heads
        parts = torch.empty((*rows, head_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((2, *rows), dtype=torch.float32, device=q.device)
        counters = arrivals(q.device)
    launch(
        _decode_kernel,
        (groups * blocks, splits, batch),
        *(q, k, v, out, options.sinks, lens, tables, parts, sums, counters),
        *score_factors(options),
        *(q.stride(0), k.stride(0), v.stride(0), out.stride(0), tables.stride(0)),
        *(options.window or 0, group, heads, head_dim, padded_head_dim(head_dim), page),
        *(max(16, heads), block_n, SEGMENT, segments, splits),
        num_warps=warps,
        num_stages=DECODE_STAGES,
        **overlap(q),
    )
    return out


def _cut_heads(group: int) -> tuple[int, int]:
    """Choose the query heads of a tile, and how many tiles the heads of one KV head take."""
    heads = min(BLOCK_M, next_power_of_2(group))
    return heads, cdiv(group, heads)


def _choose_tiles(q: Tensor) -> tuple[int, int, int]:
    """Choose the keys of a tile, the warps of a program, and the stages for prompts."""
    return (64, 4, 3) if q.shape[2] * q.element_size() <= 256 else (32, 8, 2)


# As in prefill_attention.py, these arguments must not be specialized.
@triton.jit(do_not_specialize=["cu_seqlens_q", "cu_seqlens_k"])
def _prefill_kernel(
    q,
    k,
    v,
    k_tiles,
    v_tiles,
    out,
    sinks,
    cu_seqlens_q,
    cu_seqlens_k,
    tables,
    query_tiles,
    scale,
    cap,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    table_stride,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Attend with BLOCK_M / HEADS tokens of a chunk, and heads that share keys, to the keys."""
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    # Later queries see more keys: their long programs go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if query_tiles is not None:
        # There, tiles have BLOCK_M tokens.
        of_tile = query_tiles + 2 * (tile // HEADS)
        chunk, first = tl.load(of_tile), tl.load(of_tile + 1) + tile % HEADS * TOKENS
    else:
        chunk, first = tl.program_id(2), tile * TOKENS
    start_q, start_k = tl.load(cu_seqlens_q + chunk), tl.load(cu_seqlens_k + chunk)
    len_q = tl.load(cu_seqlens_q + chunk + 1) - start_q
    len_k = tl.load(cu_seqlens_k + chunk + 1) - start_k
    if first < len_q:
        if PAGE:
            tables += chunk * table_stride
        row = tl.arange(0, BLOCK_M)
        group, head = _heads_of(tl.program_id(1), row, GROUP, HEADS)
        token = first + row // HEADS
        dim = tl.arange(0, BLOCK_D)
        inside = ((head < (group + 1) * GROUP) & (token < len_q))[:, None] & (dim < D)[None, :]
        at = (start_q + token).to(tl.int64)[:, None]
        column = head[:, None] * D + dim[None, :]
        query = tl.load(q + at * q_stride + column, mask=inside, other=0.0)
        position = len_k - len_q + first  # of the tile's first token
        opening, end = 0, tl.minimum(len_k, position + TOKENS)
        if WINDOW:
            opening = tl.maximum(position + 1 - WINDOW, 0)
        memory = k, v, k_tiles, v_tiles, tables, start_k, group * D, k_stride, v_stride
        span = opening // BLOCK_N * BLOCK_N, end, opening, len_k, position
        total, peak, acc = _attend(
            query, memory, span, scale, cap, None, None, 0, 0, WINDOW, HEADS, D, PAGE, BLOCK_N,
            SEGMENT,
        )  # fmt: skip
        total = with_sink(total, peak, sinks, head, head < (group + 1) * GROUP)
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at * out_stride + column, result, mask=inside)


@triton.jit
def _decode_kernel(
    q,
    k,
    v,
    out,
    sinks,
    lens,
    tables,
    parts,
    sums,
    arrivals,
    scale,
    cap,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    table_stride,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with one token of a sequence, and heads that share keys, to some of its segments.

    SEGMENTS: the most that are read. The last program of a row that ends merges its segments.
    """
    wait_for_inputs(PDL)
    seq = tl.program_id(2)
    length = tl.load(lens + seq)
    tables += seq * table_stride
    row = tl.arange(0, BLOCK_M)
    group, head = _heads_of(tl.program_id(0), row, GROUP, HEADS)
    dim = tl.arange(0, BLOCK_D)
    is_head = (row < HEADS) & (head < (group + 1) * GROUP)
    inside = is_head[:, None] & (dim < D)[None, :]
    column = head[:, None] * D + dim[None, :]
    query = tl.load(q + seq.to(tl.int64) * q_stride + column, mask=inside, other=0.0)
    opening = 0
    if WINDOW:
        opening = tl.maximum(length - WINDOW, 0)
    begin, end = opening // BLOCK_N * BLOCK_N, length
    first, last = begin // SEGMENT, tl.cdiv(length, SEGMENT)
    pair = seq.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if SPLITS > 1:
        split = tl.program_id(1)
        share = tl.cdiv(last - first, SPLITS)
        begin = tl.maximum(begin, (first + split * share) * SEGMENT)
        end = tl.minimum(end, (first + (split + 1) * share) * SEGMENT)
        parts += pair * SEGMENTS * HEADS * D
        sums += pair * SEGMENTS * HEADS
    num_sums = tl.num_programs(2) * tl.num_programs(0) * SEGMENTS * HEADS
    memory = k, v, None, None, tables, 0, group * D, k_stride, v_stride
    span = begin, end, opening, length, length - 1
    total, peak, acc = _attend(
        query, memory, span, scale, cap, parts, sums, first, num_sums, WINDOW, HEADS, D, PAGE,
        BLOCK_N, SEGMENT,
    )  # fmt: skip
    out += seq.to(tl.int64) * out_stride
    if SPLITS == 1:
        if length > 0:
            total = with_sink(total, peak, sinks, head, is_head)
            result = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + column, result, mask=inside)
    else:
        tl.debug_barrier()  # wait until all threads have stored: other threads load the values
        # The program that arrives last sees what the others wrote.
        is_last = tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrivals + pair, 0)
            if length > 0:
                _merge_parts(
                    out, parts, sums, sinks, last - first, num_sums, GROUP, HEADS, D, BLOCK_D
                )


@triton.jit
def _merge_parts(
    out,
    parts,
    sums,
    sinks,
    segments,
    num_sums,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the segments of a program's heads in order, and store the result."""
    row, dim = tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    group, head = _heads_of(tl.program_id(0), row, GROUP, HEADS)
    is_head = head < (group + 1) * GROUP
    inside = is_head[:, None] & (dim < D)[None, :]
    peak = tl.full([HEADS], EMPTY, tl.float32)
    total, acc = tl.zeros([HEADS], tl.float32), tl.zeros([HEADS, BLOCK_D], tl.float32)
    for begin in range(0, segments, 8):
        for i in tl.static_range(8):  # the loads of eight segments do not wait for each other
            at = (begin + i) * HEADS + row
            is_part = at < segments * HEADS
            # Merging a segment of no keys changes nothing, to the bit.
            at_part = parts + at[:, None] * D + dim[None, :]
            part = tl.load(at_part, mask=inside & is_part[:, None], other=0.0)
            part_peak = tl.load(sums + at, mask=is_part, other=EMPTY)
            part_total = tl.load(sums + num_sums + at, mask=is_part, other=0.0)
            peak, total, acc = _merge(peak, total, acc, part_peak, part_total, part)
    total = with_sink(total, peak, sinks, head, is_head)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + head[:, None] * D + dim[None, :], result, mask=inside)


@triton.jit
def _heads_of(block, row, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Return a program's KV head and its rows' query heads. The next KV head's are padding."""
    BLOCKS: tl.constexpr = tl.cdiv(GROUP, HEADS)
    group = block // BLOCKS
    return group, group * GROUP + block % BLOCKS * HEADS + row % HEADS


@triton.jit
def _attend(
    query,
    memory,
    span,
    scale,
    cap,
    parts,
    sums,
    first,
    num_sums,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Attend with a tile of queries to a span of keys. Returns (total, peak, acc).

    Args:
        memory: (k, v, k_tiles, v_tiles, tables, start_k, column of the head, k_stride, v_stride).
        span: (first key of a tile, end, first key that a query may see, keys of the sequence,
            position of the first query).
        parts, sums: receive each segment's acc, and its peaks and totals, of the first HEADS rows.
            None: the segments are merged and returned.
        first: the segment that comes first in `parts`.
    """
    k, v, k_tiles, v_tiles, tables, start_k, column, k_stride, v_stride = memory
    begin, end, opening, len_k, position = span
    BLOCK_M: tl.constexpr = query.shape[0]
    BLOCK_D: tl.constexpr = query.shape[1]
    k += column
    v += column
    # The accelerator cannot leave out a part of a tile, so it fetches only tiles that hold nothing
    # but tokens of this sequence.
    whole = end
    if k_tiles is not None:
        whole = tl.minimum(end, len_k // BLOCK_N * BLOCK_N)
    peak = tl.full([BLOCK_M], EMPTY, tl.float32)
    total, acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    all_peak = tl.full([BLOCK_M], EMPTY, tl.float32)
    all_total, all_acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, whole, BLOCK_N):
        if k_tiles is not None:
            slot = slot_of(tables, start, start_k, PAGE)
            key, value = k_tiles.load([slot, column]).T, v_tiles.load([slot, column])
        else:
            token = start + tl.arange(0, BLOCK_N)
            held = (token >= opening) & (token < len_k)
            slot = slots_of(tables, start, start_k, len_k, PAGE, BLOCK_N)
            key, value = load_tiles(k, v, slot, held, k_stride, v_stride, D, BLOCK_D)
        peak, total, acc = _attend_tile(
            query, key, value, start, position, scale, cap, peak, total, acc, WINDOW, HEADS
        )
        if (start + BLOCK_N) % SEGMENT == 0 or start + BLOCK_N >= end:
            if parts is None:
                all_peak, all_total, all_acc = _merge(
                    all_peak, all_total, all_acc, peak, total, acc
                )
            else:
                place = (start // SEGMENT - first) * HEADS
                _store_part(parts, sums, place, num_sums, peak, total, acc, HEADS, D)
            peak = tl.full([BLOCK_M], EMPTY, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The ragged last tile, if the accelerator did not fetch it.
    if (whole < end) & (begin < end):
        held = whole + tl.arange(0, BLOCK_N) < len_k
        slot = slots_of(tables, whole, start_k, len_k, PAGE, BLOCK_N)
        key, value = load_tiles(k, v, slot, held, k_stride, v_stride, D, BLOCK_D)
        peak, total, acc = _attend_tile(
            query, key, value, whole, position, scale, cap, peak, total, acc, WINDOW, HEADS
        )
        if parts is None:
            all_peak, all_total, all_acc = _merge(all_peak, all_total, all_acc, peak, total, acc)
        else:
            place = (whole // SEGMENT - first) * HEADS
            _store_part(parts, sums, place, num_sums, peak, total, acc, HEADS, D)
    return all_total, all_peak, all_acc


@triton.jit
def _attend_tile(
    query,
    key,
    value,
    start,
    position,
    scale,
    cap,
    peak,
    total,
    acc,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Add the keys of tokens from `start` on to the softmax of queries from `position` on."""
    scores, factor = score_tile(query, key, scale, cap)
    TOKENS: tl.constexpr = query.shape[0] // HEADS
    hides = start + key.shape[1] - 1 > position  # the first query does not see the last key
    if WINDOW:
        hides |= start <= position + TOKENS - 1 - WINDOW  # the last does not see the first key
    if hides:
        at = position + (tl.arange(0, query.shape[0]) // HEADS)[:, None]
        token = start + tl.arange(0, key.shape[1])[None, :]
        sees = token <= at
        if WINDOW:
            sees &= token > at - WINDOW
        scores = tl.where(sees, scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, axis=1) * factor)
    rescale = tl.exp2(peak - top)
    weights = tl.exp2(scores * factor - top[:, None])
    # A sum by threads would depend on how a tile is shared among them. From 1 to 2, the bits of a
    # float32 count steps of 2^-23: so the bits of 1 + weight are added up, less those of 1.
    bits = (weights + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
    added = tl.sum(bits, axis=1).to(tl.float32) * 1.1920928955078125e-07
    total = tl.fma(total, rescale, added)
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def _merge(peak, total, acc, part_peak, part_total, part):
    """Add a segment's softmax to that of the segments before it.

    The operations are spelled out, so that no compiler fuses others here than there.
    """
    top = tl.maximum(peak, part_peak)
    old, new = tl.exp2(peak - top), tl.exp2(part_peak - top)
    total = tl.fma(total, old, part_total * new)
    old, new = tl.broadcast_to(old[:, None], acc.shape), tl.broadcast_to(new[:, None], acc.shape)
    return top, total, tl.fma(acc, old, part * new)


@triton.jit
def _store_part(
    parts, sums, place, num_sums, peak, total, acc, HEADS: tl.constexpr, D: tl.constexpr
):
    """Store a segment's softmax, of the first HEADS rows, from `place` on."""
    row, dim = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    at = place + row
    inside = (row < HEADS)[:, None] & (dim < D)[None, :]
    tl.store(parts + at[:, None] * D + dim[None, :], acc, mask=inside)
    tl.store(sums + at, peak, mask=row < HEADS)
    tl.store(sums + num_sums + at, total, mask=row < HEADS)
