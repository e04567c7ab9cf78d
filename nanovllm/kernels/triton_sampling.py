"""Triton kernels that draw the next tokens in one pass over the logits.

Knows how to find the arg max of logits / temperature + noise with little arithmetic. What is computed, and the layout of
the noise over Philox's counters, is said by the twin in `reference`.
Shapes: B sequences, V vocabulary entries, S parts of the vocabulary, one program each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import overlap, wait_for_inputs
from nanovllm.kernels.reference import PHILOX_TILE

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, vocab_start: int = 0
) -> tuple[Tensor, Tensor]:
    batch, vocab = logits.shape
    first_tile, last_tile = vocab_start // PHILOX_TILE, triton.cdiv(vocab_start + vocab, PHILOX_TILE)
    tiles, warps = (4, 2) if batch > 16 else (1, 4)  # a few rows fill the device with short programs only
    parts = triton.cdiv(last_tile - first_tile, tiles)
    part_values = torch.empty(batch, parts, dtype=torch.float32, device=logits.device)
    part_tokens = torch.empty(batch, parts, dtype=torch.int32, device=logits.device)
    values = torch.empty(batch, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch:
        _best_of_part_kernel[(batch, parts)](
            logits, temperatures, seeds, positions, part_values, part_tokens, logits.stride(0), vocab_start, vocab,
            first_tile, tiles, PHILOX_TILE // 4, num_warps=warps, **overlap(logits),
        )  # fmt: skip
        _best_of_row_kernel[(batch,)](
            part_values, part_tokens, values, tokens, parts, triton.next_power_of_2(parts),
            num_warps=1, **overlap(logits),
        )  # fmt: skip
    return tokens, values


@triton.jit
def _best_of_part_kernel(
    logits, temperatures, seeds, positions, part_values, part_tokens, row_stride, vocab_start, vocab, first_tile,
    TILES: tl.constexpr, QUARTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * row_stride
    temperature, seed = tl.load(temperatures + row), tl.load(seeds + row)
    position = tl.load(positions + row).to(tl.uint32)
    greedy = temperature <= 0
    scale = tl.where(greedy, 1.0, LOG2_E / tl.where(greedy, 1.0, temperature))
    # A lane meets its tokens in rising order, so keeping the first best keeps the lowest. NaN is never best.
    lane = tl.arange(0, QUARTER)
    best = tl.full([QUARTER], float("-inf"), tl.float32)
    best_col = tl.zeros([QUARTER], tl.int32)
    for tile in range(first_tile + part * TILES, first_tile + (part + 1) * TILES):
        col = tile * (4 * QUARTER) - vocab_start + lane
        scores = _load_scores(logits, col, vocab, scale, QUARTER)
        if greedy:
            for i in tl.static_range(4):
                best_col = tl.where(scores[i] > best, col + i * QUARTER, best_col)
                best = tl.maximum(best, scores[i])
        else:
            # With noise g = -log(E), E = -log(uniform), the largest score + g is where E / exp(score) is smallest: among
            # a lane's four, that race costs an exponential each and one logarithm for the winner.
            words = tl.philox(seed, (tile * QUARTER + lane).to(tl.uint32), position, 0, 0)
            peak = tl.maximum(tl.maximum(scores[0], scores[1]), tl.maximum(scores[2], scores[3]))
            peak = tl.maximum(peak, -1e30)  # four entries outside the vocabulary are -inf, and -inf + inf no number
            shortest = tl.full([QUARTER], float("inf"), tl.float32)
            winner = tl.zeros([QUARTER], tl.int32)
            for i in tl.static_range(4):
                uniform = ((words[i] >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
                time = -tl.log(uniform) * tl.exp2(peak - scores[i])
                winner = tl.where(time < shortest, i, winner)
                shortest = tl.minimum(shortest, time)
            score = peak - tl.log2(shortest)
            best_col = tl.where(score > best, col + winner * QUARTER, best_col)
            best = tl.maximum(best, score)
    value = tl.max(best, axis=0)
    token = tl.min(tl.where(best == value, best_col, 0x7FFFFFFF), axis=0) + vocab_start
    at = row * tl.num_programs(1) + part
    tl.store(part_values + at, tl.where(greedy, value, value * LN_2))
    tl.store(part_tokens + at, token)


@triton.jit
def _load_scores(logits, col, vocab, scale, QUARTER: tl.constexpr):
    """Scaled logits of the four entries of each lane: the four words of its counter are their noise."""
    s0 = tl.load(logits + col, mask=(col >= 0) & (col < vocab), other=float("-inf"))
    col += QUARTER
    s1 = tl.load(logits + col, mask=(col >= 0) & (col < vocab), other=float("-inf"))
    col += QUARTER
    s2 = tl.load(logits + col, mask=(col >= 0) & (col < vocab), other=float("-inf"))
    col += QUARTER
    s3 = tl.load(logits + col, mask=(col >= 0) & (col < vocab), other=float("-inf"))
    return s0.to(tl.float32) * scale, s1.to(tl.float32) * scale, s2.to(tl.float32) * scale, s3.to(tl.float32) * scale


@triton.jit
def _best_of_row_kernel(part_values, part_tokens, values, tokens, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    value = tl.load(part_values + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(part_tokens + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    best = tl.max(value, axis=0)
    tl.store(values + row, best)
    tl.store(tokens + row, tl.min(tl.where(value == best, token, 0x7FFFFFFF), axis=0).to(tl.int64))
