"""Attention of decoding sequences over the paged KV cache: split-KV flash decoding in Triton.

The twin of `decode_attention` is the function of that name in layers/attention.py.
attention_tiles.py explains tile, split and page. The host does not wait for the device. The shape
of a launch depends on B and W alone, so that a CUDA graph may replay it with other lengths.

Shapes: B sequences, H query heads, G KV heads, D head size, W block-table width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.attention_tiles import (
    EMPTY,
    attend,
    padded_head_dim,
    score_factors,
    split_span,
    with_sink,
)
from nanovllm.backends.cuda.triton.dispatch import (
    arrivals,
    has_large_shared_memory,
    is_hopper,
    launch,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.e4m3 import PLAIN, how_to_decode
from nanovllm.backends.cuda.triton.prefix_attention import cut_prefix, prefix_kernel
from nanovllm.layers.attention import AttentionOptions, KVCache, PagedKV

MAX_SPLITS = 32


def decode_attention(
    q: Tensor,
    kv: PagedKV,
    options: AttentionOptions,
    *,
    shared_prefix_len: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with one query a sequence to its cached tokens: q [B, H, D] -> [B, H, D].

    Args:
        shared_prefix_len: [1] int32, the number of tokens in the leading blocks that all sequences
            share. These tokens are read once for all sequences.
        out: receives the result, if given. The row of a sequence of length 0 is not written.
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
    launch(
        _decode_kernel,
        (groups, splits, batch),
        *(q, k_cache, v_cache, scales, lens, shared, tables, out, options.sinks),
        *(parts, part_lse, counters),
        *(*factors, *strides, window or 0),
        *(
            groups,
            group,
            max(16, triton.next_power_of_2(group)),
            *sizes,
            splits,
            prefix_splits,
            how,
        ),
        num_warps=warps,
        num_stages=stages,
        **overlap(q),
    )
    return out


def _cut_contexts(
    q: Tensor, cache: KVCache, longest: int, is_prefix_shared: bool
) -> tuple[int, int]:
    """Choose the tokens of a tile, and the number of splits of up to `longest` tokens."""
    block_n = 64 if q.shape[2] * q.element_size() <= 256 else 32
    splits = num_splits(len(q) * cache.k.shape[2], triton.cdiv(longest, block_n), q.device)
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
    return min(1 << splits.bit_length() - 1, MAX_SPLITS, triton.next_power_of_2(tiles))


@triton.jit
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    scales,
    lens,
    shared,
    tables,
    out,
    sinks,
    parts,
    part_lse,
    arrivals,
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
    PDL: tl.constexpr,
):
    """Attend with one sequence's queries to one split of its tokens.

    The splits cover the tokens behind a shared prefix or within a window, else all tokens. The last
    program of a row that ends merges the row's parts, those of the prefix included.
    """
    wait_for_inputs(PDL)
    group, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The query heads of a group share K and V. They are the rows of one tile, padded to the least
    # number of rows that tl.dot takes.
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    inside = (row < GROUP)[:, None] & (dim < D)[None, :]
    at = row[:, None] * D + dim[None, :]
    WIDTH: tl.constexpr = D if scales is None else D // 4  # of a head in v_cache
    query = tl.load(
        q + seq.to(tl.int64) * q_stride + group * GROUP * D + at, mask=inside, other=0.0
    )
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
    pair = seq.to(tl.int64) * G + group
    PARTS: tl.constexpr = SPLITS + PREFIX_SPLITS
    first = (pair * PARTS + split) * GROUP
    out += pair * GROUP * D
    if begin < end:
        k_cache += group * D
        v_cache += group * WIDTH
        tables += seq * table_stride
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
        )
        if PARTS > 1:
            tl.store(parts + first * D + at, acc / total[:, None], mask=inside)
            tl.store(part_lse + first + row, peak + tl.log2(total), mask=row < GROUP)
        else:
            total = with_sink(total, peak, sinks, group * GROUP + row, row < GROUP)
            tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    elif PARTS > 1:
        tl.store(part_lse + first + row, EMPTY, mask=row < GROUP)
    if PARTS > 1:
        tl.debug_barrier()  # wait until all threads have stored: other threads load the values
        is_last = True
        if SPLITS > 1:
            # The program that arrives last sees what the others wrote. It merges all parts in the
            # order of splits, so the order of arrival does not change the result.
            is_last = tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == SPLITS - 1
            tl.debug_barrier()
        if is_last:
            if SPLITS > 1:
                tl.store(arrivals + pair, 0)
            if length > 0:
                parts += pair * PARTS * GROUP * D
                part_lse += pair * PARTS * GROUP
                _merge(out, sinks, group * GROUP, parts, part_lse, GROUP, D, BLOCK_D, PARTS)


@triton.jit
def _merge(
    out,
    sinks,
    first_head,
    parts,
    part_lse,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge a row's parts, each weighted by its share of the softmax's denominator."""
    head = tl.arange(0, triton.next_power_of_2(GROUP))
    dim = tl.arange(0, BLOCK_D)
    inside = (head < GROUP)[:, None] & (dim < D)[None, :]
    peak = tl.full(head.shape, EMPTY, tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    acc = tl.zeros([head.shape[0], BLOCK_D], tl.float32)
    # In this form no load waits for the part before it, and no sum crosses threads. Measured on an
    # H200, 16 parts of 4 heads of 256 take 1.3 us, while a sum over the parts, head by head, took
    # 10 us.
    for part in tl.static_range(PARTS):
        row = part * GROUP + head
        lse = tl.load(part_lse + row, mask=head < GROUP, other=EMPTY)
        written = inside & (lse > EMPTY)[:, None]
        value = tl.load(parts + row[:, None] * D + dim[None, :], mask=written, other=0.0)
        new_peak = tl.maximum(peak, lse)
        rescale, weight = tl.exp2(peak - new_peak), tl.exp2(lse - new_peak)
        total = total * rescale + weight
        acc = acc * rescale[:, None] + value * weight[:, None]
        peak = new_peak
    total = with_sink(total, peak, sinks, first_head + head, head < GROUP)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + head[:, None] * D + dim[None, :], result, mask=inside)
