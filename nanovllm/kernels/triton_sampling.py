"""Triton kernels that draw the next tokens in one pass over the logits.

Knows the arg max of logits / temperature + noise, by tiles of the vocabulary. What is computed, and the layout of the
noise over Philox's counters, is said by the twin in `reference`.
Shapes: B sequences, V vocabulary entries, S parts of the vocabulary, one program each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.reference import PHILOX_TILE

TILES_PER_PROGRAM = 4


def sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, vocab_start: int = 0
) -> tuple[Tensor, Tensor]:
    batch, vocab = logits.shape
    first_tile, last_tile = vocab_start // PHILOX_TILE, triton.cdiv(vocab_start + vocab, PHILOX_TILE)
    parts = triton.cdiv(last_tile - first_tile, TILES_PER_PROGRAM)
    part_values = torch.empty(batch, parts, dtype=torch.float32, device=logits.device)
    part_tokens = torch.empty(batch, parts, dtype=torch.int32, device=logits.device)
    values = torch.empty(batch, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch:
        _best_of_part_kernel[(batch, parts)](
            logits, temperatures, seeds, positions, part_values, part_tokens,
            logits.stride(0), vocab_start, vocab, first_tile, TILES_PER_PROGRAM, PHILOX_TILE // 4, num_warps=4,
        )  # fmt: skip
        _best_of_row_kernel[(batch,)](
            part_values, part_tokens, values, tokens, parts, triton.next_power_of_2(parts), num_warps=1
        )
    return tokens, values


@triton.jit
def _best_of_part_kernel(
    logits, temperatures, seeds, positions, part_values, part_tokens,
    row_stride, vocab_start, vocab, first_tile, TILES: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    logits += row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    greedy = temperature <= 0
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    # A lane sees its tokens in rising order, so keeping the first best keeps the lowest. NaN is never best.
    lane = tl.arange(0, QUARTER)
    best = tl.full([QUARTER], float("-inf"), tl.float32)
    token = tl.full([QUARTER], 0, tl.int32) + vocab_start
    for tile in range(first_tile + part * TILES, first_tile + (part + 1) * TILES):
        at = tile * (4 * QUARTER) + lane
        if greedy:
            for i in tl.static_range(4):
                scores = _load_scores(logits, at + i * QUARTER - vocab_start, vocab, inverse)
                token = tl.where(scores > best, at + i * QUARTER, token)
                best = tl.maximum(best, scores)
        else:
            position = tl.load(positions + row).to(tl.uint32)
            words = tl.philox(tl.load(seeds + row), (tile * QUARTER + lane).to(tl.uint32), position, 0, 0)
            for i in tl.static_range(4):
                scores = _load_scores(logits, at + i * QUARTER - vocab_start, vocab, inverse)
                uniform = ((words[i] >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
                scores -= tl.log(-tl.log(uniform))
                token = tl.where(scores > best, at + i * QUARTER, token)
                best = tl.maximum(best, scores)
    value = tl.max(best, axis=0)
    part += row * tl.num_programs(1)
    tl.store(part_values + part, value)
    tl.store(part_tokens + part, tl.min(tl.where(best == value, token, 0x7FFFFFFF), axis=0))


@triton.jit
def _load_scores(logits, col, vocab, inverse):
    inside = (col >= 0) & (col < vocab)
    return tl.load(logits + col, mask=inside, other=float("-inf")).to(tl.float32) * inverse


@triton.jit
def _best_of_row_kernel(part_values, part_tokens, values, tokens, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    value = tl.load(part_values + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(part_tokens + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    best = tl.max(value, axis=0)
    tl.store(values + row, best)
    tl.store(tokens + row, tl.min(tl.where(value == best, token, 0x7FFFFFFF), axis=0).to(tl.int64))
