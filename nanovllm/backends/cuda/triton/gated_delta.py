"""Triton kernels of Gated DeltaNet: the delta rule for tokens and for prompts, and its gated norm.

The twins are GatedDeltaNet's own gates, norms and rules in layers/gated_delta.py, which explains
the mathematics. Arithmetic is float32. The state is float32 or bfloat16.

One token of each sequence moves the whole state, so that kernel is bound by memory. A program
updates a head's matrix, all of it or one slice of its columns after another, in registers: each
element is read and written once. The gated norm of the head's output follows at once.

A prompt is cut into blocks of 64 tokens. For all blocks at once, one kernel solves the triangular
system of each. Its solution is linear in the state before the block: u = U - W S. Another kernel
passes over the blocks of a chunk one after the other, and computes outputs and states by products.
The columns of a state are independent there, so several programs share a head.

Tensor cores take operands of 16 bits. A float32 operand is split into a sum of two bfloat16 values,
which have 16 bits of it, where its rounding would enter the state; q, k and v have 16 bits anyway.
In models of other dtypes than bfloat16, products are those of float32.

Shapes: T tokens (B decoding sequences, then P tokens of N prompt chunks), G key heads, H value
heads, key size Dk, value size Dv, R rows of state.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    has_large_shared_memory,
    launch,
    num_processors,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.short_conv import TOKENS, Blocks, block_of

# Values of a head that a program updates at once, if there are many programs. 256 sequences of 32
# heads on an H200 (Triton 3.6): 3.4 TB/s in slices of 32, 3.8 of 64, 2.6 of 128.
TOKEN_SLICE = 64
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
    """The contributions of each block by itself: u = U - W S, and the products of q and k."""

    u: Tensor  # [T, H, Dv] float32
    w: Tensor  # [T, H, Dk]; with w_low, or in float32
    w_low: Tensor | None  # [T, H, Dk]
    products: Tensor  # [T, H, TOKENS]: of a token's q with the keys of its block, decayed
    # [T, H, 3] float32. They multiply a token's q; its k, up to the block's end; and the state.
    factors: Tensor


def delta_rule_chunks(
    inputs: DeltaInputs,
    state: Tensor,
    rows: Tensor,
    blocks: Blocks,
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
    solution = Solution(
        torch.empty(tokens, heads, value_dim, dtype=torch.float32, device=device),
        torch.empty(tokens, heads, key_dim, dtype=operands, device=device),
        torch.empty(tokens, heads, key_dim, dtype=operands, device=device) if splits else None,
        torch.empty(tokens, heads, TOKENS, dtype=operands, device=device),
        torch.empty(tokens, heads, 3, dtype=torch.float32, device=device),
    )
    sizes = inputs.num_key_heads, heads, key_dim, value_dim, TOKENS
    launch(
        _solve_blocks_kernel,
        (blocks.most, heads, blocks.chunks),
        *(inputs.qkv, inputs.ba, inputs.A_log, inputs.dt_bias, blocks.starts, blocks.tiles),
        *(*solution, inputs.qkv.stride(0), inputs.ba.stride(0), *sizes, splits),
        num_warps=8,
    )
    # 8 prompts of 2,048 tokens and 32 heads on an H200 (Triton 3.6): 3.7 ms, and 77 ms by the plain
    # rule. The first kernel takes 2.9 ms. The second one takes 0.7 ms in slices of 64, 1.1 of 32.
    is_large = has_large_shared_memory(device)
    slice_dim = min(value_dim, 64 if is_large else 32)
    launch(
        _pass_over_blocks_kernel,
        (value_dim // slice_dim, heads, len(rows)),
        *(inputs.qkv, blocks.starts, state, rows, *solution, out),
        *(inputs.qkv.stride(0), out.stride(0), *sizes, slice_dim, splits),
        num_warps=8,
        num_stages=2 if is_large else 1,
    )
    block = max(1, 2048 // value_dim)
    launch(
        _gated_norm_kernel,
        (triton.cdiv(tokens * heads, block),),
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
    u_out,
    w_out,
    w_low_out,
    products_out,
    factors,
    qkv_stride,
    ba_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Compute what a block of a head contributes by itself, whatever the state before it is."""
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
        key, value = tl.arange(0, DK)[None, :], tl.arange(0, DV)[None, :]
        q_at = qkv + head // (H // G) * DK + i[:, None] * qkv_stride + key
        k = tl.load(q_at + G * DK, mask=rows_held, other=0.0)
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
        decay = tl.exp(tl.where(is_causal, between, float("-inf")))
        system = tl.dot(k, tl.trans(k), input_precision="ieee")
        system *= decay * (beta * k_norm)[:, None] * k_norm[None, :]
        inverse = inverse_of(tl.where(i[:, None] > i[None, :], system, 0.0), TOKENS)

        start = tl.exp(d)
        w = split_dot(inverse * (beta * start * k_norm)[None, :], k, SPLITS)
        w_place = row * DK + (i[:, None] * (H * DK) + key)
        if SPLITS:
            w, low = split(w)
            tl.store(w_low_out + w_place, low, mask=rows_held)
        tl.store(w_out + w_place, w, mask=rows_held)
        v_at = qkv + 2 * G * DK + head * DV + i[:, None] * qkv_stride + value
        v = tl.load(v_at, mask=rows_held, other=0.0)
        u = split_dot(inverse * beta[None, :], v, SPLITS)
        tl.store(u_out + row * DV + (i[:, None] * (H * DV) + value), u, mask=rows_held)
        q = tl.load(q_at, mask=rows_held, other=0.0)
        q_norm = inverse_norms(q) * DK**-0.5
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        products *= decay * q_norm[:, None] * k_norm[None, :]
        products_at = products_out + row * TOKENS + (i[:, None] * (H * TOKENS) + i[None, :])
        tl.store(products_at, products.to(products_out.dtype.element_ty), mask=rows_held)
        factors_at = factors + (row + i * H) * 3
        tl.store(factors_at, start * q_norm, mask=held)
        # Tokens of padding add no gates, so the last sum is that of the block's last token.
        is_last = i == TOKENS - 1
        end, end_low = tl.sum(tl.where(is_last, d, 0.0)), tl.sum(tl.where(is_last, d_low, 0.0))
        tl.store(factors_at + 1, tl.exp((end - d) + (end_low - d_low)) * k_norm, mask=held)
        tl.store(factors_at + 2, start, mask=held)


