"""Triton kernels that sample the next tokens in one pass over the logits.

The twin of `sample` is the function of that name in layers/sampler.py. The first kernel finds the
best cell of each part of the vocabulary. The second finds the best cell of all, and the best entry
in it. Scores are in units of log2, because the device computes powers of 2. A row whose temperature
is below 0 is skipped: any token will do for it, and it gets token 0.

Shapes: B sequences, V vocabulary entries, S parts of the vocabulary, one program each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import cdiv, next_power_of_2, overlap, wait_for_inputs
from nanovllm.layers.sampler import CELL
from nanovllm.sampling_params import INVALID_TOKEN

INVALID = tl.constexpr(INVALID_TOKEN)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def sample(
    logits: Tensor,
    *,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    vocab_start: int = 0,
    slots: Tensor | None = None,
    last_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row; see layers/sampler.py.

    Args:
        logits: [B, V].
        temperatures, seeds: [B], float32 and int64, or the columns of all slots. No running kernel
            may write to them, nor to positions and slots.
        positions: [B].
        slots: [B] int64, the rows' places in the columns of slots; None: there are no slots.
        last_tokens: the column of all slots that the tokens are also written to.
    Returns:
        tokens [B] int64 and their values [B] float32.
    """
    batch, vocab = logits.shape
    first_cell, last_cell = vocab_start // CELL, cdiv(vocab_start + vocab, CELL)
    # A few rows fill the device only if programs are short, so that there are many.
    cells, tiles, warps = (128, 4, 4) if batch > 16 else (64, 1, 4)
    parts = cdiv(last_cell - first_cell, cells * tiles)
    part_values = torch.empty(batch, parts, dtype=torch.float32, device=logits.device)
    part_cells = torch.empty(batch, parts, dtype=torch.int32, device=logits.device)
    values = torch.empty(batch, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch:
        _best_cell_of_part_kernel[(batch, parts)](
            logits,
            temperatures,
            seeds,
            positions,
            slots,
            part_values,
            part_cells,
            logits.stride(0),
            vocab_start,
            vocab,
            first_cell,
            tiles,
            cells,
            CELL,
            num_warps=warps,
            **overlap(logits),
        )
        _best_of_row_kernel[(batch,)](
            logits,
            temperatures,
            seeds,
            positions,
            slots,
            part_values,
            part_cells,
            values,
            tokens,
            last_tokens,
            logits.stride(0),
            vocab_start,
            vocab,
            parts,
            next_power_of_2(parts),
            CELL,
            num_warps=1,
            **overlap(logits),
        )
    return tokens, values


@triton.jit
def _best_cell_of_part_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    slots,
    part_values,
    part_cells,
    row_stride,
    vocab_start,
    vocab,
    first_cell,
    TILES: tl.constexpr,
    CELLS: tl.constexpr,
    CELL: tl.constexpr,
    PDL: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    slot = row if slots is None else tl.load(slots + row)
    temperature, seed = tl.load(temperatures + slot), tl.load(seeds + slot)
    position = tl.load(positions + row)
    wait_for_inputs(PDL)
    if temperature < 0:
        return
    logits += row.to(tl.int64) * row_stride
    greedy, scale = scale_of(temperature)
    # A lane meets its cells in rising order. It keeps the first of equally good cells, which is the
    # lowest.
    best = tl.full([CELLS], float("-inf"), tl.float32)
    best_cell = tl.full([CELLS], 0x7FFFFFFF, tl.int32)
    for tile in range(TILES):
        cell = first_cell + (part * TILES + tile) * CELLS + tl.arange(0, CELLS)
        col = cell[:, None] * CELL - vocab_start + tl.arange(0, CELL)[None, :]
        scores = (
            tl.load(logits + col, mask=(col >= 0) & (col < vocab), other=float("-inf")).to(
                tl.float32
            )
            * scale
        )
        first = tl.maximum(cell * CELL, vocab_start)
        score = cell_values(scores, first, greedy, seed, position)
        best_cell = tl.where(score > best, cell, best_cell)
        best = tl.maximum(best, score)
    value = tl.max(best, axis=0)
    at = row * tl.num_programs(1) + part
    tl.store(part_values + at, value)
    tl.store(part_cells + at, tl.min(tl.where(best == value, best_cell, 0x7FFFFFFF), axis=0))


@triton.jit
def _best_of_row_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    slots,
    part_values,
    part_cells,
    values,
    tokens,
    last_tokens,
    row_stride,
    vocab_start,
    vocab,
    parts,
    BLOCK: tl.constexpr,
    CELL: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    slot = row if slots is None else tl.load(slots + row)
    temperature, seed = tl.load(temperatures + slot), tl.load(seeds + slot)
    position = tl.load(positions + row)
    wait_for_inputs(PDL)
    if temperature < 0:
        tl.store(values + row, 0.0)
        tl.store(tokens + row, tl.zeros([], tl.int64))
        return
    greedy, scale = scale_of(temperature)
    part = tl.arange(0, BLOCK)
    value = tl.load(part_values + row * parts + part, mask=part < parts, other=float("-inf"))
    cell = tl.load(part_cells + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    best = tl.max(value, axis=0)
    cell = tl.min(tl.where(value == best, cell, 0x7FFFFFFF), axis=0)
    # An infinite value wins. A row that has one, or whose values are all -inf, has no valid token.
    is_valid = (best > float("-inf")) & (best < float("inf"))
    cell = tl.where(is_valid, cell, vocab_start // CELL)
    col = cell * CELL - vocab_start + tl.arange(0, CELL)
    inside = (col >= 0) & (col < vocab)
    score = (
        tl.load(logits + row.to(tl.int64) * row_stride + col, mask=inside, other=float("-inf")).to(
            tl.float32
        )
        * scale
    )
    token = best_entry(score, col + vocab_start, inside, greedy, seed, position)
    token = tl.where(is_valid, token, INVALID)
    tl.store(values + row, tl.where(greedy, best, best * LN_2))
    tl.store(tokens + row, token.to(tl.int64))
    if last_tokens is not None:
        tl.store(last_tokens + slot, token.to(tl.int64))


@triton.jit
def scale_of(temperature):
    """Return whether a row is greedy, and the factor that turns its logits into scores.

    Scores are logits if the row is greedy, else logits / temperature in units of log2.
    """
    greedy = temperature <= 0
    return greedy, tl.where(greedy, 1.0, LOG2_E / tl.where(greedy, 1.0, temperature))


@triton.jit
def cell_values(scores, first, greedy, seed, position):
    """Compute the values by which cells are compared: scores [C, CELL] -> [C].

    The cell with the greatest value is sampled. A value is the cell's log-sum-exp plus noise, or
    its best score if greedy. `first` [C] is each cell's first vocabulary entry on this rank, whose
    noise the cell takes. The value is infinity if a score of the cell is NaN or infinity.
    """
    value = tl.max(scores, axis=1)
    if greedy:
        total = tl.sum(scores, axis=1)
        # The total is NaN if a score is NaN, or if there are infinities of both signs.
        value = tl.where(total == total, value, float("inf"))
    else:
        # The scores of a cell outside of the vocabulary are all -inf, and -inf - -inf is NaN.
        peak = tl.maximum(value, -1e30)
        weight = tl.sum(tl.exp2(scores - peak[:, None]), axis=1)
        value = peak + tl.log2(weight / exponential(seed, first, position, 0))
        # The value is NaN if a score is NaN, or infinity, from which infinity was subtracted.
        value = tl.where(value == value, value, float("inf"))
    return value


@triton.jit
def best_entry(scores, token, inside, greedy, seed, position):
    """Sample one of a cell's tokens by their scores: scores [CELL], token [CELL] -> a token."""
    if not greedy:
        scores -= tl.log2(exponential(seed, token, position, 1))
    is_best = inside & (scores == tl.max(scores, axis=0))
    return tl.min(tl.where(is_best, token, 0x7FFFFFFF), axis=0)


@triton.jit
def exponential(seed, index, position, stream):
    """Make exponentially distributed noise. Its negative logarithm is Gumbel noise."""
    word, _, _, _ = tl.philox(seed, index.to(tl.uint32), position.to(tl.uint32), stream, 0)
    return -tl.log(((word >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23)))
