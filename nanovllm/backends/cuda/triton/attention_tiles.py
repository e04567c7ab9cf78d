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
    scores = tl.dot(query, key, input_precision="ieee")
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
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    rescale = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores * scale - new_peak[:, None])  # one fused instruction, then the power
    total = total * rescale + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
    return new_peak, total, acc


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
def attend(
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
    """Attend with a tile of queries to tokens begin to end - 1 of one block table.

    Tokens before `first_seen` are not seen. Returns (total, peak, acc); acc / total is the result.
    """
    BLOCK_M: tl.constexpr = query.shape[0]
    BLOCK_D: tl.constexpr = query.shape[1]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        seen = (token < end) & (token >= first_seen)
        slot = slots_of(table, start, 0, end, PAGE, BLOCK_N)
        key, value = load_tiles(k, v, slot, seen, k_stride, v_stride, D, BLOCK_D)
        scores, factor = score_tile(query, key, scale, cap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak, total, acc = accumulate(scores, factor, value, peak, total, acc)
    return total, peak, acc
