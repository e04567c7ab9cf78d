"""The gated products of a single token's experts in FP8, as fast as memory delivers their weights.

The products of one token take as long as the memory needs to deliver the weights of its experts, if
it is always busy. The kernel of moe_packed.py, made for tiles of many tokens, copies a few steps of
weights ahead. Here, as in fp8_gemv.py, a program asks for all of its weights at once, right after
it has read which expert the router picked. Products are added up in float32.

The kernel of moe_packed.py multiplies by `down`: one like this, which also added up the experts'
results and whose programs quantised its inputs, was slower on an H200. woven_token.py has kernels
of this kind for MXFP4.

Shapes: K experts of the token, E experts, N width of the token, F width of an expert, R results of
a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton import e4m3
from nanovllm.backends.cuda.triton.dispatch import cdiv, next_power_of_2, overlap, wait_for_inputs
from nanovllm.backends.cuda.triton.elementwise import gated
from nanovllm.backends.cuda.triton.moe_packed import PackedExperts, Rows
from nanovllm.layers.moe import ClampedSwiGLU

# Bytes of weights that a program loads, rows being rounded up to powers of 2: in Qwen3-30B-A3B, two
# results. Programs of four took as long on an H200.
PROGRAM_BYTES = 8192
MOST_BYTES = 16384  # a thread holds 128 of them in registers


def suits(x: Tensor, gate_up: PackedExperts) -> bool:
    """Tell whether the kernel takes weights of this kind and these sizes."""
    inputs, group, sharing = gate_up.shape[1], gate_up.group, gate_up.sharing or gate_up.group
    # A chunk of 16 columns lies in one group of columns.
    has_chunks = all(size % 16 == 0 or size == inputs for size in (group, sharing))
    is_known = gate_up.kind == "e4m3" and x.dtype != torch.float32 and inputs % 16 == 0
    return is_known and has_chunks and 2 * next_power_of_2(inputs) <= MOST_BYTES


def gated_products(
    x: Rows,
    gate_up: PackedExperts,
    bias: Tensor | None,
    runs: Tensor,
    hidden: Tensor,
    *,
    clamped: ClampedSwiGLU | None,
    follows: PackedExperts,
) -> None:
    """Compute the gated products of a token's experts, into `hidden` [K, F].

    x: what `rows_for` makes of the token.
    bias: [E, 2 F].
    runs: what sort_by_expert returns.
    follows: the weights of the second product.
    """
    outputs, inputs = gate_up.shape
    alpha, limit = (clamped.alpha, clamped.limit) if clamped else (None, None)
    block = next_power_of_2(inputs)
    rows = max(1, PROGRAM_BYTES // (2 * block))
    _token_gate_up_kernel[(len(hidden) * cdiv(outputs // 2, rows),)](
        *(x.numbers.view(torch.int32), x.scales),
        *(gate_up.codes.view(torch.int32), gate_up.scales, bias, runs, hidden, alpha, limit),
        *(outputs, inputs, gate_up.scales.shape[2], gate_up.group, gate_up.block_rows),
        *(gate_up.sharing or 0, gate_up.parts, 1 if follows.sharing else follows.parts),
        *(rows, block, e4m3.how_to_decode(hidden.device)),
        num_warps=4,
        **overlap(hidden),
    )


@triton.jit
def _fetch_scales(
    scales, rows, G: tl.constexpr, GROUP: tl.constexpr, UNIFORM: tl.constexpr, CHUNKS: tl.constexpr
):
    """Ask for the scales of the chunks of 16 columns of rows [2, R]: [2, R, CHUNKS].

    UNIFORM: the R rows have the same scales: [2, 1, CHUNKS].
    """
    group = tl.minimum(tl.arange(0, CHUNKS) * 16 // GROUP, G - 1)[None, None, :]
    if UNIFORM:
        rows = tl.min(rows, axis=1, keep_dims=True)
    return tl.load(scales + rows.to(tl.int64)[:, :, None] * G + group)


@triton.jit
def _load_fours(
    x,
    dtype: tl.constexpr,
    W: tl.constexpr,
    PARTS: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load inputs: those of the first of each four columns, of the second, ...

    They are codes, or numbers: first those of even columns, then those of odd ones.
    """
    at = tl.arange(0, BLOCK)
    if PARTS == 1:
        a, b, c, d = e4m3.from_words(tl.load(x + at, mask=at < W, other=0), HOW)
    else:
        even = tl.load(x + at, mask=at < W, other=0)
        odd = tl.load(x + W + at, mask=at < W, other=0)
        a = even.to(tl.int16).to(dtype, bitcast=True)
        b = odd.to(tl.int16).to(dtype, bitcast=True)
        c = (even >> 16).to(tl.int16).to(dtype, bitcast=True)
        d = (odd >> 16).to(tl.int16).to(dtype, bitcast=True)
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def _token_gate_up_kernel(
    x,
    x_scales,
    weight,
    w_scales,
    bias,
    runs,
    hidden,
    alpha,
    limit,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SHARING: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_OF_OUT: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    HOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute R results of an expert: their gates, their ups, and the gated product."""
    wait_for_inputs(PDL)
    F: tl.constexpr = OUT // 2
    PROGRAMS: tl.constexpr = tl.cdiv(F, R)  # of an expert
    pair, part = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS
    expert, count = tl.load(runs + 4 + 4 * pair), tl.load(runs)
    own = part * R + tl.arange(0, R)
    rows = expert * OUT + tl.minimum(own, F - 1)[None, :] + tl.arange(0, 2)[:, None] * F
    at = tl.arange(0, BLOCK // 4)[None, None, :]
    words_at = weight + rows.to(tl.int64)[:, :, None] * (IN // 4) + at
    words = tl.load(words_at, mask=at < IN // 4, other=0)
    UNIFORM: tl.constexpr = BLOCK_ROWS % R == 0 and F % BLOCK_ROWS == 0
    scale = _fetch_scales(w_scales, rows, G, GROUP, UNIFORM, BLOCK // 16)
    # The barrier and the branch, which is always taken, keep ptxas from moving arithmetic between
    # the loads.
    tl.debug_barrier()
    if count > 0:
        dtype: tl.constexpr = hidden.dtype.element_ty
        a, b, c, d = _load_fours(x, dtype, IN // 4, PARTS, HOW, BLOCK // 4)
        p, q, r, s = e4m3.from_words(words, HOW)
        sums = p.to(tl.float32) * a[None, None, :]
        sums += q.to(tl.float32) * b[None, None, :]
        sums += r.to(tl.float32) * c[None, None, :]
        sums += s.to(tl.float32) * d[None, None, :]
        sums = tl.sum(sums.reshape(2, R, BLOCK // 16, 4), axis=3) * scale
        if SHARING > 0:
            group = tl.minimum(tl.arange(0, BLOCK // 16) * 16 // SHARING, (IN - 1) // SHARING)
            sums *= tl.load(x_scales + group)[None, None, :]
        sums = tl.sum(sums, axis=2)
        if bias is not None:
            sums += tl.load(bias + rows).to(tl.float32)
        gate, up = tl.split(sums.to(dtype).permute(1, 0))
        place = own % PARTS_OF_OUT * (F // PARTS_OF_OUT) + own // PARTS_OF_OUT
        tl.store(hidden + pair * F + place, gated(gate, up, alpha, limit), mask=own < F)
