"""Triton kernels that sample rows with penalties or filters, and compute log-probabilities.

The kernels apply penalties, find the least logit that the filters keep, sample from the kept
tokens, and find the likeliest tokens. Their twin is features/sampling/resampler.py, which sorts the
vocabulary. Here nothing is sorted.

The first kernel reads the logits once. For each chunk of the vocabulary it writes the greatest
logit, and the chunk's weight: the sum of exp((logit - greatest) / temperature). The second kernel
has one program a row, which opens, that is, reads again, only chunks that can hold what it looks
for. For instance, none of the k likeliest tokens is below the k-th greatest of the chunks' maxima.
Among the open chunks' tokens it bisects over keys: the bits of logits, as integers that are ordered
as the floats are. The filters' result is one key, the least kept one. Tokens with this key or a
greater one are kept, so equal tokens are all kept or all dropped.

If top_p alone keeps much of the vocabulary, most chunks must be opened. Then a sample of their
cells yields two keys between which the least kept one almost surely is. One pass sums the weight of
the tokens above, and lists the tokens between. Only the listed tokens are bisected.

Sums run in an order that depends on the row alone, so the kept tokens are the same in any batch.

Shapes: R rows, among the B rows of a step; V vocabulary entries; S batch slots; C chunks. The
kernels skip those of the R rows that need no resampling.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import cdiv, is_hopper, launch, next_power_of_2
from nanovllm.backends.cuda.triton.sampler import (
    INVALID,
    LN_2,
    LOG2_E,
    best_entry,
    cell_values,
    scale_of,
)
from nanovllm.engine.batch_state import BatchState
from nanovllm.features.sampling.slot_params import SlotParams
from nanovllm.layers.sampler import CELL as CELL_

CAN_COMPILE = hasattr(tl, "tuple")  # since Triton 3.3
CELL = tl.constexpr(CELL_)
CHUNK_CELLS = tl.constexpr(8)
CHUNK = tl.constexpr(8 * CELL_)
# A tile, which a program holds in registers at a time.
TILE_CELLS = tl.constexpr(256)
TILE_CHUNKS = tl.constexpr(256 // 8)
# Columns of the table of the slots' parameters: see features/sampling/slot_params.py. Kernels call
# its `params` `settings`, because Triton's launcher uses the name `params` itself.
TEMPERATURE, TOP_P, MARGIN = (tl.constexpr(i) for i in range(3))
REPETITION, FREQUENCY, PRESENCE = (tl.constexpr(i) for i in range(3, 6))
TOP_K, LEAST_LENGTH, NUM_LOGPROBS = (tl.constexpr(i) for i in range(3))
COLUMNS = tl.constexpr(9)
# Flags of what is done to a row's logits: penalties are applied, barred tokens become -inf.
PENALTIES, BARS = tl.constexpr(1), tl.constexpr(2)
# Keys below and above those of all floats.
LOWEST, HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
LOWEST_PAIR, HIGHEST_PAIR = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
# Steps of the bisections that bound the least kept logit of top_p.
ROUNDS = tl.constexpr(16)
# If top_p alone leaves more than MANY_CHUNKS chunks open, SAMPLE_CELLS of their cells are sampled
# to bound the least kept key. At most MOST_BETWEEN tokens may be between the bounds.
MANY_CHUNKS = tl.constexpr(128)
SAMPLE_CELLS = tl.constexpr(512)
MOST_BETWEEN = tl.constexpr(8192)


class Workspace:
    """Buffers in which the kernels leave results for each other, for up to `rows` rows."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.chunks = cdiv(vocab, CHUNK.value)
        shape = rows, self.chunks
        with device:
            self.maxima = torch.empty(shape, dtype=torch.float32)  # each chunk's greatest logit
            self.weights = torch.empty(shape, dtype=torch.float32)  # relative to the maxima
            self.found = torch.empty(shape, dtype=torch.int32)  # open chunks, or best cells
            # Logits of tokens between two bounds.
            self.between = torch.empty(rows, MOST_BETWEEN.value, dtype=torch.float32)


