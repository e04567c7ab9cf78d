"""Triton kernels for rows that ask for more than temperature and seed.

Knows how to apply penalties, to find the least logit that the filters keep, to sample from what is
left, and to find the likeliest tokens. What is computed is said by sampling/resampler.py, which
puts the vocabulary in order. Here nothing is sorted.

One kernel reads the logits once, and leaves of each chunk of the vocabulary its greatest logit and
its weight. Then one program a row opens only the chunks that can hold what it looks for: of the k
likeliest tokens, none is below the k-th greatest of the chunks' maxima. Among those it bisects over
the logits' bits, as integers that order as the floats do. What the filters come to is one logit:
tokens are kept from there on, and equal ones are all kept or all dropped.

Sums run in an order that depends on the row alone, so the kept tokens are the same in any batch.

Shapes: R rows that ask for more, among the B rows of a step; V vocabulary entries; S batch slots;
C chunks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.triton.dispatch import launch
from nanovllm.kernels.triton.sampling import (
    INVALID,
    LN_2,
    LOG2_E,
    best_entry,
    cell_values,
    scale_of,
)
from nanovllm.layers.sampler import CELL as CELL_

CAN_COMPILE = hasattr(tl, "tuple")  # releases since 3.3
CELL = tl.constexpr(CELL_)
CHUNK_CELLS = tl.constexpr(8)
CHUNK = tl.constexpr(8 * CELL_)
# What a program has in registers at a time.
TILE_CELLS = tl.constexpr(256)
TILE_CHUNKS = tl.constexpr(256 // 8)
# Columns of the tables of what slots ask for: see sampling/slots.py. Kernels take its `params` by
# another name, which Triton's launcher needs for itself.
TOP_P, MARGIN, REPETITION, FREQUENCY, PRESENCE, PARAMS = (tl.constexpr(i) for i in range(6))
TOP_K, LEAST_LENGTH, NUM_LOGPROBS, LIMITS = (tl.constexpr(i) for i in range(4))
# What is done to a row's logits.
PENALTIES, BARS = tl.constexpr(1), tl.constexpr(2)
# Keys order as floats do. These are no float's.
LOWEST, HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
LOWEST_PAIR, HIGHEST_PAIR = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
# Bisections of where top_p may end, by what is known of chunks.
ROUNDS = tl.constexpr(16)


def resample(
    logits: Tensor, at: Tensor, step: Any, state: Any, asked: Any, counts: Tensor, barred: Tensor
) -> None:
    """Sample for R rows of a step, and put their tokens in the place of those that it sampled.

    logits [B or R, V]. at [3, R] int64: each row's place in `logits`, its place in the step, its
    batch slot. `step` has tokens [B] int64 and positions [B] int32. `state`, a BatchState, has
    temperatures, seeds and last_tokens [S]. `asked` has what slots ask for: params [S, 5] float32
    and limits [S, 3] int32, see sampling/slots.py; so for counts [S, V] int32 and barred [S, V]
    bool, which may have one element if no slot asks for them.

    A row whose slot asks for nothing keeps its token, and so does one whose token is INVALID.
    """
    rows, vocab = at.shape[1], logits.shape[1]
    chunks = triton.cdiv(vocab, CHUNK.value)
    tables = _chunk_tables(logits, rows, chunks)
    places = logits, *at.unbind(0), step.tokens, step.positions
    per_slot = state.temperatures, state.seeds, asked.params, asked.limits, counts, barred
    sizes = logits.stride(0), vocab, chunks
    # Products and sums are rounded one by one, as PyTorch rounds them.
    options: Any = dict(enable_fp_fusion=False)
    grid = rows, triton.cdiv(chunks, TILE_CHUNKS.value)
    launch(_chunks_kernel, grid, *places, *per_slot, *tables, *sizes, num_warps=4, **options)
    widest = triton.next_power_of_2(chunks)
    launch(
        _resample_kernel,
        (rows,),
        *places,
        *per_slot,
        *tables,
        state.last_tokens,
        *sizes,
        widest,
        num_warps=8,
        **options,
    )


def logprobs(
    logits: Tensor, at: Tensor, tokens: Tensor, limits: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens [B] that a step sampled for R of its rows, and of the
    likeliest.

    `logits`, `at` and `limits` as above. A slot asks for at most `most`, or -1 if it does not.
    Returns token ids [R, 1 + most] int32 and values [R, 1 + most] float32: first the sampled token,
    then the likeliest in order, the lower id first of equally likely ones. What is not asked for is
    not written.
    """
    rows, vocab = at.shape[1], logits.shape[1]
    chunks = triton.cdiv(vocab, CHUNK.value)
    tables = _chunk_tables(logits, rows, chunks)
    token_ids = torch.empty(rows, 1 + most, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, 1 + most, dtype=torch.float32, device=logits.device)
    places = logits, *at.unbind(0), tokens
    sizes = logits.stride(0), vocab, chunks
    grid = rows, triton.cdiv(chunks, TILE_CHUNKS.value)
    launch(_raw_chunks_kernel, grid, *places, limits, *tables, *sizes, num_warps=4)
    widest = triton.next_power_of_2(chunks)
    launch(
        _logprobs_kernel,
        (rows,),
        *places,
        limits,
        *tables,
        token_ids,
        values,
        most,
        *sizes,
        widest,
        num_warps=8,
    )
    return token_ids, values


