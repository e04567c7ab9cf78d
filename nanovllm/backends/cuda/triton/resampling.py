"""Triton kernels for rows that ask for more than temperature and seed.

Knows how to apply penalties, to find the least logit that the filters keep, to sample from what is
left, and to find the likeliest tokens. What is computed is said by sampling/resampler.py, which
puts the vocabulary in order. Here nothing is sorted.

One kernel reads the logits once, and leaves of each chunk of the vocabulary its greatest logit and
its weight. Then one program a row opens only the chunks that can hold what it looks for: of the k
likeliest tokens, none is below the k-th greatest of the chunks' maxima. Among those it bisects over
the logits' bits, as integers that order as the floats do. What the filters come to is one logit:
tokens are kept from there on, and equal ones are all kept or all dropped.

Where top_p alone keeps much of the vocabulary, most chunks must be opened. A sample of their cells
then tells between which two logits the least kept one is, all but surely; one pass weighs what is
above and lists what is between, and only that is bisected.

Sums run in an order that depends on the row alone, so the kept tokens are the same in any batch.

Shapes: R rows, among the B rows of a step; V vocabulary entries; S batch slots; C chunks. Rows that
ask for nothing may be among the R: they are passed over.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import launch
from nanovllm.backends.cuda.triton.sampling import (
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
# Columns of the table of what slots ask for: see sampling/slots.py. Kernels take its `params` by
# another name, which Triton's launcher needs for itself.
TEMPERATURE, TOP_P, MARGIN = (tl.constexpr(i) for i in range(3))
REPETITION, FREQUENCY, PRESENCE = (tl.constexpr(i) for i in range(3, 6))
TOP_K, LEAST_LENGTH, NUM_LOGPROBS = (tl.constexpr(i) for i in range(3))
COLUMNS = tl.constexpr(9)
# What is done to a row's logits.
PENALTIES, BARS = tl.constexpr(1), tl.constexpr(2)
# Keys order as floats do. These are no float's.
LOWEST, HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
LOWEST_PAIR, HIGHEST_PAIR = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
# Bisections of where top_p may end, by what is known of chunks.
ROUNDS = tl.constexpr(16)


# Of more open chunks, this many cells are looked at first; and how many tokens may then be between
# the two bounds.
MANY_CHUNKS = tl.constexpr(128)
SAMPLE_CELLS = tl.constexpr(512)
MOST_BETWEEN = tl.constexpr(8192)


class Workspace:
    """What kernels leave for each other, of up to `rows` rows."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.chunks = triton.cdiv(vocab, CHUNK.value)
        shape = rows, self.chunks
        with device:
            self.maxima = torch.empty(shape, dtype=torch.float32)  # each chunk's greatest logit
            self.weights = torch.empty(shape, dtype=torch.float32)
            self.found = torch.empty(shape, dtype=torch.int32)  # a list of chunks or cells
            self.between = torch.empty(rows, MOST_BETWEEN.value, dtype=torch.float32)


def resample(
    logits: Tensor, at: Tensor, step: Any, state: Any, asked: Any, tables: Any, space: Workspace
) -> None:
    """Sample for R rows of a step, and put their tokens in the place of those that it sampled.

    logits [R, V]. at [R] int64: the rows' places in the step. `step` has tokens [B] int64,
    positions [B] int32 and slots [B] int64. `state`, a BatchState, has temperatures, seeds and
    last_tokens [S]: only rows whose temperature there is below 0 are sampled. `asked` has what
    slots ask for, columns of one table: params [S, 6] float32 and limits [S, 3] int32, see
    sampling/slots.py; so for `tables`: counts [S, V] int32, barred [S, V] bool, and cells
    [S, V / CELL] bool, which may have one element if no slot asks for them.
    """
    rows, vocab = len(at), logits.shape[1]
    row = logits, at, step.slots, state.temperatures, state.seeds, step.positions
    filters = asked.params, asked.limits, *tables
    sizes = logits.stride(0), vocab, space.chunks
    # Products and sums are rounded one by one, as PyTorch rounds them.
    options: Any = dict(enable_fp_fusion=False)
    grid = rows, triton.cdiv(space.chunks, TILE_CHUNKS.value)
    chunks = space.maxima, space.weights, space.found
    launch(_chunks_kernel, grid, *row, *filters, *chunks, *sizes, num_warps=4, **options)
    widest = triton.next_power_of_2(space.chunks)
    left = *chunks, space.between, step.tokens, state.last_tokens
    # With more registers only one program would run on a multiprocessor.
    options |= dict(num_warps=8, maxnreg=128)
    launch(_resample_kernel, (rows,), *row, *filters, *left, *sizes, widest, **options)