def resample(
    logits: Tensor,
    at: Tensor,
    step: Any,
    *,
    state: BatchState,
    slot_params: SlotParams,
    counts: Tensor,
    barred: Tensor,
    cells: Tensor,
    workspace: Workspace,
) -> None:
    """Sample again for R rows of a step, and overwrite the tokens that the step sampled.

    Args:
        logits: [R, V].
        at: [R] int64, the rows' indices in the step.
        step: a StepOutput: tokens [B] int64, positions [B] int32 and slots [B] int64.
        state: its temperatures, seeds and last_tokens [S]. Rows whose temperature is not below 0
            are skipped.
        counts, barred, cells: those of TokenTables, [S, V], [S, V] and [S, V / CELL]. A table may
            have one element if no slot needs it.
    """
    rows, vocab, space = len(at), logits.shape[1], workspace
    row = logits, at, step.slots, state.temperatures, state.seeds, step.positions
    filters = slot_params.params, slot_params.limits, counts, barred, cells
    sizes = logits.stride(0), vocab, space.chunks
    # Products and sums are rounded one by one, as PyTorch rounds them.
    options: Any = dict(enable_fp_fusion=False)
    grid = rows, cdiv(space.chunks, TILE_CHUNKS.value)
    chunks = space.maxima, space.weights, space.found
    launch(_chunks_kernel, grid, *row, *filters, *chunks, *sizes, num_warps=4, **options)
    widest = next_power_of_2(space.chunks)
    left = *chunks, space.between, step.tokens, state.last_tokens
    if is_hopper(logits.device):
        # With more registers a program, a multiprocessor would run only one program at a time. A
        # thread spills 44 bytes for that.
        options |= dict(num_warps=8, maxnreg=128)
    else:
        options |= dict(num_warps=16)
    launch(_resample_kernel, (rows,), *row, *filters, *left, *sizes, widest, **options)


def logprobs(
    logits: Tensor,
    at: Tensor,
    step: Any,
    *,
    slot_params: SlotParams,
    most: int,
    workspace: Workspace,
) -> Tensor:
    """Compute log-probabilities of the sampled and the likeliest tokens for R rows of a step.

    Args:
        logits, at, step: as for `resample`.
        slot_params: their limits say how many likeliest tokens a slot wants; -1: it wants no
            log-probabilities.
        most: the greatest number of likeliest tokens that a slot wants.
    Returns:
        [R, 1 + most, 2] int32: a token id, and its log-probability as the bits of a float32. The
        sampled token comes first, then the likeliest in order; of equally likely ones, the lower id
        comes first. Elements that a slot does not want are not written.
    """
    rows, vocab, space = len(at), logits.shape[1], workspace
    records = torch.empty(rows, 1 + most, 2, dtype=torch.int32, device=logits.device)
    row = logits, at, step.slots, slot_params.limits
    chunks = space.maxima, space.weights
    sizes = logits.stride(0), vocab, space.chunks
    grid = rows, cdiv(space.chunks, TILE_CHUNKS.value)
    launch(_raw_chunks_kernel, grid, *row, *chunks, *sizes, num_warps=4)
    widest = next_power_of_2(space.chunks)
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
    """Summarise the chunks of a row.

    If the row has filters, write each chunk's greatest logit and its weight. If it only has
    penalties or barred tokens, write each chunk's best cell and its value, noise included.
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
    """Write the greatest logit and the weight of each chunk of a row with log-probabilities."""
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
    """Sample a row's token, and count it for the penalties."""
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
    # The row is invalid if all logits are -inf, or one is infinity or NaN.
    is_valid = (best > float("-inf")) & (best < float("inf"))
    weight = tl.zeros([WIDEST], tl.float32)
    if filters:
        weight = tl.load(weights + chunk, mask=chunk < chunks, other=0.0)
        weight *= tl.exp2((maximum - best) * scale)
        # The sum is NaN if a logit is NaN.
        is_valid = is_valid & (tl.sum(weight, axis=0) < float("inf"))
    if not is_valid:
        _store_token(tl.full([], INVALID, tl.int64), tokens + at, last_tokens + slot)
        return
    least = LOWEST
    if filters:
        opened = found, chunks, best, scale
        least, num_open = least_kept(edited, opened, chunk, maximum, weight, between, limits)
        best, best_cell = _best_kept_cell(edited, opened, num_open, least, seed, position)
    else:
        cell = tl.load(found + chunk, mask=chunk < chunks, other=HIGHEST)
        best_cell = tl.min(tl.where(maximum == best, cell, HIGHEST), axis=0)
    # Finite logits far below 0, divided by the temperature, may all become -inf. Then no cell is
    # the best, and `best_cell` lies outside of the vocabulary.
    if best == float("-inf"):
        _store_token(tl.full([], INVALID, tl.int64), tokens + at, last_tokens + slot)
        return

    col = best_cell * CELL + tl.arange(0, CELL)
    x = tl.reshape(_edited_logits(edited, best_cell + tl.zeros([1], tl.int32)), (CELL,))
    scores = tl.where(_key(x) >= least, x, float("-inf")) * scale
    token = best_entry(scores, col, col < vocab, greedy, seed, position)
    if (edits & PENALTIES) != 0:
        tl.store(counts + token, tl.maximum(tl.load(counts + token), 1) + 1)
        tl.store(edited_cells + best_cell, tl.full([], 1, tl.int1))
    _store_token(token.to(tl.int64), tokens + at, last_tokens + slot)