@triton.jit
def inverse_norms(x):
    """Return the factors that bring rows of x to length 1."""
    x = x.to(tl.float32)
    return inverse_norm(tl.sum(x * x, axis=1))


@triton.jit
def inverse_of(system, N: tl.constexpr):
    """Invert 1 + system, where `system` [N, N] is strictly lower triangular.

    By forward substitution, which is exact where keys repeat; powers of the system grow there.
    """
    i = tl.arange(0, N)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for j in range(N - 1):
        # Row j is final now: take it out of the rows below.
        column = tl.sum(tl.where(i[None, :] == j, system, 0.0), axis=1)
        row = tl.sum(tl.where(i[:, None] == j, inverse, 0.0), axis=0)
        inverse -= column[:, None] * row[None, :]
    return inverse


@triton.jit
def split_dot(x, y, SPLITS: tl.constexpr):
    """Multiply a float32 x, in two parts if `SPLITS`, by a y of the model's dtype."""
    if SPLITS:
        high, low = split(x)
        result = tl.dot(low, y, tl.dot(high, y))
    else:
        result = tl.dot(x, y.to(tl.float32), input_precision="ieee")
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
    u_in,
    w_in,
    w_low_in,
    products_in,
    factors,
    out,
    qkv_stride,
    out_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Compute outputs and the state, for SLICE values of a head, block by block of a chunk."""
    head, chunk = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts + chunk), tl.load(starts + chunk + 1)
    if begin < end:
        i, key = tl.arange(0, TOKENS), tl.arange(0, DK)
        value = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
        row = tl.load(rows + chunk)
        state += (row * H + head) * (DK * DV)
        state_at = state + (key[:, None] * DV + value[None, :])
        s = tl.load(state_at).to(tl.float32)
        k_col = (G + head // (H // G)) * DK
        for first in range(begin, end, TOKENS):
            held = first + i < end
            rows_held = held[:, None]
            token = begin.to(tl.int64) + (first - begin)
            place = token * H + head  # of the block's first token
            k_at = qkv + token * qkv_stride + k_col + (i[:, None] * qkv_stride + key[None, :])
            k = tl.load(k_at, mask=rows_held, other=0.0)
            q = tl.load(k_at - G * DK, mask=rows_held, other=0.0)
            w_place = place * DK + (i[:, None] * (H * DK) + key[None, :])
            w = tl.load(w_in + w_place, mask=rows_held, other=0.0)
            products_at = products_in + place * TOKENS + (i[:, None] * (H * TOKENS) + i[None, :])
            products = tl.load(products_at, mask=rows_held, other=0.0)
            u_at = u_in + place * DV + (i[:, None] * (H * DV) + value[None, :])
            u = tl.load(u_at, mask=rows_held, other=0.0)
            factors_at = factors + (place + i * H) * 3
            q_factor = tl.load(factors_at, mask=held, other=0.0)
            k_factor = tl.load(factors_at + 1, mask=held, other=0.0)
            last = tl.minimum(TOKENS, end - first) - 1
            decay = tl.load(factors + (place + last * H) * 3 + 2)
            if SPLITS:
                w_low = tl.load(w_low_in + w_place, mask=rows_held, other=0.0)
                high, low = split(s)
                u -= tl.dot(w_low, high, tl.dot(w, low, tl.dot(w, high)))
                # The rounding of an output enters no state.
                o = tl.dot(q, high) * q_factor[:, None]
                o = tl.dot(products, u.to(tl.bfloat16), o)
                high, low = split(u * k_factor[:, None])
                k = tl.trans(k)
                s = tl.dot(k, low, tl.dot(k, high, s * decay))
            else:
                u -= tl.dot(w, s, input_precision="ieee")
                o = tl.dot(q.to(tl.float32), s, input_precision="ieee") * q_factor[:, None]
                o = tl.dot(products, u, o, input_precision="ieee")
                u *= k_factor[:, None]
                k = tl.trans(k.to(tl.float32))
                s = tl.dot(k, u, s * decay, input_precision="ieee")
            out_at = out + token * out_stride + head * DV
            out_at += i[:, None] * out_stride + value[None, :]
            tl.store(out_at, o.to(out.dtype.element_ty), mask=rows_held)
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