def logprobs(
    logits: Tensor, at: Tensor, step: Any, asked: Any, most: int, space: Workspace
) -> Tensor:
    """Log-probabilities of the tokens that a step sampled for R of its rows, and of the likeliest.

    `logits`, `at`, `step` and `asked` as above. A slot asks for at most `most`, or -1 if it does
    not. Returns [R, 1 + most, 2] int32: a token id, and its log-probability in a float32's bits;
    first the sampled token's, then the likeliest in order, the lower id first of equally likely
    ones. What is not asked for is not written.
    """
    rows, vocab = len(at), logits.shape[1]
    records = torch.empty(rows, 1 + most, 2, dtype=torch.int32, device=logits.device)
    row = logits, at, step.slots, asked.limits
    chunks = space.maxima, space.weights
    sizes = logits.stride(0), vocab, space.chunks
    grid = rows, triton.cdiv(space.chunks, TILE_CHUNKS.value)
    launch(_raw_chunks_kernel, grid, *row, *chunks, *sizes, num_warps=4)
    widest = triton.next_power_of_2(space.chunks)
    left = *chunks, space.found, step.tokens, records
    launch(_logprobs_kernel, (rows,), *row, *left, most, *sizes, widest, num_warps=8)
    return records


@triton.jit
def _chunks_kernel(
    logits,
    step_at,
    slots,
    temperatures,
    seeds,
    positions,
    settings,
    limits,
    counts,
    barred,
    edited_cells,
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
    at = tl.load(step_at + row)
    slot = tl.load(slots + at)
    if tl.load(temperatures + slot) >= 0:
        return
    settings, limits = settings + slot * COLUMNS, limits + slot * COLUMNS
    position = tl.load(positions + at)
    edits, filters = _edits(settings, limits, position), _filters(settings, limits, vocab)
    logits += row.to(tl.int64) * row_stride
    counts, barred = counts + slot * vocab, barred + slot * vocab
    edited_cells += slot * tl.cdiv(vocab, CELL)
    greedy, scale = scale_of(tl.load(settings + TEMPERATURE))

    cell = part * TILE_CELLS + tl.arange(0, TILE_CELLS)
    edited = logits, counts, barred, edited_cells, settings, edits, vocab
    x = _edited_logits(edited, cell)
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
    step_at,
    slots,
    limits,
    maxima,
    weights,
    row_stride,
    vocab,
    chunks,
):
    """Of each chunk of a row that asks for log-probabilities: its greatest logit and its weight."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + tl.load(step_at + row))
    if tl.load(limits + slot * COLUMNS + NUM_LOGPROBS) < 0:
        return
    logits += row.to(tl.int64) * row_stride
    cell = part * TILE_CELLS + tl.arange(0, TILE_CELLS)
    x = _logits(logits, _columns(cell), vocab)
    peak, weight = _chunk_peaks_and_weights(x, LOG2_E)
    chunk = part * TILE_CHUNKS + tl.arange(0, TILE_CHUNKS)
    tl.store(maxima + row * chunks + chunk, peak, mask=chunk < chunks)
    tl.store(weights + row * chunks + chunk, weight, mask=chunk < chunks)


@triton.jit
def _resample_kernel(
    logits,
    step_at,
    slots,
    temperatures,
    seeds,
    positions,
    settings,
    limits,
    counts,
    barred,
    edited_cells,
    maxima,
    weights,
    found,
    between,
    tokens,
    last_tokens,
    row_stride,
    vocab,
    chunks,
    WIDEST: tl.constexpr,
):
    """Sample a row's token, and count it."""
    row = tl.program_id(0)
    at = tl.load(step_at + row)
    slot = tl.load(slots + at)
    if tl.load(temperatures + slot) >= 0:
        return
    settings, limits = settings + slot * COLUMNS, limits + slot * COLUMNS
    position = tl.load(positions + at)
    edits, filters = _edits(settings, limits, position), _filters(settings, limits, vocab)
    logits += row.to(tl.int64) * row_stride
    counts, barred = counts + slot * vocab, barred + slot * vocab
    edited_cells += slot * tl.cdiv(vocab, CELL)
    maxima, weights, found = maxima + row * chunks, weights + row * chunks, found + row * chunks
    between += row * MOST_BETWEEN
    greedy, scale = scale_of(tl.load(settings + TEMPERATURE))
    seed = tl.load(seeds + slot)

    edited = logits, counts, barred, edited_cells, settings, edits, vocab
    chunk = tl.arange(0, WIDEST)
    maximum = tl.load(maxima + chunk, mask=chunk < chunks, other=float("-inf"))
    best = tl.max(maximum, axis=0)
    # Not if all logits are minus infinity, or one is infinity or no number.
    is_valid = (best > float("-inf")) & (best < float("inf"))
    weight = tl.zeros([WIDEST], tl.float32)
    if filters:
        weight = tl.load(weights + chunk, mask=chunk < chunks, other=0.0)
        weight *= tl.exp2((maximum - best) * scale)
        is_valid = is_valid & (tl.sum(weight, axis=0) < float("inf"))  # or no number
    if not is_valid:
        tl.store(tokens + at, tl.full([], INVALID, tl.int64))
        tl.store(last_tokens + slot, tl.full([], INVALID, tl.int64))
        return
    least = LOWEST
    if filters:
        opened = found, chunks, best, scale
        least, num_open = least_kept(edited, opened, chunk, maximum, weight, between, limits)
        best, best_cell = _best_kept_cell(edited, opened, num_open, least, seed, position)
    else:
        cell = tl.load(found + chunk, mask=chunk < chunks, other=HIGHEST)
        best_cell = tl.min(tl.where(maximum == best, cell, HIGHEST), axis=0)

    col = best_cell * CELL + tl.arange(0, CELL)
    x = tl.reshape(_edited_logits(edited, best_cell + tl.zeros([1], tl.int32)), (CELL,))
    scores = tl.where(_key(x) >= least, x, float("-inf")) * scale
    token = best_entry(scores, col, col < vocab, greedy, seed, position)
    if (edits & PENALTIES) != 0:
        tl.store(counts + token, tl.maximum(tl.load(counts + token), 1) + 1)
        tl.store(edited_cells + best_cell, tl.full([], 1, tl.int1))
    tl.store(tokens + at, token.to(tl.int64))
    tl.store(last_tokens + slot, token.to(tl.int64))