def _chunk_tables(logits: Tensor, rows: int, chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for each chunk's greatest logit and weight, and for a list of chunks or cells."""
    shape = rows, chunks
    maxima, weights = (torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in "ab")
    return maxima, weights, torch.empty(shape, dtype=torch.int32, device=logits.device)


@triton.jit
def _chunks_kernel(
    logits,
    logits_at,
    step_at,
    slots,
    tokens,
    positions,
    temperatures,
    seeds,
    settings,
    limits,
    counts,
    barred,
    maxima,
    weights,
    found,
    row_stride,
    vocab,
    chunks,
):
    """Of each chunk of a row that filters: its greatest logit and its weight. Of one that only
    changes logits: its best cell, with noise.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    slot, at = tl.load(slots + row), tl.load(step_at + row)
    settings, limits = settings + slot * PARAMS, limits + slot * LIMITS
    position = tl.load(positions + at)
    edits, filters = _edits(settings, limits, position), _filters(settings, limits, vocab)
    if (tl.load(tokens + at) == INVALID) | ((edits == 0) & ~filters):
        return
    logits += tl.load(logits_at + row) * row_stride
    counts, barred = counts + slot * vocab, barred + slot * vocab
    greedy, scale = scale_of(tl.load(temperatures + slot))

    cell = part * TILE_CELLS + tl.arange(0, TILE_CELLS)
    x = _edited_logits((logits, counts, barred, settings, edits, vocab), _columns(cell))
    chunk = part * TILE_CHUNKS + tl.arange(0, TILE_CHUNKS)
    inside = chunk < chunks
    out = row * chunks + chunk
    if filters:
        peak, weight = _chunk_peaks_and_weights(x, scale)
        tl.store(maxima + out, peak, mask=inside)
        tl.store(weights + out, weight, mask=inside)
    else:
        value = cell_values(x * scale, cell * CELL, greedy, tl.load(seeds + slot), position)
        values = tl.reshape(value, (TILE_CHUNKS, CHUNK_CELLS))
        cells = tl.reshape(cell, (TILE_CHUNKS, CHUNK_CELLS))
        best = tl.max(values, axis=1)
        tl.store(maxima + out, best, mask=inside)
        best_cell = tl.min(tl.where(values == best[:, None], cells, HIGHEST), axis=1)
        tl.store(found + out, best_cell, mask=inside)


@triton.jit
def _raw_chunks_kernel(
    logits,
    logits_at,
    step_at,
    slots,
    tokens,
    limits,
    maxima,
    weights,
    found,
    row_stride,
    vocab,
    chunks,
):
    """Of each chunk of a row that asks for log-probabilities: its greatest logit and its weight."""
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(limits + tl.load(slots + row) * LIMITS + NUM_LOGPROBS) < 0:
        return
    logits += tl.load(logits_at + row) * row_stride
    cell = part * TILE_CELLS + tl.arange(0, TILE_CELLS)
    x = _logits(logits, _columns(cell), vocab)
    peak, weight = _chunk_peaks_and_weights(x, LOG2_E)
    chunk = part * TILE_CHUNKS + tl.arange(0, TILE_CHUNKS)
    tl.store(maxima + row * chunks + chunk, peak, mask=chunk < chunks)
    tl.store(weights + row * chunks + chunk, weight, mask=chunk < chunks)


@triton.jit
def _resample_kernel(
    logits,
    logits_at,
    step_at,
    slots,
    tokens,
    positions,
    temperatures,
    seeds,
    settings,
    limits,
    counts,
    barred,
    maxima,
    weights,
    found,
    last_tokens,
    row_stride,
    vocab,
    chunks,
    WIDEST: tl.constexpr,
):
    """Sample a row's token, and count it."""
    row = tl.program_id(0)
    slot, at = tl.load(slots + row), tl.load(step_at + row)
    settings, limits = settings + slot * PARAMS, limits + slot * LIMITS
    position = tl.load(positions + at)
    edits, filters = _edits(settings, limits, position), _filters(settings, limits, vocab)
    if (tl.load(tokens + at) == INVALID) | ((edits == 0) & ~filters):
        return
    logits += tl.load(logits_at + row) * row_stride
    counts, barred = counts + slot * vocab, barred + slot * vocab
    maxima, weights, found = maxima + row * chunks, weights + row * chunks, found + row * chunks
    greedy, scale = scale_of(tl.load(temperatures + slot))
    seed = tl.load(seeds + slot)

    edited = logits, counts, barred, settings, edits, vocab
    chunk = tl.arange(0, WIDEST)
    maximum = tl.load(maxima + chunk, mask=chunk < chunks, other=float("-inf"))
    best = tl.max(maximum, axis=0)
    least = LOWEST
    if filters:
        weight = tl.load(weights + chunk, mask=chunk < chunks, other=0.0)
        opened = found, chunks, best, scale
        least, num_open = least_kept(edited, opened, chunk, maximum, weight, limits)
        best, best_cell = _best_kept_cell(edited, opened, num_open, least, seed, position)
    else:
        cell = tl.load(found + chunk, mask=chunk < chunks, other=HIGHEST)
        best_cell = tl.min(tl.where(maximum == best, cell, HIGHEST), axis=0)

    # Minus infinity, or no number, if there is no token that may be sampled.
    is_valid = (best > float("-inf")) & (best < float("inf"))
    col = tl.where(is_valid, best_cell, 0) * CELL + tl.arange(0, CELL)
    x = _edited_logits(edited, col)
    scores = tl.where(_key(x) >= least, x, float("-inf")) * scale
    token = best_entry(scores, col, col < vocab, greedy, seed, position)
    if is_valid & ((edits & PENALTIES) != 0):
        tl.store(counts + token, tl.maximum(tl.load(counts + token), 1) + 1)
    token = tl.where(is_valid, token, INVALID).to(tl.int64)
    tl.store(tokens + at, token)
    tl.store(last_tokens + slot, token)


@triton.jit(do_not_specialize=["most"])
def _logprobs_kernel(
    logits,
    logits_at,
    step_at,
    slots,
    tokens,
    limits,
    maxima,
    weights,
    found,
    token_ids,
    values,
    most,
    row_stride,
    vocab,
    chunks,
    WIDEST: tl.constexpr,
):
    """A row's sampled token and its likeliest ones, one after the other."""
    row = tl.program_id(0)
    count = tl.load(limits + tl.load(slots + row) * LIMITS + NUM_LOGPROBS)
    token = tl.load(tokens + tl.load(step_at + row))
    if (count < 0) | (token == INVALID):
        return
    logits += tl.load(logits_at + row) * row_stride
    token_ids, values = token_ids + row * (1 + most), values + row * (1 + most)
    found += row * chunks
    chunk = tl.arange(0, WIDEST)
    at = row * chunks + chunk
    maximum = tl.load(maxima + at, mask=chunk < chunks, other=float("-inf"))
    weight = tl.load(weights + at, mask=chunk < chunks, other=0.0)
    peak = tl.max(maximum, axis=0)
    total = tl.sum(weight * tl.exp2((maximum - peak) * LOG2_E), axis=0)
    norm = peak + tl.log2(total) * LN_2
    tl.store(token_ids, token.to(tl.int32))
    tl.store(values, tl.load(logits + token).to(tl.float32) - norm)

    count = tl.minimum(count, vocab)
    least = LOWEST
    if (count > 0) & (count <= chunks):
        least = _kth_key(_key(maximum), count)
    num_open = _list_chunks(found, chunk, maximum, least, chunks)
    before = HIGHEST_PAIR
    for i in range(1, count + 1):
        before = _next_pair(logits, vocab, found, num_open, chunks, before)
        col = HIGHEST - (before & HIGHEST).to(tl.int32)
        tl.store(token_ids + i, col)
        tl.store(values + i, tl.load(logits + col).to(tl.float32) - norm)


@triton.jit
def _edits(settings, limits, position):
    """What is done to a slot's logits before the token at `position` is sampled."""
    additive = (tl.load(settings + FREQUENCY) != 0) | (tl.load(settings + PRESENCE) != 0)
    penalizes = additive | (tl.load(settings + REPETITION) != 1)
    bars = position < tl.load(limits + LEAST_LENGTH)
    return tl.where(penalizes, PENALTIES, 0) | tl.where(bars, BARS, 0)


@triton.jit
def _filters(settings, limits, vocab):
    """Whether a slot's filters may drop a token."""
    some = (tl.load(settings + TOP_P) < 1) | (tl.load(settings + MARGIN) > float("-inf"))
    return some | (tl.load(limits + TOP_K) < vocab)


@triton.jit
def _logits(logits, col, vocab):
    return tl.load(logits + col, mask=col < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _edited_logits(edited, col):
    """What is sampled from, before temperature: logits with penalties, and minus infinity where a
    token is barred. `edited` is (a row's logits, its slot's counts, barred, settings, edits, V).

    A count is 0 for a token that the sequence does not hold, else 1 more than what the output has
    of it.
    """
    logits, counts, barred, settings, edits, vocab = edited
    x = _logits(logits, col, vocab)
    if (edits & PENALTIES) != 0:
        repetition = tl.load(settings + REPETITION)
        count = tl.load(counts + col, mask=col < vocab, other=0)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(count > 0, repeated, x)
        x -= tl.load(settings + FREQUENCY) * tl.maximum(count - 1, 0).to(tl.float32)
        x -= tl.where(count > 1, tl.load(settings + PRESENCE), 0.0)
    if (edits & BARS) != 0:
        is_barred = tl.load(barred + col, mask=col < vocab, other=0) != 0
        x = tl.where(is_barred, float("-inf"), x)
    return x


@triton.jit
def _columns(cell):
    return cell[:, None] * CELL + tl.arange(0, CELL)[None, :]


@triton.jit
def _chunk_peaks_and_weights(x, scale):
    """x [TILE_CELLS, CELL] -> of each chunk the maximum, and the sum of exp(x - maximum) at the
    scale of a temperature.
    """
    peak = tl.max(x, axis=1)
    finite = tl.maximum(peak, -1e30)  # -inf less itself is no number
    weight = tl.sum(tl.exp2((x - finite[:, None]) * scale), axis=1)
    peaks = tl.reshape(peak, (TILE_CHUNKS, CHUNK_CELLS))
    weights = tl.reshape(weight, (TILE_CHUNKS, CHUNK_CELLS))
    chunk_peak = tl.max(peaks, axis=1)
    finite = tl.maximum(chunk_peak, -1e30)
    parts = weights * tl.exp2((peaks - finite[:, None]) * scale)
    return chunk_peak, tl.sum(parts, axis=1)


@triton.jit
def _key(x):
    """An integer that orders as the float does, the same for both zeros."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & HIGHEST)


@triton.jit
def _middle(low, high):
    """Above `low` if that is below `high`, and at most `high`."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _kth_key(keys, k):
    """The k-th greatest of keys [N], by bisection: each step leaves fewer of them."""
    low, high = tl.min(keys, axis=0), tl.max(keys, axis=0)
    while low < high:
        middle = _middle(low, high)
        above = keys >= middle
        count = tl.sum(above.to(tl.int32), axis=0)
        if count < k:
            high = tl.max(tl.where(above, LOWEST, keys), axis=0)
        else:
            low = tl.min(tl.where(above, keys, HIGHEST), axis=0)
        if count == k:
            high = low
    return low


@triton.jit
def least_kept(edited, opened, chunk, maximum, weight, limits):
    """The least key that the filters keep, and how many chunks hold such keys: those are listed.

    `opened` is (where to list chunks, C, the greatest logit, the scale of the temperature).
    `maximum` and `weight` [C and more] are of `chunk`.
    """
    found, chunks, peak, scale = opened
    settings, vocab = edited[3], edited[5]
    k, p, margin = tl.load(limits + TOP_K), tl.load(settings + TOP_P), tl.load(settings + MARGIN)
    weight *= tl.exp2((maximum - peak) * scale)
    total = tl.sum(weight, axis=0)
    least = _key(peak + margin)
    bounds_only_top_p = (k >= vocab) & (margin == float("-inf"))
    if k < tl.sum((maximum > float("-inf")).to(tl.int32), axis=0):
        least = tl.maximum(least, _kth_key(_key(maximum), k))
    elif (p < 1) & bounds_only_top_p:
        least = _key(_least_by_chunks(maximum, weight, total, p, peak, scale, vocab))
    num_open = _list_chunks(found, chunk, maximum, least, chunks)
    if k < vocab:
        least = _search(edited, opened, num_open, least, k.to(tl.float32), False)
    if p < 1:
        if not bounds_only_top_p:
            # A part of what is left: of k tokens, though more may be as likely as the last.
            above, more, _, _ = _split(edited, opened, num_open, least + 1)
            some, total, _, _ = _split(edited, opened, num_open, least)
            equal = tl.maximum(some - above, 1.0)
            total = more + (total - more) * (tl.minimum(k - above, equal) / equal)
        least = _search(edited, opened, num_open, least, p * total, True)
    return least, num_open


@triton.jit
def _least_by_chunks(maximum, weight, total, p, peak, scale, vocab):
    """A logit from which on tokens weigh p * total or more, by what is known of chunks."""
    # All tokens below `low` together weigh less than what top_p drops.
    low = peak + tl.log2((1 - p) * total / vocab) / scale
    high = peak
    likeliest = tl.exp2((maximum - peak) * scale)
    for _ in range(ROUNDS):
        middle = (low + high) * 0.5
        # A chunk's tokens below `middle` weigh less than as many at it.
        rest = weight - (CHUNK - 1) * tl.exp2((middle - peak) * scale)
        above = tl.sum(tl.where(maximum >= middle, tl.maximum(likeliest, rest), 0.0), axis=0)
        reached = above > p * total * 1.0001  # whatever the sums' rounding
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _list_chunks(found, chunk, maximum, least, chunks):
    """List the chunks that hold a key of at least `least`, in order; returns how many."""
    is_open = (chunk < chunks) & (_key(maximum) >= least)
    ones = is_open.to(tl.int32)
    tl.debug_barrier()  # what was in the list is read
    tl.store(found + tl.cumsum(ones, axis=0) - ones, chunk, mask=is_open)
    tl.debug_barrier()  # all threads have stored
    return tl.sum(ones, axis=0)


@triton.jit
def _listed_cells(found, begin, num_open, chunks):
    """The cells of a tile of listed chunks; beyond the list, cells beyond the vocabulary."""
    at = begin * CHUNK_CELLS + tl.arange(0, TILE_CELLS)
    chunk = tl.load(found + at // CHUNK_CELLS, mask=at < num_open * CHUNK_CELLS, other=chunks)
    return chunk * CHUNK_CELLS + at % CHUNK_CELLS


@triton.jit
def _split(edited, opened, num_open, middle):
    """Of the logits in listed chunks whose key is at least `middle`: how many there are, what they
    weigh, and the least key; and the greatest key below.
    """
    found, chunks, peak, scale = opened
    count = tl.zeros([TILE_CELLS, CELL], tl.float32)
    weight = tl.zeros([TILE_CELLS, CELL], tl.float32)
    least = tl.full([TILE_CELLS, CELL], HIGHEST, tl.int32)
    below = tl.full([TILE_CELLS, CELL], LOWEST, tl.int32)
    for begin in range(0, num_open, TILE_CHUNKS):
        x = _edited_logits(edited, _columns(_listed_cells(found, begin, num_open, chunks)))
        key = _key(x)
        above = key >= middle
        count += tl.where(above, 1.0, 0.0)
        weight += tl.where(above, tl.exp2((x - peak) * scale), 0.0)
        least = tl.minimum(least, tl.where(above, key, HIGHEST))
        below = tl.maximum(below, tl.where(above, LOWEST, key))
    return tl.sum(count), tl.sum(weight), tl.min(least), tl.max(below)


@triton.jit
def _search(edited, opened, num_open, low, target, BY_WEIGHT: tl.constexpr):
    """The greatest key from which on logits are `target` or more, in number or weight; `low` if
    none above it is.
    """
    high = _key(opened[2])
    while low < high:
        middle = _middle(low, high)
        count, weight, least, below = _split(edited, opened, num_open, middle)
        reached = weight if BY_WEIGHT else count
        if reached < target:
            high = below
        else:
            low = least
        if reached == target:
            high = low
    return low


@triton.jit
def _best_kept_cell(edited, opened, num_open, least, seed, position):
    """The best cell, with noise, of what is kept: its value, and which it is."""
    found, chunks, peak, scale = opened
    best = tl.full([TILE_CELLS], float("-inf"), tl.float32)
    best_cell = tl.full([TILE_CELLS], HIGHEST, tl.int32)
    for begin in range(0, num_open, TILE_CHUNKS):
        cell = _listed_cells(found, begin, num_open, chunks)
        x = _edited_logits(edited, _columns(cell))
        scores = tl.where(_key(x) >= least, x, float("-inf")) * scale
        value = cell_values(scores, cell * CELL, False, seed, position)
        best_cell = tl.where(value > best, cell, best_cell)
        best = tl.maximum(best, value)
    value = tl.max(best, axis=0)
    return value, tl.min(tl.where(best == value, best_cell, HIGHEST), axis=0)


@triton.jit
def _next_pair(logits, vocab, found, num_open, chunks, before):
    """The greatest pair below `before` of a logit's key and its column, where the lower column is
    the greater.
    """
    best = tl.full([TILE_CELLS, CELL], LOWEST_PAIR, tl.int64)
    for begin in range(0, num_open, TILE_CHUNKS):
        col = _columns(_listed_cells(found, begin, num_open, chunks))
        pair = (_key(_logits(logits, col, vocab)).to(tl.int64) << 32) | (HIGHEST - col)
        best = tl.maximum(best, tl.where((col < vocab) & (pair < before), pair, LOWEST_PAIR))
    return tl.max(best)
