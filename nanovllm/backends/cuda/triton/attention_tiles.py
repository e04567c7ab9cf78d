"""Parts that the attention kernels share: tiles of the paged KV cache, and the online softmax.

The kernels serve any block size that is a multiple of 16, grouped KV heads and any head size.

Terms of all attention kernels: a tile is what a program holds at a time, BLOCK_M queries or BLOCK_N
keys and values. A split is the part of one sequence's keys that one program reads. A page is a KV
block. `peak` is the greatest score so far, `total` the sum of the softmax's weights under that
peak, `acc` the sum of the weighted values. `scale` and peaks are in units of log2, because the
device computes powers of 2.

Shapes: H query heads, G KV heads, D head size, W block-table width.
"""

import triton
import triton.language as tl

from nanovllm.backends.cuda.triton.dispatch import next_power_of_2
from nanovllm.backends.cuda.triton.e4m3 import from_codes, from_words
from nanovllm.layers.attention import AttentionOptions

LOG2_E = 1.4426950408889634
EMPTY = tl.constexpr(-1e30)  # below any score, in units of log2: the peak of no keys


def score_factors(options: AttentionOptions) -> tuple[float, float | None]:
    """Return the kernels' `scale` and `cap`: scale q.k, or cap tanh(scale q.k), is a score.

    Scores are in units of log2. `cap` is None if scores are not capped.
    """
    scale, softcap = options.scale, options.softcap
    if softcap is None:
        return scale * LOG2_E, None
    return scale / softcap, softcap * LOG2_E


def padded_head_dim(head_dim: int) -> int:
    """Return the columns of a tile whose rows are heads: tensor cores take 16 at least."""
    return max(16, next_power_of_2(head_dim))


@triton.jit
def slot_of(table, token, first_slot, PAGE: tl.constexpr):
    """Return the KV slot of a sequence's token by its block table.

    Without pages, return the token's row in k and v, where the sequence begins at first_slot.
    """
    if PAGE:
        return tl.load(table + token // PAGE) * PAGE + token % PAGE
    else:
        return first_slot + token


@triton.jit
def slots_of(table, start, first_slot, length, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the slots of tokens start to start + BLOCK_N - 1."""
    offset = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:  # one page holds all these tokens, or there are no pages (PAGE is 0)
        slot = slot_of(table, start, first_slot, PAGE).to(tl.int64) + offset
    else:
        token = start + offset
        slot = (
            tl.load(table + token // PAGE, mask=token < length, other=0).to(tl.int64) * PAGE
            + token % PAGE
        )
    return slot


@triton.jit
def seen_of(start, end, first_seen, BLOCK_N: tl.constexpr):
    """Tell which of the tokens start to start + BLOCK_N - 1 are seen."""
    token = start + tl.arange(0, BLOCK_N)
    return (token < end) & (token >= first_seen)


@triton.jit
def load_tiles(k, v, slot, inside, k_stride, v_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load K, transposed, [BLOCK_D, BLOCK_N] and V [BLOCK_N, BLOCK_D] of the slots.

    Tokens that are not `inside` read as 0, because a weight of 0 times NaN would be NaN.
    """
    dim = tl.arange(0, BLOCK_D)
    k_at = k + slot[None, :] * k_stride + dim[:, None]
    v_at = v + slot[:, None] * v_stride + dim[None, :]
    key = tl.load(k_at, mask=inside[None, :] & (dim < D)[:, None], other=0.0)
    value = tl.load(v_at, mask=inside[:, None] & (dim < D)[None, :], other=0.0)
    return key, value


@triton.jit
def score_tile(query, key, scale, cap):
    """Compute a tile's scores. Returns (scores, factor): the true scores are scores * factor.

    The factor is `scale`, or 1 if the scores are capped.
    """
    return capped(tl.dot(query, key, input_precision="ieee"), scale, cap)


@triton.jit
def capped(scores, scale, cap):
    """Cap products of queries and keys, if scores are capped. Returns (scores, factor)."""
    factor = scale
    if cap is not None:
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * (scores * scale))) - 1.0
        scores, factor = cap * tanh, 1.0
    return scores, factor