@triton.jit(do_not_specialize=["most"])
def _logprobs_kernel(
    logits,
    step_at,
    slots,
    limits,
    maxima,
    weights,
    found,
    tokens,
    records,
    most,
    row_stride,
    vocab,
    chunks,
    WIDEST: tl.constexpr,
):
    """A row's sampled token and its likeliest ones, one after the other."""
    row = tl.program_id(0)
    step_row = tl.load(step_at + row)
    count = tl.load(limits + tl.load(slots + step_row) * COLUMNS + NUM_LOGPROBS)
    token = tl.load(tokens + step_row)
    if (count < 0) | (token == INVALID):
        return
    logits += row.to(tl.int64) * row_stride
    records += row * (1 + most) * 2
    found += row * chunks
    chunk = tl.arange(0, WIDEST)
    at = row * chunks + chunk
    maximum = tl.load(maxima + at, mask=chunk < chunks, other=float("-inf"))
    weight = tl.load(weights + at, mask=chunk < chunks, other=0.0)
    peak = tl.max(maximum, axis=0)
    total = tl.sum(weight * tl.exp2((maximum - peak) * LOG2_E), axis=0)
    norm = peak + tl.log2(total) * LN_2
    _store_record(records, token.to(tl.int32), logits, norm)

    count = tl.minimum(count, vocab)
    least = LOWEST
    if (count > 0) & (count <= chunks):
        least = _kth_key(_key(maximum), count)
    num_open = _list_chunks(found, chunk, maximum, least, chunks)
    before = HIGHEST_PAIR
    for i in range(1, count + 1):
        before = _next_pair(logits, vocab, found, num_open, chunks, before)
        col = (before & HIGHEST).to(tl.int32) ^ HIGHEST
        _store_record(records + 2 * i, col, logits, norm)


