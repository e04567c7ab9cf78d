"""Triton kernels of Gated DeltaNet: the delta rule for tokens and for prompts, and its gated norm.

The twins are GatedDeltaNet's own gates, norms and rules in layers/gated_delta.py, which explains
the mathematics. Arithmetic is float32. The state is float32 or bfloat16.

One token of each sequence moves the whole state, so that kernel is bound by memory. A program
updates a head's matrix, all of it or one slice of its columns after another, in registers: each
element is read and written once. The gated norm of the head's output follows at once.

A prompt is cut into blocks of 64 tokens. For all blocks at once, one kernel inverts the triangular
system of each. Another kernel passes over the blocks of a chunk one after the other: it multiplies
the inverse by what the state before the block lets its values be, and computes outputs and states
by products. The columns of a state are independent there, so several programs share a head.

Tensor cores take operands of 16 bits. A float32 operand is split into a sum of two bfloat16 values,
which have 16 bits of it, where its rounding would enter the state; q, k and v have 16 bits anyway.
In models of other dtypes than bfloat16, a float32 operand is split into a sum of two TF32 values,
which have 22 of its 24 bits (Triton's "tf32x3"). Products of whole float32 values ("ieee") would
spill 20 to 31 KB of a thread on Hopper, and those of TF32 spill 1 to 4 KB (Triton 3.6). Triton's
interpreter multiplies whole values; tests allow both the same error, 5e-5.

Shapes: T tokens (B decoding sequences, then P tokens of N prompt chunks), G key heads, H value
heads, key size Dk, value size Dv, R rows of state.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    cdiv,
    has_large_shared_memory,
    is_hopper,
    launch,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.short_conv import TOKENS, ChunkBlocks, block_of

# Values of a head that a program updates at once, if there are many programs. 256 sequences of 32
# heads on an H200 (Triton 3.6): 3.4 TB/s in slices of 32, 3.8 of 64, 2.6 of 128.
TOKEN_SLICE = 64
# Columns of keys that products of a prompt's blocks take at a time, on a GPU without large shared
# memory: a thread's registers do not hold what it needs of 128 (448 bytes are spilled; Triton 3.6).
KEY_SLICE = 64
# Of keys and values: powers of two, of which tensor cores take 16 or more.
SIZES = (16, 32, 64, 128)


class DeltaInputs(NamedTuple):
    """The inputs of the delta rule: a layer's projections, and its own parameters.

    The rows of tensors may have any stride.
    """

    qkv: Tensor  # [T, 2 G Dk + H Dv]: q, k and v, convolved
    ba: Tensor  # [T, 2 H]: b and a, which decide strengths and gates
    A_log: Tensor  # [H] float32
    dt_bias: Tensor  # [H] float32
    num_key_heads: int  # G
    key_dim: int  # Dk

    def rows(self, part: slice) -> "DeltaInputs":
        """Return the inputs of some tokens."""
        return self._replace(qkv=self.qkv[part], ba=self.ba[part])


def delta_rule_token(
    inputs: DeltaInputs,
    state: Tensor,
    rows: Tensor,
    *,
    z: Tensor,
    norm_weight: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    """Apply the delta rule to one token of each of B sequences, and the gated norm to the results.

    Args:
        inputs: those of the B tokens.
        state: [R, H, Dk, Dv] float32 or bfloat16. The sequences' rows are updated.
        rows: [B] int64. Only a row that no sequence has may occur more than once.
        z: [B, H Dv], the gates of the norm.
        norm_weight: [Dv].
        out: [B, H Dv], which receives the results.
    """
    heads, key_dim, value_dim = state.shape[1:]
    if len(out):
        # Many programs hide the latency of memory best, if they take few registers. Few of them
        # read a head's whole state at once.
        is_few = len(out) * heads <= num_processors(out.device)
        slice_dim = value_dim if is_few else min(value_dim, TOKEN_SLICE)
        launch(
            _delta_rule_token_kernel,
            (heads, len(out)),
            *(inputs.qkv, inputs.ba, inputs.A_log, inputs.dt_bias, state, rows, z, norm_weight),
            *(out, eps, inputs.qkv.stride(0), inputs.ba.stride(0), z.stride(0), out.stride(0)),
            *(inputs.num_key_heads, heads, key_dim, value_dim, slice_dim),
            num_warps=8 if key_dim * slice_dim >= 16384 else 4,
            **overlap(out),
        )


@triton.jit(do_not_specialize=["rows"])
def _delta_rule_token_kernel(
    qkv,
    ba,
    A_log,
    dt_bias,
    state,
    rows,
    z,
    weight,
    out,
    eps,
    qkv_stride,
    ba_stride,
    z_stride,
    out_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    key, value, part = tl.arange(0, DK), tl.arange(0, DV), tl.arange(0, SLICE)
    scale = tl.load(weight + value).to(tl.float32)
    wait_for_inputs(PDL)
    token = tl.program_id(1).to(tl.int64)
    state += (tl.load(rows + token) * H + head) * (DK * DV)
    qkv += token * qkv_stride
    q_at = qkv + head // (H // G) * DK + key
    q = tl.load(q_at).to(tl.float32)
    k = tl.load(q_at + G * DK).to(tl.float32)
    v_at = qkv + 2 * G * DK + head * DV + part
    gate = tl.load(z + token * z_stride + head * DV + value).to(tl.float32)
    ba += token * ba_stride + head
    beta, g = strength_and_gate(tl.load(ba), tl.load(ba + H), A_log + head, dt_bias + head)
    decay = tl.exp(g)
    q *= inverse_norm(tl.sum(q * q)) * DK**-0.5
    k *= inverse_norm(tl.sum(k * k))
    out += token * out_stride + head * DV
    dtype: tl.constexpr = out.dtype.element_ty
    state_at = state + (key[:, None] * DV + part[None, :])
    if SLICE == DV:
        o = _update_columns(state_at, q, k, tl.load(v_at).to(tl.float32), beta, decay).to(dtype)
    else:
        for first in range(0, DV, SLICE):
            v = tl.load(v_at + first).to(tl.float32)
            o = _update_columns(state_at + first, q, k, v, beta, decay)
            tl.store(out + first + part, o.to(dtype))
        tl.debug_barrier()  # the program's other threads have written what a thread reads
        o = tl.load(out + value)
        tl.debug_barrier()
    square_sum = tl.sum(o.to(tl.float32) * o.to(tl.float32))
    tl.store(out + value, gated_norm(o, gate, scale, eps, square_sum, DV))


@triton.jit
def _update_columns(state_at, q, k, v, beta, decay):
    """Update some columns of a state by a token, and return the token's outputs there."""
    s = tl.load(state_at).to(tl.float32) * decay
    change = beta * (v - tl.sum(k[:, None] * s, axis=0))
    s += k[:, None] * change[None, :]
    tl.store(state_at, s.to(state_at.dtype.element_ty))
    return tl.sum(q[:, None] * s, axis=0)