@triton.jit
def accumulate(scores, scale, value, peak, total, acc):
    """Add a tile's share to the online softmax. Returns the new (peak, total, acc).

    The old sums are rescaled to the new peak. The true scores are scores * scale.
    """
    weights, rescale, peak, total = weigh(scores, scale, peak, total)
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
    return peak, total, acc


@triton.jit
def weigh(scores, scale, peak, total):
    """Compute a tile's weights in the online softmax. Returns (weights, rescale, peak, total).

    Sums under the old peak must be multiplied by `rescale`. The true scores are scores * scale.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    rescale = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores * scale - new_peak[:, None])  # one fused instruction, then the power
    return weights, rescale, new_peak, total * rescale + tl.sum(weights, axis=1)


@triton.jit
def with_sink(total, peak, sinks, head, inside):
    """Add the share of each head's sink, if there are sinks, to the softmax's total."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=float("-inf")).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - peak)  # log2(e) turns it into units of log2
    return total


@triton.jit
def split_span(length, splits, BLOCK_N: tl.constexpr):
    """Compute how many tokens a split takes: whole tiles, the same number for all splits.

    The length is read on the device, so that short contexts are spread over all splits, too.
    """
    return tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N


@triton.jit
def from_tiles(key, value, dtype: tl.constexpr, HOW: tl.constexpr):
    """Decode tiles of keys and values in FP8 codes."""
    return from_codes(key, HOW).to(dtype), from_codes(value, HOW).to(dtype)


@triton.jit
def for_codes(query):
    """Return queries in the dtype of decoded keys: float16, or float32 for float32.

    float16 holds all bfloat16 numbers between 6e-5 and 65,504; smaller ones hardly count.
    """
    if query.dtype == tl.bfloat16:
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return query


@triton.jit
def attend(
    query,
    k,
    v,
    scales,
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
    HOW: tl.constexpr,
    IN_WORDS: tl.constexpr,
    first=None,
):
    """Attend with a tile of queries to tokens begin to end - 1 of one block table.

    With `scales`, k and v hold FP8 codes; IN_WORDS: v holds words of four codes. Tokens before
    `first_seen` are not seen. `first`: the first tile's K and V, if they are loaded already.
    Returns (total, peak, acc); acc / total is the result.
    """
    BLOCK_M: tl.constexpr = query.shape[0]
    BLOCK_D: tl.constexpr = query.shape[1]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if scales is not None:
        scale *= tl.load(scales)
        query = for_codes(query)
    if not IN_WORDS:
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        has_more = True
        if first is not None:
            seen = seen_of(begin, end, first_seen, BLOCK_N)
            key, value = first
            peak, total, acc = attend_tile(query, key, value, seen, scale, cap, peak, total, acc)
            begin += BLOCK_N
            has_more = begin < end
        if has_more:
            for start in range(begin, end, BLOCK_N):
                seen = seen_of(start, end, first_seen, BLOCK_N)
                slot = slots_of(table, start, 0, end, PAGE, BLOCK_N)
                key, value = load_tiles(k, v, slot, seen, k_stride, v_stride, D, BLOCK_D)
                if scales is not None:
                    key, value = from_tiles(key, value, query.dtype, HOW)
                peak, total, acc = attend_tile(
                    query, key, value, seen, scale, cap, peak, total, acc
                )
        if scales is not None:
            acc *= tl.load(scales + 1)
        return total, peak, acc
    else:
        # Tensor cores take values of V in pairs that follow one another in tokens, but in memory
        # they follow one another in a head. So each thread reads words of two tokens, and columns
        # 0, 4, 8, ... of V, those after them, and so on are products of their own.
        none = tl.zeros([BLOCK_M, BLOCK_D // 4], tl.float32)
        sums = peak, total, none, none, none, none
        memory = k, v, table, k_stride, v_stride
        seen = first_seen, end
        whole = begin
        if first_seen <= begin:
            whole = begin + (end - begin) // BLOCK_N * BLOCK_N
        for start in range(begin, whole, BLOCK_N):
            sums = attend_words(
                query, memory, start, seen, scale, cap, sums, True, D, PAGE, BLOCK_N, HOW
            )
        for start in tl.range(whole, end, BLOCK_N, num_stages=1):
            sums = attend_words(
                query, memory, start, seen, scale, cap, sums, False, D, PAGE, BLOCK_N, HOW
            )
        peak, total, acc0, acc1, acc2, acc3 = sums
        acc = tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3))  # [M, D / 4, i, j]: 4 w + 2 i + j
        return total, peak, tl.reshape(acc, [BLOCK_M, BLOCK_D]) * tl.load(scales + 1)