@triton.jit
def _store_token(token, of_step, of_slot):
    """Store a token in the step's tokens, and as the last token of its batch slot."""
    tl.store(of_step, token)
    tl.store(of_slot, token)


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
    """Write the records of a row's sampled token, and of its likeliest tokens in order."""
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

    # A plain row's slot may still hold the count of an earlier sequence.
    count = tl.minimum(count, tl.minimum(most, vocab))
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
    """Write a token id and its log-probability, its logit - norm."""
    value = tl.load(logits + token).to(tl.float32) - norm
    tl.store(record, token)
    tl.store(record + 1, value.to(tl.int32, bitcast=True))


@triton.jit
def _edits(settings, limits, position):
    """Return the flags of what is done to a slot's logits for the token at `position`."""
    additive = (tl.load(settings + FREQUENCY) != 0) | (tl.load(settings + PRESENCE) != 0)
    penalizes = additive | (tl.load(settings + REPETITION) != 1)
    bars = position < tl.load(limits + LEAST_LENGTH)
    return tl.where(penalizes, PENALTIES, 0) | tl.where(bars, BARS, 0)


@triton.jit
def _filters(settings, limits, vocab):
    """Tell whether a slot's filters may drop a token."""
    some = (tl.load(settings + TOP_P) < 1) | (tl.load(settings + MARGIN) > float("-inf"))
    return some | (tl.load(limits + TOP_K) < vocab)