@triton.jit
def _store_record(record, token, logits, norm):
    value = tl.load(logits + token).to(tl.float32) - norm
    tl.store(record, token)
    tl.store(record + 1, value.to(tl.int32, bitcast=True))


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
def _edited_logits(edited, cell):
    """What is sampled from in cells [N], before temperature: logits [N, CELL] with penalties, and
    minus infinity where a token is barred.

    `edited` is (a row's logits, its slot's counts, barred, cells and settings, edits, V). A count
    is 0 for a token that the sequence does not hold, else 1 more than what the output has of it.
    """
    logits, counts, barred, edited_cells, settings, edits, vocab = edited
    col = _columns(cell)
    x = _logits(logits, col, vocab)
    if edits != 0:
        # Few cells hold anything: what they hold is not read for the others.
        is_edited = tl.load(edited_cells + cell, mask=cell * CELL < vocab, other=0) != 0
        inside = is_edited[:, None] & (col < vocab)
        if (edits & PENALTIES) != 0:
            repetition = tl.load(settings + REPETITION)
            count = tl.load(counts + col, mask=inside, other=0)
            repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where(count > 0, repeated, x)
            x -= tl.load(settings + FREQUENCY) * tl.maximum(count - 1, 0).to(tl.float32)
            x -= tl.where(count > 1, tl.load(settings + PRESENCE), 0.0)
        if (edits & BARS) != 0:
            is_barred = tl.load(barred + col, mask=inside, other=0) != 0
            # A sum keeps what is no number, and makes it of infinity.
            x = tl.where(is_barred, x + float("-inf"), x)
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
def least_kept(edited, opened, chunk, maximum, weight, between, limits):
    """The least key that the filters keep, and how many chunks hold such keys: those are listed.

    `opened` is (where to list chunks, C, the greatest logit, the scale of the temperature).
    `maximum` and `weight` [C and more] are of `chunk`; weights are relative to the greatest logit's
    of all. `between` is room for tokens.
    """
    found, chunks, peak, scale = opened
    settings, vocab = edited[4], edited[6]
    k, p, margin = tl.load(limits + TOP_K), tl.load(settings + TOP_P), tl.load(settings + MARGIN)
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
            # A part of what is left, with all tokens that are as likely as the k-th.
            _, total, _, _ = _split(edited, opened, num_open, least)
        is_found = False
        if bounds_only_top_p & (num_open > MANY_CHUNKS):
            open_weight = tl.sum(tl.where(_key(maximum) >= least, weight, 0.0), axis=0)
            dropped = open_weight - p * total
            low, high = _bounds_by_sample(edited, opened, num_open, dropped)
            least, is_found = _search_between(
                edited, opened, num_open, between, least, low, high, p * total
            )
        if not is_found:
            least = _search(edited, opened, num_open, least, p * total, True)
        num_open = _list_chunks(found, chunk, maximum, least, chunks)
    return least, num_open