@triton.jit
def attend_tile(query, key, value, seen, scale, cap, peak, total, acc):
    """Add a tile's tokens, of which some are seen, to the softmax. Return the new sums."""
    scores, factor = score_tile(query, key, scale, cap)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    return accumulate(scores, factor, value, peak, total, acc)


@triton.jit
def attend_words(
    query,
    memory,
    start,
    seen,
    scale,
    cap,
    sums,
    WHOLE: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HOW: tl.constexpr,
):
    """Add the tokens from `start` on to the softmax. Return the new sums.

    Args:
        memory: (k, v, table, k_stride, v_stride). k holds codes, and v words of four codes.
        seen: (first token that is seen, end of those that are seen).
        sums: (peak, total, acc of columns 0, 4, 8, ..., acc of columns 1, 5, 9, ..., and so on).
        WHOLE: whether all of the tile's tokens are seen.
    """
    peak, total, acc0, acc1, acc2, acc3 = sums
    key, value = load_codes(memory, start, seen, WHOLE, D, query.shape[1], PAGE, BLOCK_N)
    scores, factor = score_tile(query, from_codes(key, HOW).to(query.dtype), scale, cap)
    if not WHOLE:
        token = start + tl.arange(0, BLOCK_N)
        is_seen = (token >= seen[0]) & (token < seen[1])
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
    weights, rescale, peak, total = weigh(scores, factor, peak, total)
    weights, rescale = weights.to(query.dtype), rescale[:, None]
    v0, v1, v2, v3 = from_words(value, HOW)
    acc0 = tl.dot(weights, v0.to(query.dtype), acc0 * rescale, input_precision="ieee")
    acc1 = tl.dot(weights, v1.to(query.dtype), acc1 * rescale, input_precision="ieee")
    acc2 = tl.dot(weights, v2.to(query.dtype), acc2 * rescale, input_precision="ieee")
    acc3 = tl.dot(weights, v3.to(query.dtype), acc3 * rescale, input_precision="ieee")
    return peak, total, acc0, acc1, acc2, acc3


@triton.jit
def load_codes(
    memory,
    start,
    seen,
    WHOLE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Load codes of K [BLOCK_D, BLOCK_N], and words of V [BLOCK_N, BLOCK_D / 4].

    Tokens that are not seen read as 0.
    """
    k, v, table, k_stride, v_stride = memory
    dim, word = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 4)
    slot = tl.arange(0, BLOCK_N)
    token = start + slot
    if PAGE % BLOCK_N == 0:
        # The tile's address is one number, to which each thread adds what it added last time.
        first = slot_of(table, start, 0, PAGE).to(tl.int64)
        k += first * k_stride
        v += first * v_stride
    else:
        slot = slots_of(table, start, 0, seen[1], PAGE, BLOCK_N)
    k_at = k + (slot[None, :] * k_stride + dim[:, None])
    v_at = v + (slot[:, None] * v_stride + word[None, :])
    if WHOLE and D == BLOCK_D:
        return tl.load(k_at), tl.load(v_at)
    else:
        is_seen = (token >= seen[0]) & (token < seen[1])
        key = tl.load(k_at, mask=is_seen[None, :] & (dim < D)[:, None], other=0)
        value = tl.load(v_at, mask=is_seen[:, None] & (word < D // 4)[None, :], other=0)
        return key, value
