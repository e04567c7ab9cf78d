"""Attention of prompt chunks over the paged KV cache: flash attention in Triton.

The twin of `prefill_attention` is the function of that name in layers/attention.py.
attention_tiles.py explains tile, split and page. The host does not wait for the device.

Shapes: P tokens of N prompt chunks, H query heads, G KV heads, D head size, W block-table width.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.attention_tiles import (
    EMPTY,
    accumulate,
    for_codes,
    from_tiles,
    load_tiles,
    padded_head_dim,
    score_factors,
    score_tile,
    slot_of,
    slots_of,
    with_sink,
)
from nanovllm.backends.cuda.triton.dispatch import (
    TensorDescriptor,
    cdiv,
    has_large_shared_memory,
    launch,
)
from nanovllm.backends.cuda.triton.e4m3 import PLAIN, how_to_decode
from nanovllm.layers.attention import AttentionOptions, PackedKV, PagedKV
from nanovllm.layers.context import PrefillMetadata

BLOCK_M = 64  # queries of a prefill program
TILED_KEYS = 256  # from so many keys on, the tensor memory accelerator fetches K and V


@dataclass(frozen=True, slots=True)
class TiledPrefill(PrefillMetadata):
    """Chunks whose lengths the host does not know, so that a CUDA graph serves other lengths, too.

    `cu_seqlens_q` counts from the step's first token. The last chunks may have no tokens.
    """

    query_tiles: Tensor  # [tiles, 2] int32: each tile's chunk, and its first query in the chunk


def tile_queries(cu_seqlens_q: Tensor, count: int) -> Tensor:
    """Cut the queries of all chunks into tiles of BLOCK_M: [count, 2] int32 for TiledPrefill.

    There are at most tokens / BLOCK_M + chunks tiles; `count` must be no less. Superfluous tiles
    start behind their chunk's end.
    """
    tiles = (cu_seqlens_q.diff() + BLOCK_M - 1) // BLOCK_M
    ends = tiles.cumsum(0)
    tile = torch.arange(count, device=ends.device)
    chunk = torch.searchsorted(ends, tile, right=True).clamp(max=len(tiles) - 1)
    first = (tile - (ends - tiles)[chunk]) * BLOCK_M
    return torch.stack((chunk, first), dim=1).int()


def prefill_attention(
    q: Tensor,
    kv: PagedKV | PackedKV,
    metadata: PrefillMetadata,
    options: AttentionOptions,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attend within prompt chunks, causally: q [P, H, D] -> [P, H, D].

    `out`, if given, receives the result. With a TiledPrefill, the tensors begin with the rows of
    the step's decoding tokens, which are not written.
    """
    num_heads, head_dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tables, page, scales = None, 0, None
    if isinstance(kv, PagedKV):
        tables, page, scales = kv.block_tables, kv.cache.k.shape[1], kv.cache.scales
        # [slots, G, D]: a block table turns tokens into slots.
        k, v = kv.cache.k.flatten(0, 1), kv.cache.v.flatten(0, 1)
    else:
        k, v = kv.k, kv.v
    query_tiles = metadata.query_tiles if isinstance(metadata, TiledPrefill) else None
    block_n, warps, stages = _choose_tiles(q, scales is not None)
    # The host takes longer to describe tiles than tensors, and short prompts do not make up for
    # that. Prompts with a cached part are fetched by tiles all the same, because that saves the
    # compilation of a kernel.
    tiled = bool(page) or metadata.max_seqlen_k >= TILED_KEYS
    tiled = tiled and suits_tiles(k, v, page, block_n)
    k_tiles = describe_keys(k, block_n) if tiled else None
    v_tiles = describe_keys(v, block_n) if tiled else None
    if query_tiles is not None:
        assert page, "without a cache, the rows of k and v where chunks begin are not known"
        programs = len(query_tiles), num_heads, 1
    else:
        num_chunks = len(metadata.cu_seqlens_q) - 1
        programs = cdiv(metadata.max_seqlen_q, BLOCK_M), num_heads, num_chunks
    tensors = q, k, v, scales, k_tiles, v_tiles, out, options.sinks
    cu_seqlens = metadata.cu_seqlens_q, metadata.cu_seqlens_k
    table_stride = tables.stride(0) if tables is not None else 0
    sizes = (head_dim, padded_head_dim(head_dim), page, BLOCK_M, block_n)
    how = PLAIN.value if scales is None else how_to_decode(q.device)
    launch(
        _prefill_kernel,
        programs,
        *(*tensors, *cu_seqlens, tables, query_tiles, *score_factors(options)),
        *(q.stride(0), k.stride(0), v.stride(0), out.stride(0), table_stride),
        *(options.window or 0, num_heads // k.shape[1], *sizes, how),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def _choose_tiles(q: Tensor, is_fp8: bool) -> tuple[int, int, int]:
    """Choose the keys of a tile, the warps of a program and its stages."""
    # Two programs of this size share a multiprocessor. Measured on an H200, programs of 128 queries
    # are no faster, not even for a prompt of 16,384 tokens.
    head_bytes, is_large = q.shape[2] * q.element_size(), has_large_shared_memory(q.device)
    if is_fp8 and is_large and head_bytes <= 256:
        # Measured on an H200, 8 chunks of 2,048 of 3,072 tokens, 32 heads of 128: 1.79 ms, with
        # tiles of 64 keys and three stages 2.08 ms (bfloat16: 1.34 ms).
        return 128, 4, 2
    block_n, stages = (64, 3) if head_bytes <= 256 else (32, 2)
    return block_n, 8 if head_bytes > 128 and not is_large else 4, stages


def suits_tiles(k: Tensor, v: Tensor, page: int, block_n: int) -> bool:
    """Tell whether Hopper's tensor memory accelerator can fetch K and V.

    It needs dense heads of up to 256 bytes, and pages of whole tiles.
    """
    if TensorDescriptor is None or not has_large_shared_memory(k.device) or k.element_size() > 2:
        return False
    aligned = all(
        x.stride()[1:] == (x.shape[2], 1)
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        for x in (k, v)
    )
    return aligned and k.shape[2] in (16, 32, 64, 128) and page % block_n == 0


def describe_keys(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe x [T, G, D] to the accelerator, as tiles of `rows` rows of one head."""
    return TensorDescriptor(
        x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, x.shape[2]]
    )


# cu_seqlens_q and cu_seqlens_k are parts of one tensor, and N decides whether they are aligned:
# without do_not_specialize, Triton would compile a kernel for each case.
@triton.jit(do_not_specialize=["cu_seqlens_q", "cu_seqlens_k"])
def _prefill_kernel(
    q,
    k,
    v,
    scales,
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
    HOW: tl.constexpr,
):
    """Attend with BLOCK_M queries of one head to the chunk's keys and those cached before it."""
    # Later queries see more keys. Their long programs go first, so that the short programs fill the
    # end of the launch.
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
        if scales is not None:
            query = for_codes(query)
            scale *= tl.load(scales)
        col = head // GROUP * D
        k, v = k + col, v + col
        if PAGE:
            tables += chunk * table_stride
        position = len_k - len_q + first  # of the first query
        opening, end = 0, tl.minimum(len_k, position + BLOCK_M)
        if WINDOW:
            opening = tl.maximum(position + 1 - WINDOW, 0)
        # Blocks before `opening` may belong to another sequence by now, and memory behind the
        # chunk's end may hold NaN. The accelerator cannot leave out a part of a tile, so it fetches
        # only tiles that hold nothing but tokens of this sequence.
        whole = end
        if k_tiles is not None:
            whole = tl.minimum(end, len_k // BLOCK_N * BLOCK_N)
        peak = tl.full([BLOCK_M], EMPTY, tl.float32)
        total, acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(opening // BLOCK_N * BLOCK_N, whole, BLOCK_N):
            if k_tiles is not None:
                slot = slot_of(tables, start, start_k, PAGE)
                key, value = k_tiles.load([slot, col]).T, v_tiles.load([slot, col])
            else:
                token = start + tl.arange(0, BLOCK_N)
                held = (token >= opening) & (token < len_k)
                slot = slots_of(tables, start, start_k, len_k, PAGE, BLOCK_N)
                key, value = load_tiles(k, v, slot, held, k_stride, v_stride, D, BLOCK_D)
            if scales is not None:
                key, value = from_tiles(key, value, query.dtype, HOW)
            peak, total, acc = _attend_causally(
                query, key, value, start, position, scale, cap, peak, total, acc, WINDOW
            )
        # Load the ragged last tile, if the accelerator did not fetch it. The loop has one stage,
        # because two programs fit on a multiprocessor only if it loads nothing in advance.
        for start in tl.range(whole, end, BLOCK_N, num_stages=1):
            held = start + tl.arange(0, BLOCK_N) < len_k
            slot = slots_of(tables, start, start_k, len_k, PAGE, BLOCK_N)
            key, value = load_tiles(k, v, slot, held, k_stride, v_stride, D, BLOCK_D)
            if scales is not None:
                key, value = from_tiles(key, value, query.dtype, HOW)
            peak, total, acc = _attend_causally(
                query, key, value, start, position, scale, cap, peak, total, acc, WINDOW
            )
        if scales is not None:
            acc *= tl.load(scales + 1)
        total = with_sink(total, peak, sinks, head, True)
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + q_row * out_stride + head * D + dim[None, :], result, mask=inside)


@triton.jit
def _attend_causally(
    query, key, value, start, position, scale, cap, peak, total, acc, WINDOW: tl.constexpr
):
    """Add the keys of tokens from `start` on to the softmax of queries from `position` on.

    A query may see none of these keys. Its peak then stays as it was: EMPTY or above, thus finite.
    """
    scores, factor = score_tile(query, key, scale, cap)
    hides = start + key.shape[1] - 1 > position  # the first query does not see the last key
    if WINDOW:
        # The last query does not see the first key.
        hides |= start <= position + query.shape[0] - 1 - WINDOW
    if hides:
        at = position + tl.arange(0, query.shape[0])[:, None]
        token = start + tl.arange(0, key.shape[1])[None, :]
        sees = token <= at
        if WINDOW:
            sees &= token > at - WINDOW
        scores = tl.where(sees, scores, float("-inf"))
    return accumulate(scores, factor, value, peak, total, acc)