@triton.jit
def _bounds_by_sample(edited, opened, num_open, dropped):
    """Two keys: tokens in listed chunks below the first weigh less than `dropped`, and those below
    the second more, unless the sample is a very odd one.
    """
    found, chunks, peak, scale = opened
    cells = num_open * CHUNK_CELLS
    at = tl.arange(0, SAMPLE_CELLS) * cells // SAMPLE_CELLS
    cell = tl.load(found + at // CHUNK_CELLS) * CHUNK_CELLS + at % CHUNK_CELLS
    x = _edited_logits(edited, cell)
    # Each stands for as many.
    share = cells / SAMPLE_CELLS
    weight = tl.exp2((x - peak) * scale) * share
    low_begin, low_end = peak - 64.0 / scale, peak
    high_begin, high_end = low_begin, peak
    for _ in range(ROUNDS):
        low, high = (low_begin + low_end) * 0.5, (high_begin + high_end) * 0.5
        below_low = tl.sum(tl.where(x < low, weight, 0.0))
        below_high = tl.sum(tl.where(x < high, weight, 0.0))
        # Six standard deviations: a sum of weights that are at most that of the bound itself.
        low_error = 6 * tl.sqrt(below_low * share * tl.exp2((low - peak) * scale))
        high_error = 6 * tl.sqrt(below_high * share * tl.exp2((high - peak) * scale))
        is_low = below_low + low_error <= dropped
        low_begin = tl.where(is_low, low, low_begin)
        low_end = tl.where(is_low, low_end, low)
        is_high = below_high - high_error >= dropped
        high_begin = tl.where(is_high, high_begin, high)
        high_end = tl.where(is_high, high, high_end)
    return _key(low_begin), _key(high_end)


@triton.jit
def _search_between(edited, opened, num_open, between, least, low, high, target):
    """As _search, if the key is at least `low`, below `high`, and one of not too many: else
    `least`. Then whether it is.
    """
    found, chunks, peak, scale = opened
    weight = tl.zeros([TILE_CELLS, CELL], tl.float32)
    count = 0
    tl.debug_barrier()  # what was between for another row is read
    for begin in range(0, num_open, TILE_CHUNKS):
        x = _edited_logits(edited, _listed_cells(found, begin, num_open, chunks))
        key = _key(x)
        weight += tl.where(key >= high, tl.exp2((x - peak) * scale), 0.0)
        inside = (key >= low) & (key < high)
        ones = inside.to(tl.int32)
        in_cell = tl.sum(ones, axis=1)
        at = count + (tl.cumsum(in_cell, axis=0) - in_cell)[:, None] + tl.cumsum(ones, axis=1) - 1
        tl.store(between + at, x, mask=inside & (at < MOST_BETWEEN))
        count += tl.sum(in_cell, axis=0)
    tl.debug_barrier()  # all threads have stored
    above = tl.sum(weight)
    at = tl.arange(0, MOST_BETWEEN)
    x = tl.load(between + at, mask=at < count, other=float("-inf"))
    key, weights = _key(x), tl.exp2((x - peak) * scale)
    is_found = (above < target) & (above + tl.sum(weights, axis=0) >= target)
    is_found = is_found & (count <= MOST_BETWEEN)
    if is_found:
        least = tl.min(tl.where(at < count, key, HIGHEST), axis=0)
        end = tl.max(key, axis=0)
        while least < end:
            middle = _middle(least, end)
            is_above = key >= middle
            if above + tl.sum(tl.where(is_above, weights, 0.0), axis=0) < target:
                end = tl.max(tl.where(is_above, LOWEST, key), axis=0)
            else:
                least = tl.min(tl.where(is_above, key, HIGHEST), axis=0)
    return least, is_found


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
        x = _edited_logits(edited, _listed_cells(found, begin, num_open, chunks))
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
        x = _edited_logits(edited, cell)
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
        pair = (_key(_logits(logits, col, vocab)).to(tl.int64) << 32) | (col ^ HIGHEST)
        best = tl.maximum(best, tl.where((col < vocab) & (pair < before), pair, LOWEST_PAIR))
    return tl.max(best)