@triton.jit
def strength_and_gate(b, a, A_log, dt_bias):
    """Compute a token's beta = sigmoid(b) and g = -exp(A_log) softplus(a + dt_bias)."""
    # The twin rounds beta to the tensors' dtype.
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
    x = a.to(tl.float32) + tl.load(dt_bias)
    e = tl.exp(x)
    # log(1 + e) loses a small e: three terms of its series are exact to 1e-6 there.
    softplus = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e / 3.0)), tl.log(1.0 + e))
    softplus = tl.where(x > 20.0, x, softplus)
    return beta, -tl.exp(tl.load(A_log)) * softplus


@triton.jit
def inverse_norm(square_sum):
    """Return the factor that brings a key or a query of this sum of squares to length 1."""
    return tl.rsqrt(square_sum + 1e-6)


@triton.jit
def gated_norm(o, gate, weight, eps, square_sum, D: tl.constexpr):
    """Compute GatedRMSNorm of o, rounding wherever it does. `gate` and `weight` are float32."""
    scaled = (o.to(tl.float32) * tl.rsqrt(square_sum / D + eps)).to(o.dtype).to(tl.float32)
    normed = (scaled * weight).to(o.dtype).to(tl.float32)
    return (normed * gate / (1.0 + tl.exp(-gate))).to(o.dtype)


