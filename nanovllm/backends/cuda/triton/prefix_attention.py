"""Attention of decoding sequences to a prefix that they share: cascade attention (Ye et al. 2024).

The kernel writes partial results. The kernel of decode_attention.py attends to the tokens after the
prefix, and merges both.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.attention_tiles import EMPTY, attend, split_span
from nanovllm.backends.cuda.triton.dispatch import cdiv, is_hopper, num_processors


def cut_prefix(q: Tensor, groups: int, is_fp8: bool) -> tuple[int, int, int, int]:
    """Choose the rows of a tile of queries, a KV head's tiles, a tile's programs, and their warps.

    The numbers take few different values, because Triton compiles a kernel for each.
    """
    rows = q.shape[0] * q.shape[1] // groups
    block_m, warps = (64, 4) if rows <= 64 else (128, 8)
    if not is_hopper(q.device) or is_fp8 and q.shape[2] > 128:
        block_m, warps = 64, 8  # larger tiles, and heads of 256 with fewer warps, would spill
    tiles = cdiv(rows, block_m)
    programs = max(1, min(16, 2 * num_processors(q.device) // (tiles * groups)))
    return block_m, tiles, 1 << programs.bit_length() - 1, warps


@triton.jit(do_not_specialize=["batch", "first_part"])
def prefix_kernel(
    q,
    k_cache,
    v_cache,
    scales,
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
    HOW: tl.constexpr,
):
    """Attend with a tile of queries to one split of the prefix that all sequences share.

    A tile holds the queries of BLOCK_M / GROUP sequences, for which the prefix is read once. Its
    blocks are the first of every block table, so the first sequence's table serves.
    """
    tile, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    prefix = tl.load(shared)
    span = split_span(prefix, tl.num_programs(1), BLOCK_N)
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
        total, peak, acc = attend(
            query,
            k_cache,
            v_cache,
            scales,
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
            HOW,
            False,
        )
        tl.store(parts + part[:, None] * D + dim[None, :], acc / total[:, None], mask=inside)
        tl.store(part_lse + part, peak + tl.log2(total), mask=seq < batch)
    else:
        tl.store(part_lse + part, EMPTY, mask=seq < batch)
