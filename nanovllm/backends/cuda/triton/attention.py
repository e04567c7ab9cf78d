"""Attention over the paged KV cache in Triton: prompt chunks by flash attention, decoding by
split-KV flash decoding.

Knows block tables of any block size that is a multiple of 16, grouped KV heads and any head size.
layers/attention.py says what both functions compute. Neither waits for the device; the shape of a
decode launch depends on B and W alone, so that a CUDA graph may replay it with other lengths.

A tile is what a program holds at a time: BLOCK_M queries, or BLOCK_N keys and values. A split is
the part of one sequence's keys that one program reads. A page is a KV block. In kernels, `scale`
and peaks are in units of log2, for the device's exponential is a power of 2.

Shapes: B decoding sequences, P tokens of N prompt chunks, H query heads, G KV heads, D head size, W
block-table width. Of decoding: lens [B], tables [B, W] and shared [1], all int32; `shared` counts
the tokens in the leading blocks that all tables share, which are then read once for all.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    TensorDescriptor,
    arrivals,
    has_large_shared_memory,
    launch,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.layers.attention import AttentionOptions
from nanovllm.layers.context import PrefillMetadata

LOG2_E = 1.4426950408889634
MAX_SPLITS = 32
BLOCK_M = 64  # queries of a prefill program
TILED_KEYS = 256  # from here on K and V come by tiles
EMPTY = tl.constexpr(-1e30)  # below any score, in units of log2: the peak of no keys


@dataclass(frozen=True, slots=True)
class TiledPrefill(PrefillMetadata):
    """Chunks of which the host knows no length, so that a CUDA graph may be replayed with others.

    `cu_seqlens_q` counts from the step's first token, and may end with chunks of no tokens.
    """

    query_tiles: Tensor  # [tiles, 2] int32, the chunk and the first query in it


def tile_queries(cu_seqlens_q: Tensor, count: int) -> Tensor:
    """Every BLOCK_M queries of every chunk: [count, 2] int32, as TiledPrefill has them.

    There are at most tokens / BLOCK_M + chunks. What is left over starts behind its chunk's end.
    """
    tiles = (cu_seqlens_q.diff() + BLOCK_M - 1) // BLOCK_M
    ends = tiles.cumsum(0)
    tile = torch.arange(count, device=ends.device)
    chunk = torch.searchsorted(ends, tile, right=True).clamp(max=len(tiles) - 1)
    first = (tile - (ends - tiles)[chunk]) * BLOCK_M
    return torch.stack((chunk, first), dim=1).int()


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: PrefillMetadata,
    options: AttentionOptions,
    out: Tensor | None = None,
) -> Tensor:
    """q [P, H, D], k and v [P, G, D], caches [blocks, block_size, G, D] -> [P, H, D], in `out` if
    it is given. Of a TiledPrefill, the step's decoding tokens come before the P, and their rows of
    the result are left as they are.
    """
    num_heads, head_dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tables, page = meta.block_tables, 0
    if tables is not None:
        page = k_cache.shape[1]
        # [slots, G, D]: a block table turns tokens into slots
        k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    # Two programs of this size share a multiprocessor. Measured on an H200, programs of 128 queries
    # are no faster, not even for a prompt of 16,384 tokens.
    block_n, stages = (64, 3) if head_dim * q.element_size() <= 256 else (32, 2)
    # The host takes longer to describe tiles than tensors, which short prompts do not make up for.
    # Those with a cached part come by tiles all the same: that saves the compilation of a kernel.
    tiled = bool(page) or meta.max_seqlen_k >= TILED_KEYS
    tiled = tiled and _suits_tiles(k, v, page, block_n)
    k_tiles, v_tiles = (_tiles(k, block_n), _tiles(v, block_n)) if tiled else (None, None)
    query_tiles = meta.query_tiles if isinstance(meta, TiledPrefill) else None
    if query_tiles is not None:
        assert page, "where chunks begin among k and v is not known"
        programs = len(query_tiles), num_heads, 1
    else:
        programs = triton.cdiv(meta.max_seqlen_q, BLOCK_M), num_heads, len(meta.cu_seqlens_q) - 1
    tensors = (q, k, v, k_tiles, v_tiles, out, options.sinks, meta.cu_seqlens_q, meta.cu_seqlens_k)
    table_stride = tables.stride(0) if tables is not None else 0
    sizes = (head_dim, triton.next_power_of_2(head_dim), page, BLOCK_M, block_n)
    launch(
        _prefill_kernel,
        programs,
        *(*tensors, tables, query_tiles, *_factors(options)),
        *(q.stride(0), k.stride(0), v.stride(0), out.stride(0), table_stride),
        *(options.window or 0, num_heads // k.shape[1], *sizes),
        num_warps=4,
        num_stages=stages,
    )
    return out


def _factors(options: AttentionOptions) -> tuple[float, float | None]:
    """What kernels multiply scores by; if there is a cap, what they multiply its tanh by, too."""
    scale, softcap = options.scale, options.softcap
    if softcap is None:
        return scale * LOG2_E, None
    return scale / softcap, softcap * LOG2_E


def _suits_tiles(k: Tensor, v: Tensor, page: int, block_n: int) -> bool:
    """Whether Hopper's tensor memory accelerator can fetch K and V: dense heads of up to 256
    bytes, pages of whole tiles.
    """
    if TensorDescriptor is None or not has_large_shared_memory(k.device) or k.element_size() != 2:
        return False
    aligned = all(
        x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        for x in (k, v)
    )
    return aligned and k.shape[2] in (16, 32, 64, 128) and page % block_n == 0


def _tiles(x: Tensor, rows: int) -> TensorDescriptor:
    """[T, G, D] as tiles of so many rows of one head."""
    return TensorDescriptor(
        x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, x.shape[2]]
    )


# These are parts of one tensor, so N decides whether they are aligned: no kernel is made for each.
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
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to a chunk's keys and those cached before it, for BLOCK_M queries of one head."""
    # Later queries see more keys: their long programs go first, and the short ones fill the end of
    # the launch.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    if query_tiles is not None:
        chunk, first = tl.load(query_tiles + 2 * tile), tl.load(query_tiles + 2 * tile + 1)
    else:
        chunk, first = tl.program_id(2), tile * BLOCK_M
    start_q, start_k = tl.load(cu_seqlens_q + chunk), tl.load(cu_seqlens_k + chunk)
    len_q = tl.load(cu_seqlens_q + chunk + 1) - start_q
    len_k = tl.load(cu_seqlens_k + chunk + 1) - start_k
    if first < len_q:
        row = first + tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        inside = (row < len_q)[:, None] & (dim < D)[None, :]
        q_row = (start_q + row).to(tl.int64)[:, None]
        query = tl.load(q + q_row * q_stride + head * D + dim[None, :], mask=inside, other=0.0)
        col = head // GROUP * D
        k, v = k + col, v + col
        if PAGE:
            tables += chunk * table_stride
        position = len_k - len_q + first  # of the first query
        opening, end = 0, tl.minimum(len_k, position + BLOCK_M)
        if WINDOW:
            opening = tl.maximum(position + 1 - WINDOW, 0)
        # Blocks before `opening` may belong to another sequence by now, and what lies behind the
        # chunk's end may be NaN. The accelerator cannot leave out a part of a tile, so it fetches
        # those that hold this sequence's tokens alone.
        whole = end
        if k_tiles is not None:
            whole = tl.minimum(end, len_k // BLOCK_N * BLOCK_N)
        peak = tl.full([BLOCK_M], EMPTY, tl.float32)
        total, acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(opening // BLOCK_N * BLOCK_N, whole, BLOCK_N):
            if k_tiles is not None:
                slot = _slot(tables, start, start_k, PAGE)
                key, value = k_tiles.load([slot, col]).T, v_tiles.load([slot, col])
            else:
                token = start + tl.arange(0, BLOCK_N)
                held = (token >= opening) & (token < len_k)
                slot = _slots(tables, start, start_k, len_k, PAGE, BLOCK_N)
                key, value = _load_tiles(k, v, slot, held, k_stride, v_stride, D, BLOCK_D)
            peak, total, acc = _attend_causally(
                query, key, value, start, position, scale, cap, peak, total, acc, WINDOW
            )
        # The ragged last tile, if the accelerator did not fetch it. Two programs find room on a
        # multiprocessor only if this loop loads nothing in advance.
        for start in tl.range(whole, end, BLOCK_N, num_stages=1):
            held = start + tl.arange(0, BLOCK_N) < len_k
            slot = _slots(tables, start, start_k, len_k, PAGE, BLOCK_N)
            key, value = _load_tiles(k, v, slot, held, k_stride, v_stride, D, BLOCK_D)
            peak, total, acc = _attend_causally(
                query, key, value, start, position, scale, cap, peak, total, acc, WINDOW
            )
        total = _with_sink(total, peak, sinks, head, True)
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + q_row * out_stride + head * D + dim[None, :], result, mask=inside)


@triton.jit
def _attend_causally(
    query, key, value, start, position, scale, cap, peak, total, acc, WINDOW: tl.constexpr
):
    """One step over the keys of tokens from `start`, for queries of tokens from `position`.

    A query may see none of them: its peak stays low, and no infinity.
    """
    scores, factor = _score(query, key, scale, cap)
    hides = start + key.shape[1] - 1 > position  # the last key from the first query
    if WINDOW:
        hides |= start <= position + query.shape[0] - 1 - WINDOW  # the first from the last
    if hides:
        at = position + tl.arange(0, query.shape[0])[:, None]
        token = start + tl.arange(0, key.shape[1])[None, :]
        sees = token <= at
        if WINDOW:
            sees &= token > at - WINDOW
        scores = tl.where(sees, scores, float("-inf"))
    return _accumulate(scores, factor, value, peak, total, acc)


@triton.jit
def _slot(table, token, first_slot, PAGE: tl.constexpr):
    """The KV slot of a sequence's token by its block table; without one, its row in k and v, where
    the sequence begins at first_slot.
    """
    if PAGE:
        return tl.load(table + token // PAGE) * PAGE + token % PAGE
    else:
        return first_slot + token


@triton.jit
def _slots(table, start, first_slot, length, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The slots of tokens start .. start + BLOCK_N."""
    offset = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:  # one page holds them all, or there are none
        slot = _slot(table, start, first_slot, PAGE).to(tl.int64) + offset
    else:
        token = start + offset
        slot = (
            tl.load(table + token // PAGE, mask=token < length, other=0).to(tl.int64) * PAGE
            + token % PAGE
        )
    return slot


@triton.jit
def _load_tiles(k, v, slot, inside, k_stride, v_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """K transposed [D, BLOCK_N] and V [BLOCK_N, D] of the slots.

    What is not inside reads 0: 0 times NaN would be NaN.
    """
    dim = tl.arange(0, BLOCK_D)
    k_at = k + slot[None, :] * k_stride + dim[:, None]
    v_at = v + slot[:, None] * v_stride + dim[None, :]
    key = tl.load(k_at, mask=inside[None, :] & (dim < D)[:, None], other=0.0)
    value = tl.load(v_at, mask=inside[:, None] & (dim < D)[None, :], other=0.0)
    return key, value


@triton.jit
def _score(query, key, scale, cap):
    """Scores, and what is left to multiply them by: `scale`, or 1 where they are capped."""
    scores = tl.dot(query, key, input_precision="ieee")
    factor = scale
    if cap is not None:
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * (scores * scale))) - 1.0
        scores, factor = cap * tanh, 1.0
    return scores, factor


@triton.jit
def _accumulate(scores, scale, value, peak, total, acc):
    """One step of the online softmax.

    Rescales what was summed under the old peak, and adds this tile's share.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    rescale = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores * scale - new_peak[:, None])  # one instruction before the power
    total = total * rescale + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _with_sink(total, peak, sinks, head, inside):
    """A softmax's sum under its peak, and the share of the sink of each head, if there are any."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=float("-inf")).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - peak)  # to units of log2
    return total


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lens: Tensor,
    tables: Tensor,
    options: AttentionOptions,
    shared: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q [B, H, D] -> [B, H, D], in `out` if it is given. A row of length 0 is not written."""
    window = options.window
    shared = shared if window is None else None  # windows do not see a prefix alike
    batch, num_heads, head_dim = q.shape
    page, groups = k_cache.shape[1:3]
    group = num_heads // groups
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    longest = min(tables.shape[1] * page, window or tables.shape[1] * page)
    block_n, splits = _cut_contexts(q, groups, longest, shared is not None)
    factors = _factors(options)
    sizes = (head_dim, triton.next_power_of_2(head_dim), page, block_n)
    strides = (q.stride(0), k_cache.stride(1), v_cache.stride(1), tables.stride(0))
    block_m, tiles, prefix_splits = _cut_prefix(q, groups) if shared is not None else (0, 0, 0)
    parts = part_lse = None
    if splits + prefix_splits > 1:
        rows = (batch, groups, splits + prefix_splits, group)
        parts = torch.empty((*rows, head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    if shared is not None:
        _prefix_kernel[(tiles, prefix_splits, groups)](
            *(q, k_cache, v_cache, shared, tables, parts, part_lse),
            *(*factors, *strides[:3]),
            *(batch, splits, groups, group, block_m, *sizes),
            num_warps=8 if block_m > 64 else 4,
            num_stages=3,
        )
    counters = arrivals(q.device) if splits > 1 else None
    launch(
        _decode_kernel,
        (groups, splits, batch),
        *(q, k_cache, v_cache, lens, shared, tables, out, options.sinks),
        *(parts, part_lse, counters),
        *(*factors, *strides, window or 0),
        *(groups, group, max(16, triton.next_power_of_2(group)), *sizes, splits, prefix_splits),
        num_warps=4,
        num_stages=2 if splits <= 8 else 3,
        **overlap(q),
    )
    return out


def _cut_contexts(q: Tensor, groups: int, longest: int, is_prefix_shared: bool) -> tuple[int, int]:
    """Tokens of a tile, and how many programs share a sequence of up to `longest` tokens."""
    block_n = 64 if q.shape[2] * q.element_size() <= 256 else 32
    splits = _num_splits(len(q) * groups, triton.cdiv(longest, block_n), q.device)
    # Measured on an H200: with few splits, large tiles are read 1 to 3 % faster. Where there are
    # many sequences, most are short, and a large tile would be half empty.
    is_one_of_few = splits <= 4 and len(q) <= 256 and not is_prefix_shared
    if is_one_of_few and block_n == 64 and has_large_shared_memory(q.device):
        block_n = 128
    return block_n, splits


def _num_splits(rows: int, tiles: int, device: torch.device) -> int:
    """How many programs share a row (a KV head of a sequence): a power of 2, measured on an H200.

    Four programs a multiprocessor hide the memory's latency. Where rows alone give that, up to 8
    splits still level out sequences of different lengths, until there are 8 programs a
    multiprocessor. Never more splits than there are tiles. Rows are split only if there are at most
    4 a multiprocessor, so each of them has a counter in `arrivals`.
    """
    processors = num_processors(device)
    splits = max(4 * processors // rows, min(8, 8 * processors // rows), 1)
    return min(1 << splits.bit_length() - 1, MAX_SPLITS, triton.next_power_of_2(tiles))


def _cut_prefix(q: Tensor, groups: int) -> tuple[int, int, int]:
    """Rows of a tile of queries, such tiles of a group, and programs that share a tile.

    Of few different numbers, since each is a kernel to compile.
    """
    rows = q.shape[0] * q.shape[1] // groups
    block_m = 64 if rows <= 64 else 128
    tiles = triton.cdiv(rows, block_m)
    programs = max(1, min(16, 2 * num_processors(q.device) // (tiles * groups)))
    return block_m, tiles, 1 << programs.bit_length() - 1


@triton.jit
def _span(length, splits, BLOCK_N: tl.constexpr):
    """Tokens a split takes: whole tiles, evenly, from the length on the device, so that short
    contexts spread as well.
    """
    return tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N


@triton.jit
def _decode_kernel(
    q,
    k_cache,
    v_cache,
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
    PDL: tl.constexpr,
):
    """Attend to a split of one sequence's tokens: of all of them or, where a prefix is shared, of
    those behind it; with a window, of those in it. The last program to arrive merges.
    """
    wait_for_inputs(PDL)
    group, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The query heads of a group share K and V: they are the rows of one tile, padded to what tl.dot
    # takes.
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    inside = (row < GROUP)[:, None] & (dim < D)[None, :]
    at = row[:, None] * D + dim[None, :]
    query = tl.load(
        q + seq.to(tl.int64) * q_stride + group * GROUP * D + at, mask=inside, other=0.0
    )
    length, prefix = tl.load(lens + seq), 0
    if shared is not None:
        prefix = tl.load(shared)
    first_seen = 0
    if WINDOW:
        first_seen = tl.maximum(length - WINDOW, 0)
        prefix = first_seen // BLOCK_N * BLOCK_N  # whole tiles are skipped
    span = _span(length - prefix, SPLITS, BLOCK_N)
    begin = prefix + split * span
    end = tl.minimum(begin + span, length)
    pair = seq.to(tl.int64) * G + group
    PARTS: tl.constexpr = SPLITS + PREFIX_SPLITS
    first = (pair * PARTS + split) * GROUP
    out += pair * GROUP * D
    if begin < end:
        k_cache += group * D
        v_cache += group * D
        tables += seq * table_stride
        total, peak, acc = _attend(
            query,
            k_cache,
            v_cache,
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
        )
        if PARTS > 1:
            tl.store(parts + first * D + at, acc / total[:, None], mask=inside)
            tl.store(part_lse + first + row, peak + tl.log2(total), mask=row < GROUP)
        else:
            total = _with_sink(total, peak, sinks, group * GROUP + row, row < GROUP)
            tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    elif PARTS > 1:
        tl.store(part_lse + first + row, EMPTY, mask=row < GROUP)
    if PARTS > 1:
        tl.debug_barrier()  # all threads have stored: others load what one has
        is_last = True
        if SPLITS > 1:
            # The program that arrives last sees what the others wrote, and merges all parts, in an
            # order of their own: that of arrival changes nothing.
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
    """Weigh each part by its share of the softmax's denominator."""
    head = tl.arange(0, triton.next_power_of_2(GROUP))
    dim = tl.arange(0, BLOCK_D)
    inside = (head < GROUP)[:, None] & (dim < D)[None, :]
    peak = tl.full(head.shape, EMPTY, tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    acc = tl.zeros([head.shape[0], BLOCK_D], tl.float32)
    # No load waits for the part before, and no sum crosses threads. Measured on an H200, 16 parts
    # of 4 heads of 256 took 1.3 us so, and 10 us by a sum over the parts, head by head.
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
    total = _with_sink(total, peak, sinks, first_head + head, head < GROUP)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + head[:, None] * D + dim[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["batch", "first_part"])
def _prefix_kernel(
    q,
    k_cache,
    v_cache,
    shared,
    table,
    parts,
    part_lse,
    scale,
    cap,
    q_stride,
    k_stride,
    v_stride,
    batch,
    first_part,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to the prefix that all sequences share, read once for the BLOCK_M / GROUP sequences
    whose queries are one tile (cascade attention; Ye et al. 2024).

    Its blocks are the first of every table, so the first table serves.
    """
    tile, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    prefix = tl.load(shared)
    span = _span(prefix, tl.num_programs(1), BLOCK_N)
    begin = split * span
    end = tl.minimum(begin + span, prefix)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    seq, head = (row // GROUP).to(tl.int64), group * GROUP + row % GROUP
    part = (seq * G + group) * (first_part + tl.num_programs(1)) + first_part + split
    part = part * GROUP + row % GROUP
    if begin < end:
        dim = tl.arange(0, BLOCK_D)
        inside = (seq < batch)[:, None] & (dim < D)[None, :]
        query = tl.load(
            q + seq[:, None] * q_stride + head[:, None] * D + dim[None, :], mask=inside, other=0.0
        )
        k_cache += group * D
        v_cache += group * D
        total, peak, acc = _attend(
            query,
            k_cache,
            v_cache,
            table,
            begin,
            end,
            0,
            scale,
            cap,
            k_stride,
            v_stride,
            D,
            PAGE,
            BLOCK_N,
        )
        tl.store(parts + part[:, None] * D + dim[None, :], acc / total[:, None], mask=inside)
        tl.store(part_lse + part, peak + tl.log2(total), mask=seq < batch)
    else:
        tl.store(part_lse + part, EMPTY, mask=seq < batch)


@triton.jit
def _attend(
    query,
    k,
    v,
    table,
    begin,
    end,
    first_seen,
    scale,
    cap,
    k_stride,
    v_stride,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention of a tile of queries over tokens begin .. end of one block table, without those
    before `first_seen`.

    Returns the softmax's sum, its peak, and the result before the division.
    """
    BLOCK_M: tl.constexpr = query.shape[0]
    BLOCK_D: tl.constexpr = query.shape[1]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        seen = (token < end) & (token >= first_seen)
        slot = _slots(table, start, 0, end, PAGE, BLOCK_N)
        key, value = _load_tiles(k, v, slot, seen, k_stride, v_stride, D, BLOCK_D)
        scores, factor = _score(query, key, scale, cap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak, total, acc = _accumulate(scores, factor, value, peak, total, acc)
    return total, peak, acc