class Solution(NamedTuple):
    """The part of each block of a head that does not depend on the state before the block."""

    inverse: Tensor  # [T, H, TOKENS], rows of each block's inverse; with inverse_low, or in float32
    inverse_low: Tensor | None  # [T, H, TOKENS]
    products: Tensor  # [T, H, TOKENS]: of a token's q with the keys of its block, decayed
    # [T, H, 4] float32. They multiply a token's q, its k where the state is read, its k where the
    # state at the block's end is written, and the state itself.
    factors: Tensor


def delta_rule_chunks(
    inputs: DeltaInputs,
    state: Tensor,
    rows: Tensor,
    blocks: ChunkBlocks,
    *,
    z: Tensor,
    norm_weight: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    """Apply the delta rule to N chunks of sequences, and the gated norm to the results.

    Only tokens of chunks are written. For the arguments see `delta_rule_token`; T takes B's place,
    and `rows` is [N].
    """
    heads, key_dim, value_dim = state.shape[1:]
    tokens, device = len(out), out.device
    if not tokens:
        return
    splits = out.dtype == torch.bfloat16
    operands = torch.bfloat16 if splits else torch.float32
    # All by tokens, not by blocks, because the host knows how many tokens there are.
    size = tokens, heads, TOKENS
    solution = Solution(
        torch.empty(size, dtype=operands, device=device),
        torch.empty(size, dtype=operands, device=device) if splits else None,
        torch.empty(size, dtype=operands, device=device),
        torch.empty(tokens, heads, 4, dtype=torch.float32, device=device),
    )
    sizes = inputs.num_key_heads, heads, key_dim
    key_slice = key_dim if has_large_shared_memory(device) else min(key_dim, KEY_SLICE)
    launch(
        _solve_blocks_kernel,
        (blocks.most, heads, blocks.chunks),
        *(inputs.qkv, inputs.ba, inputs.A_log, inputs.dt_bias, blocks.starts, blocks.tiles),
        *(*solution, inputs.qkv.stride(0), inputs.ba.stride(0), *sizes, TOKENS, splits),
        key_slice,
        num_warps=4,
    )
    # On an H100 (Triton 3.6), 8 prompts of 2,048 tokens and 32 heads take the first kernel 0.41 ms,
    # and 0.74 with 8 warps. They take the second kernel, which spills some registers, 0.48 ms, and
    # 0.64 with two stages. One prompt of 16,384 tokens has too few programs to let two of them
    # share a multiprocessor: it takes 1.36 ms, and 1.13 with two stages, which load a block while
    # another is computed.
    on_hopper = is_hopper(device)
    # For data-center Blackwell, Triton 3.6 fails to compile 64 values in TF32: it emits a trap.
    slice_dim = min(value_dim, 64 if splits or on_hopper else 32)
    grid = value_dim // slice_dim, heads, len(rows)
    is_few = math.prod(grid) <= num_processors(device)
    launch(
        _pass_over_blocks_kernel,
        grid,
        *(inputs.qkv, blocks.starts, state, rows, *solution, out),
        *(inputs.qkv.stride(0), out.stride(0), *sizes, value_dim, TOKENS, slice_dim, splits),
        num_warps=4 if on_hopper else 8,
        num_stages=2 if on_hopper and is_few else 1,
    )
    block = max(1, 2048 // value_dim)
    launch(
        _gated_norm_kernel,
        (cdiv(tokens * heads, block),),
        *(out, z, norm_weight, blocks.starts, blocks.starts[-1:], eps),
        *(out.stride(0), z.stride(0), heads, value_dim, block),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["starts"])
def _solve_blocks_kernel(
    qkv,
    ba,
    A_log,
    dt_bias,
    starts,
    tiles,
    inverse_out,
    inverse_low_out,
    products_out,
    factors,
    qkv_stride,
    ba_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    KEY_SLICE: tl.constexpr,
):
    """Compute what a block of a head contributes by itself: see Solution."""
    chunk, first = block_of(tiles, TOKENS)
    head = tl.program_id(1)
    begin = tl.load(starts + chunk)
    length = tl.load(starts + chunk + 1) - begin
    if first < length:
        i = tl.arange(0, TOKENS)
        held = first + i < length
        token = (begin + first).to(tl.int64)
        qkv += token * qkv_stride
        ba += token * ba_stride + head
        row = token * H + head  # of the block's first token
        rows_held = held[:, None]
        q_at = qkv + head // (H // G) * DK + i[:, None] * qkv_stride
        k_at = q_at + G * DK
        column = tl.arange(0, DK)[None, :]
        k = tl.load(k_at + column, mask=rows_held, other=0.0)
        q = tl.load(q_at + column, mask=rows_held, other=0.0)
        b = tl.load(ba + i * ba_stride, mask=held, other=0.0)
        a = tl.load(ba + H + i * ba_stride, mask=held, other=0.0)
        beta, g = strength_and_gate(b, a, A_log + head, dt_bias + head)
        # A token of padding has g = 0 and beta = 0, and does not change the state.
        beta, g = tl.where(held, beta, 0.0), tl.where(held, g, 0.0)
        # Sums of gates reach thousands, and their differences must be exact to 1e-6: so a sum has
        # two parts of 24 bits.
        sums = tl.cumsum(g.to(tl.float64), axis=0)
        d = sums.to(tl.float32)
        d_low = (sums - d.to(tl.float64)).to(tl.float32)
        k_norm = inverse_norms(k)
        is_causal = i[:, None] >= i[None, :]
        between = (d[:, None] - d[None, :]) + (d_low[:, None] - d_low[None, :])
        decay = tl.exp(tl.where(is_causal, between, float("-inf"))) * k_norm[None, :]
        q_norm = inverse_norms(q) * DK**-0.5
        products = multiply_rows(q, k, q_at, k_at, rows_held, KEY_SLICE)
        products *= decay * q_norm[:, None]
        place = row * TOKENS + (i[:, None] * (H * TOKENS) + i[None, :])
        tl.store(products_out + place, products.to(products_out.dtype.element_ty), mask=rows_held)
        system = multiply_rows(k, k, k_at, k_at, rows_held, KEY_SLICE)
        system *= decay * (beta * k_norm)[:, None]
        inverse = inverse_of(tl.where(i[:, None] > i[None, :], system, 0.0), TOKENS, SPLITS)
        inverse *= beta[None, :]
        if SPLITS:
            inverse, low = split(inverse)
            tl.store(inverse_low_out + place, low, mask=rows_held)
        tl.store(inverse_out + place, inverse, mask=rows_held)

        factors_at = factors + (row + i * H) * 4
        start = tl.exp(d)
        tl.store(factors_at, start * q_norm, mask=held)
        tl.store(factors_at + 1, start * k_norm, mask=held)
        # Tokens of padding add no gates, so the last sum is that of the block's last token.
        is_last = i == TOKENS - 1
        end, end_low = tl.sum(tl.where(is_last, d, 0.0)), tl.sum(tl.where(is_last, d_low, 0.0))
        tl.store(factors_at + 2, tl.exp((end - d) + (end_low - d_low)) * k_norm, mask=held)
        tl.store(factors_at + 3, start, mask=held)


@triton.jit
def multiply_rows(x, y, x_at, y_at, held, SLICE: tl.constexpr):
    """Multiply matrices, x by y transposed.

    If they have more columns than SLICE, load so many at a time: rows begin at x_at and y_at
    [rows, 1], and those that are not `held` are 0.
    """
    if x.shape[1] <= SLICE:
        result = tl.dot(x, tl.trans(y), input_precision="tf32x3")
    else:
        result = tl.zeros([x.shape[0], y.shape[0]], tl.float32)
        column = tl.arange(0, SLICE)[None, :]
        for first in range(0, x.shape[1], SLICE):
            x_part = tl.load(x_at + first + column, mask=held, other=0.0)
            y_part = tl.load(y_at + first + column, mask=held, other=0.0)
            result = tl.dot(x_part, tl.trans(y_part), result, input_precision="tf32x3")
    return result


@triton.jit
def inverse_norms(x):
    """Return the factors that bring rows of x to length 1."""
    x = x.to(tl.float32)
    return inverse_norm(tl.sum(x * x, axis=1))


@triton.jit
def inverse_of(system, N: tl.constexpr, SPLITS: tl.constexpr):
    """Invert 1 + system, where `system` [N, N] is strictly lower triangular.

    Two neighbouring blocks on the diagonal, whose inverses X and Y are known, and the block B below
    X and beside Y, make a block of twice the size, whose inverse has -Y B X in the place of B. So
    blocks grow from 1 to N. The result is exact where keys repeat; powers of the system grow there.
    """
    # Blocks up to 16, the least that tensor cores multiply, are apart from one another:
    # [blocks, 16, 16].
    BASE: tl.constexpr = 16
    block, j, i = tl.arange(0, N // BASE), tl.arange(0, BASE), tl.arange(0, N)
    is_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    small = tl.reshape(system, [N // BASE, BASE, N // BASE, BASE])
    small = tl.sum(tl.where(is_diagonal, small, 0.0), axis=2)
    apart = (j[:, None] ^ j[None, :])[None, :, :]
    small = grow_blocks(small, small, apart, 1, BASE, SPLITS)
    inverse = tl.where(is_diagonal, tl.expand_dims(small, 2), 0.0)
    apart = i[:, None] ^ i[None, :]
    return grow_blocks(tl.reshape(inverse, [N, N]), system, apart, BASE, N, SPLITS)


@triton.jit
def grow_blocks(inverse, system, apart, SIZE: tl.constexpr, TO: tl.constexpr, SPLITS: tl.constexpr):
    """Grow the inverses of diagonal blocks from SIZE to TO. SIZE = 1: `inverse` is not read.

    `apart` is the exclusive or of rows and columns: in [SIZE, 2 SIZE) between two neighbours.
    """
    if SIZE == 1:
        inverse = tl.where(apart == 0, 1.0, tl.where(apart == 1, -system, 0.0))
        inverse = grow_blocks(inverse, system, apart, 2, TO, SPLITS)
    elif SIZE < TO:
        below = tl.where((apart >= SIZE) & (apart < 2 * SIZE), system, 0.0)
        inverse -= multiply(multiply(inverse, below, SPLITS), inverse, SPLITS)
        inverse = grow_blocks(inverse, system, apart, 2 * SIZE, TO, SPLITS)
    return inverse


@triton.jit
def multiply(x, y, SPLITS: tl.constexpr):
    """Multiply float32 matrices, each in two parts if `SPLITS`."""
    if SPLITS:
        x, x_low = split(x)
        y, y_low = split(y)
        result = tl.dot(x, y, tl.dot(x, y_low, tl.dot(x_low, y)))
    else:
        result = tl.dot(x, y, input_precision="tf32x3")
    return result


@triton.jit
def split(x):
    """Split float32 values into sums of two bfloat16 values."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["starts", "rows"])
def _pass_over_blocks_kernel(
    qkv,
    starts,
    state,
    rows,
    inverse_in,
    inverse_low_in,
    products_in,
    factors,
    out,
    qkv_stride: tl.constexpr,
    out_stride: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Compute outputs and the state, for SLICE values of a head, block by block of a chunk.

    All results are transposed, with values as rows: so the state and whatever is computed from it
    are the left operands of products, which stay in registers.
    """
    head, chunk = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts + chunk), tl.load(starts + chunk + 1)
    if begin < end:
        i, key = tl.arange(0, TOKENS), tl.arange(0, DK)
        value = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
        state += (tl.load(rows + chunk) * H + head) * (DK * DV)
        state_at = state + (key[None, :] * DV + value[:, None])
        s = tl.load(state_at).to(tl.float32)  # [SLICE, DK]
        for first in range(begin, end, TOKENS):
            held = first + i < end
            rows_held = held[:, None]
            token = begin.to(tl.int64) + (first - begin)
            place = token * H + head  # of the block's first token
            q_at = qkv + token * qkv_stride + head // (H // G) * DK
            q_at += i[:, None] * qkv_stride + key[None, :]
            k = tl.load(q_at + G * DK, mask=rows_held, other=0.0)
            q = tl.load(q_at, mask=rows_held, other=0.0)
            within = place * TOKENS + (i[:, None] * (H * TOKENS) + i[None, :])
            inverse = tl.load(inverse_in + within, mask=rows_held, other=0.0)
            products = tl.load(products_in + within, mask=rows_held, other=0.0)
            v_at = qkv + token * qkv_stride + (2 * G * DK + head * DV)
            v_at += i[:, None] * qkv_stride + value[None, :]
            v = tl.trans(tl.load(v_at, mask=rows_held, other=0.0))  # [SLICE, TOKENS]
            factors_at = factors + (place + i * H) * 4
            q_factor = tl.load(factors_at, mask=held, other=0.0)[None, :]
            read_factor = tl.load(factors_at + 1, mask=held, other=0.0)[None, :]
            k_factor = tl.load(factors_at + 2, mask=held, other=0.0)[None, :]
            last = tl.minimum(TOKENS, end - first) - 1
            decay = tl.load(factors + (place + last * H) * 4 + 3)
            if SPLITS:
                inverse_low = tl.load(inverse_low_in + within, mask=rows_held, other=0.0)
                inverse, inverse_low = tl.trans(inverse), tl.trans(inverse_low)
                s_high, s_low = split(s)
                k_cols = tl.trans(k)
                from_state = tl.dot(s_low, k_cols, tl.dot(s_high, k_cols))
                # The rounding of an output enters no state.
                o = tl.dot(s_high, tl.trans(q)) * q_factor
                high, low = split(v.to(tl.float32) - read_factor * from_state)
                u = tl.dot(high, inverse_low, tl.dot(low, inverse, tl.dot(high, inverse)))
                o = tl.dot(u.to(tl.bfloat16), tl.trans(products), o)
                high, low = split(u * k_factor)
                s = tl.dot(low, k, tl.dot(high, k, s * decay))
            else:
                k = k.to(tl.float32)
                change = v.to(tl.float32)
                change -= read_factor * tl.dot(s, tl.trans(k), input_precision="tf32x3")
                u = tl.dot(change, tl.trans(inverse), input_precision="tf32x3")
                o = tl.dot(s, tl.trans(q.to(tl.float32)), input_precision="tf32x3") * q_factor
                o = tl.dot(u, tl.trans(products), o, input_precision="tf32x3")
                s = tl.dot(u * k_factor, k, s * decay, input_precision="tf32x3")
            out_at = out + token * out_stride + head * DV
            out_at += i[:, None] * out_stride + value[None, :]
            tl.store(out_at, tl.trans(o.to(out.dtype.element_ty)), mask=rows_held)
        tl.store(state_at, s.to(state.dtype.element_ty))


@triton.jit(do_not_specialize=["starts", "end"])
def _gated_norm_kernel(
    out,
    z,
    weight,
    starts,
    end,
    eps,
    out_stride,
    z_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm the outputs of chunks in place, and multiply them by silu(z)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = row // H
    # Tokens before the first chunk and behind the last one are not of chunks.
    held = (token >= tl.load(starts)) & (token < tl.load(end))
    value = tl.arange(0, D)
    col = (row % H * D)[:, None] + value[None, :]
    at = out + (token * out_stride)[:, None] + col
    o = tl.load(at, mask=held[:, None], other=0.0)
    gate = tl.load(z + (token * z_stride)[:, None] + col, mask=held[:, None], other=0.0)
    scale = tl.load(weight + value).to(tl.float32)[None, :]
    wide = o.to(tl.float32)
    square_sum = tl.sum(wide * wide, axis=1)[:, None]
    result = gated_norm(o, gate.to(tl.float32), scale, eps, square_sum, D)
    tl.store(at, result, mask=held[:, None])