@triton.jit
def _logits(logits, col, vocab):
    """Load logits as float32; columns outside of the vocabulary are -inf."""
    return tl.load(logits + col, mask=col < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _edited_logits(edited, cell):
    """Load the logits of cells [N], with penalties, and -inf for barred tokens: -> [N, CELL].

    `edited` is a tuple: a row's logits; its slot's counts, barred, cells and settings; edits; V. A
    count is 0 for a token that the sequence does not hold, else 1 more than the number of times
    that the output holds it.
    """
    logits, counts, barred, edited_cells, settings, edits, vocab = edited
    col = _columns(cell)
    x = _logits(logits, col, vocab)
    if edits != 0:
        # Few cells have counts or barred tokens: nothing is read for the others.
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
            # The sum is NaN for a logit that is NaN or infinity, so that the row stays invalid.
            x = tl.where(is_barred, x + float("-inf"), x)
    return x


@triton.jit
def _columns(cell):
    """Return the columns of cells: [N] -> [N, CELL]."""
    return cell[:, None] * CELL + tl.arange(0, CELL)[None, :]


@triton.jit
def _chunk_peaks_and_weights(x, scale):
    """Compute each chunk's maximum and weight: x [TILE_CELLS, CELL] -> two of [TILE_CHUNKS].

    A weight is the sum of exp2((x - maximum) * scale).
    """
    peak = tl.max(x, axis=1)
    finite = tl.maximum(peak, -1e30)  # -inf - -inf is NaN
    weight = tl.sum(tl.exp2((x - finite[:, None]) * scale), axis=1)
    peaks = tl.reshape(peak, (TILE_CHUNKS, CHUNK_CELLS))
    weights = tl.reshape(weight, (TILE_CHUNKS, CHUNK_CELLS))
    chunk_peak = tl.max(peaks, axis=1)
    finite = tl.maximum(chunk_peak, -1e30)
    parts = weights * tl.exp2((peaks - finite[:, None]) * scale)
    return chunk_peak, tl.sum(parts, axis=1)


@triton.jit
def _key(x):
    """Turn floats into integers of the same order. 0.0 and -0.0 become the same integer."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & HIGHEST)


@triton.jit
def _middle(low, high):
    """Return the middle of two integers, rounded up: above `low` if low < high."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _kth_key(keys, k):
    """Find the k-th greatest of keys [N] by bisection. Each step leaves fewer of them."""
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
    """Find the least key that the filters keep, and list the chunks that hold kept keys.

    Args:
        edited: see `_edited_logits`.
        opened: a tuple: the list of chunks, C, the row's greatest logit, the temperature's scale.
        chunk, maximum, weight: [C or more], the chunks' numbers, maxima and weights. Weights are
            relative to the row's greatest logit.
        between: a buffer for logits.
    Returns:
        the key, and the number of listed chunks.
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
            # top_p takes its part of the tokens that the other filters keep, with all tokens that
            # are as likely as the k-th.
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
    """Bound the least kept key by a sample of cells. Returns (low, high).

    Of the listed chunks, tokens below `low` weigh less than `dropped`, and tokens below `high`
    weigh more, unless the sample is a very unlikely one.
    """
    found, chunks, peak, scale = opened
    cells = num_open * CHUNK_CELLS
    at = tl.arange(0, SAMPLE_CELLS) * cells // SAMPLE_CELLS
    cell = tl.load(found + at // CHUNK_CELLS) * CHUNK_CELLS + at % CHUNK_CELLS
    x = _edited_logits(edited, cell)
    # Each sampled cell stands for `share` cells.
    share = cells / SAMPLE_CELLS
    weight = tl.exp2((x - peak) * scale) * share
    low_begin, low_end = peak - 64.0 / scale, peak
    high_begin, high_end = low_begin, peak
    for _ in range(ROUNDS):
        low, high = (low_begin + low_end) * 0.5, (high_begin + high_end) * 0.5
        below_low = tl.sum(tl.where(x < low, weight, 0.0))
        below_high = tl.sum(tl.where(x < high, weight, 0.0))
        # Six standard deviations of a sum whose weights are at most the weight at the bound.
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
    """Search as `_search` does by weight, among keys of at least `low` and below `high`.

    Returns (key, whether it was found). It is not found if it is not among these keys, or if there
    are more than MOST_BETWEEN of them; then the key is `least`.
    """
    found, chunks, peak, scale = opened
    weight = tl.zeros([TILE_CELLS, CELL], tl.float32)
    count = 0
    tl.debug_barrier()  # all threads have read what `between` held before
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
    """Find a logit such that the tokens at or above it weigh p * total or more.

    Only the chunks' maxima and weights are used, so the logit may be lower than necessary.
    """
    # All tokens below `low` together weigh less than what top_p drops.
    low = peak + tl.log2((1 - p) * total / vocab) / scale
    high = peak
    likeliest = tl.exp2((maximum - peak) * scale)
    for _ in range(ROUNDS):
        middle = (low + high) * 0.5
        # A chunk has at most CHUNK - 1 tokens below `middle`, which weigh less than as many tokens
        # at `middle`.
        rest = weight - (CHUNK - 1) * tl.exp2((middle - peak) * scale)
        above = tl.sum(tl.where(maximum >= middle, tl.maximum(likeliest, rest), 0.0), axis=0)
        reached = above > p * total * 1.0001  # a margin for the rounding of sums
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _list_chunks(found, chunk, maximum, least, chunks):
    """List the chunks that hold a key of at least `least`, in order. Returns their number."""
    is_open = (chunk < chunks) & (_key(maximum) >= least)
    ones = is_open.to(tl.int32)
    tl.debug_barrier()  # all threads have read the previous list
    tl.store(found + tl.cumsum(ones, axis=0) - ones, chunk, mask=is_open)
    tl.debug_barrier()  # all threads have stored
    return tl.sum(ones, axis=0)


@triton.jit
def _listed_cells(found, begin, num_open, chunks):
    """Return the cells of a tile of listed chunks: [TILE_CELLS].

    Beyond the list's end, cells lie outside of the vocabulary.
    """
    at = begin * CHUNK_CELLS + tl.arange(0, TILE_CELLS)
    chunk = tl.load(found + at // CHUNK_CELLS, mask=at < num_open * CHUNK_CELLS, other=chunks)
    return chunk * CHUNK_CELLS + at % CHUNK_CELLS


@triton.jit
def _split(edited, opened, num_open, middle):
    """Split the logits of listed chunks at a key.

    Returns the number, the weight and the least key of those whose key is at least `middle`, and
    the greatest key below `middle`.
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
    """Find the greatest key such that logits at or above it reach `target` in number or weight.

    Returns `low` if no greater key reaches it.
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
    """Find the best cell of kept tokens, with noise. Returns its value and its number."""
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
    """Find the greatest pair below `before`, where a pair is a logit's key and its column.

    Of two pairs with the same key, the one with the lower column is the greater.
    """
    best = tl.full([TILE_CELLS, CELL], LOWEST_PAIR, tl.int64)
    for begin in range(0, num_open, TILE_CHUNKS):
        col = _columns(_listed_cells(found, begin, num_open, chunks))
        pair = (_key(_logits(logits, col, vocab)).to(tl.int64) << 32) | (col ^ HIGHEST)
        best = tl.maximum(best, tl.where((col < vocab) & (pair < before), pair, LOWEST_PAIR))
    return tl.max(best)
