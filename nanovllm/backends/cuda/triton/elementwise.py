"""Triton kernels of memory-bound operations: norms, activation, rotary embedding, decode inputs.

The kernels move each byte once. Their twins are the plain layers: RMSNorm, GatedMLP, SelfAttention
(its norms, rotation and store_kv) and BatchState.advance. Arithmetic is float32, and results are
rounded to the tensors' dtype wherever the twin rounds. In decode steps of few rows,
decode_attention.py norms, rotates and stores by the functions of this file.

Shapes: T tokens, N width of a row, H query heads, G KV heads, D head size, B sequences, W
block-table width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    MAX_ROWS,
    cdiv,
    launch,
    next_power_of_2,
    overlap,
    wait_for_inputs,
)
from nanovllm.backends.cuda.triton.e4m3 import PLAIN, encode, how_to_decode
from nanovllm.engine.batch_state import BatchState, DecodeInputs
from nanovllm.layers.attention import KVCache


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Compute RMSNorm of x [..., N]. `zero_centered`: multiply by 1 + weight, not by weight."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    _launch_norm(rows, residual=None, weight=weight, eps=eps, out=out, zero_centered=zero_centered)
    return out.view(x.shape)


def copy(x: Tensor, out: Tensor) -> None:
    """Copy x [N] to `out`, which may be pinned memory of the host."""
    if len(x):
        launch(_copy_kernel, (cdiv(len(x), 256),), x, out, len(x), 256, num_warps=1)


@triton.jit(do_not_specialize=["N"])
def _copy_kernel(x, out, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < N), mask=i < N)


def embed_and_norm(
    token_ids: Tensor, table: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (norm(rows), rows) of an embedding table [V, N]: [T, N] each. token_ids: [T]."""
    width = table.shape[1]
    rows = table.new_empty(len(token_ids), width)
    out = torch.empty_like(rows)
    if len(rows):
        block = next_power_of_2(width)
        launch(
            _embed_and_norm_kernel,
            (len(rows),),
            *(token_ids, table, weight, rows, out, eps, width, block, zero_centered),
            num_warps=max(1, min(8, block // 512)),
            **overlap(rows),
        )
    return out, rows


@triton.jit
def _embed_and_norm_kernel(
    token_ids,
    table,
    weight,
    rows,
    out,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    factor = tl.load(weight + cols, mask=inside, other=0.0)
    # The kernels of the layers count on it that what came before this kernel has ended when they
    # start: see dispatch.py.
    wait_for_inputs(PDL, LATE=True)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(table + tl.load(token_ids + i) * N + cols, mask=inside, other=0.0)
    tl.store(rows + i * N + cols, row, mask=inside)
    value = normed(row, factor, eps, N, ZERO_CENTERED)
    tl.store(out + i * N + cols, value, mask=inside)


def add_rms_norm(
    x: Tensor, residual: Tensor, *, weight: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (norm(total), total), where total = residual + x; [..., N] each.

    norm(total) overwrites x, and total overwrites residual.
    """
    rows = x.view(-1, x.shape[-1])
    _launch_norm(
        rows,
        residual=residual.view(rows.shape),
        weight=weight,
        eps=eps,
        out=rows,
        zero_centered=zero_centered,
    )
    return x, residual


def norm_add_norm(
    x: Tensor,
    residual: Tensor,
    *,
    after: Tensor,
    weight: Tensor | None,
    eps: float,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (norm(total), total), where total = residual + norm(x); [T, N] each.

    `after` is the weight of x's norm, `weight` that of the total's. If `weight` is None, return
    total twice. The first result overwrites x, and total overwrites residual.
    """
    if x.shape[0]:
        block = next_power_of_2(x.shape[1])
        launch(
            _norm_add_norm_kernel,
            (x.shape[0],),
            *(x, residual, after, weight, eps, x.shape[1], block, zero_centered),
            num_warps=max(1, min(8, block // 512)),
            **overlap(x),
        )
    return x, residual


def _launch_norm(x, *, residual, weight, eps, out, zero_centered):
    width = x.shape[1]
    if x.shape[0]:
        block = next_power_of_2(width)
        warps = max(1, min(8, block // 512))
        launch(
            _norm_kernel,
            (x.shape[0],),
            x,
            residual,
            weight,
            out,
            eps,
            width,
            block,
            residual is not None,
            zero_centered,
            num_warps=warps,
            **overlap(x),
        )


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * N
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    scale = tl.load(weight + cols, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    value = tl.load(x + start + cols, mask=inside, other=0.0)
    if ADD:
        summed = value.to(tl.float32) + tl.load(residual + start + cols, mask=inside, other=0.0).to(
            tl.float32
        )
        value = summed.to(value.dtype)
        tl.store(residual + start + cols, value, mask=inside)
    tl.store(out + start + cols, normed(value, scale, eps, N, ZERO_CENTERED), mask=inside)


@triton.jit
def _norm_add_norm_kernel(
    x,
    residual,
    after,
    weight,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * N
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    first = tl.load(after + cols, mask=inside, other=0.0)
    second = first
    if weight is not None:
        second = tl.load(weight + cols, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    value = tl.load(x + start + cols, mask=inside, other=0.0)
    value = normed(value, first, eps, N, ZERO_CENTERED)
    stream = tl.load(residual + start + cols, mask=inside, other=0.0)
    value = (value.to(tl.float32) + stream.to(tl.float32)).to(value.dtype)
    tl.store(residual + start + cols, value, mask=inside)
    if weight is not None:
        value = normed(value, second, eps, N, ZERO_CENTERED)
    tl.store(x + start + cols, value, mask=inside)


@triton.jit
def normed(row, weight, eps, N: tl.constexpr, ZERO_CENTERED: tl.constexpr = False):
    """Compute the norm of a row of N elements. The elements behind them must be 0."""
    wide = row.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide) / N + eps)
    if ZERO_CENTERED:
        result = scaled * (1.0 + weight.to(tl.float32))
    else:
        result = scaled.to(row.dtype).to(tl.float32) * weight.to(tl.float32)
    return result.to(row.dtype)


def activate_and_mul(x: Tensor, gelu: bool = False) -> Tensor:
    """Compute silu(gates) * ups, or gelu(gates) * ups by tanh: x [T, 2 F] -> [T, F].

    Each row of x consists of gates and then ups. If there are many tokens, the result overwrites
    the gates, because `x` is the largest tensor of a long prefill.
    """
    tokens, width = x.shape[0], x.shape[1] // 2
    out = x[:, :width] if tokens > MAX_ROWS else x.new_empty(tokens, width)
    if tokens:
        block = 1024
        launch(
            _activate_and_mul_kernel,
            (tokens * cdiv(width, block),),
            x,
            out,
            out.stride(0),
            width,
            block,
            gelu,
            num_warps=4,
            **overlap(x),
        )
    return out


@triton.jit
def _activate_and_mul_kernel(
    x,
    out,
    out_stride,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # Neighbouring programs compute parts of one token, so that memory is read in its order.
    parts: tl.constexpr = tl.cdiv(F, BLOCK)
    token = (tl.program_id(0) // parts).to(tl.int64)
    cols = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = cols < F
    gate = tl.load(x + token * 2 * F + cols, mask=inside, other=0.0)
    up = tl.load(x + token * 2 * F + F + cols, mask=inside, other=0.0)
    active = activated(gate.to(tl.float32), GELU).to(gate.dtype)
    product = active.to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * out_stride + cols, product.to(gate.dtype), mask=inside)


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """Compute SiLU, x sigmoid(x), or GELU by tanh, x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-slope))


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x [T, N] by sigmoid(gate) in place. gate [T, N] may have any stride between rows."""
    tokens, width = x.shape
    if tokens:
        block = 1024
        launch(
            _multiply_by_sigmoid_kernel,
            (tokens * cdiv(width, block),),
            *(x, gate, gate.stride(0), width, block),
            num_warps=4,
            **overlap(x),
        )
    return x


@triton.jit
def _multiply_by_sigmoid_kernel(
    x, gate, gate_stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    parts: tl.constexpr = tl.cdiv(N, BLOCK)
    token = (tl.program_id(0) // parts).to(tl.int64)
    cols = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = cols < N
    value = tl.load(x + token * N + cols, mask=inside, other=0.0)
    slope = tl.load(gate + token * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-slope))).to(value.dtype).to(tl.float32)
    tl.store(x + token * N + cols, (value.to(tl.float32) * factor).to(value.dtype), mask=inside)


def qk_norm_rope_store(
    qkv: Tensor,
    *,
    head_dim: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: KVCache,
    zero_centered: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate q and k in place, and store k and v in the cache.

    A cache in FP8 rounds k and v, in place, too.

    Args:
        qkv: [T, (H + 2G) D], with any stride between its rows.
        q_weight: [D], the weight of q's norm; None: neither q nor k is normed.
        k_weight: [D], the weight of k's norm.
        cos_sin: [positions, R]; R elements of a head are rotated. R may be 0.
        slot_mapping: [T], the KV slot of each token; -1: its k and v are not stored.
        zero_centered: whether the norms multiply by 1 + weight.
        interleaved: whether the two elements of a rotated pair are neighbours.
    Returns:
        q [T, H, D], k and v [T, G, D], which are views of `qkv`.
    """
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    if heads.shape[0]:
        heads_per_program = 8
        # A thread has fewer elements of small heads than an instruction takes.
        is_small = cache.scales is None or head_dim < 32
        how = PLAIN.value if is_small else how_to_decode(qkv.device)
        sizes = num_heads, num_kv_heads, head_dim, cos_sin.shape[1]
        launch(
            _qk_norm_rope_store_kernel,
            (heads.shape[0], cdiv(heads.shape[1], heads_per_program)),
            *(qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping),
            *(cache.k, cache.v, cache.scales, qkv.stride(0)),
            *sizes,
            interleaved,
            zero_centered,
            heads_per_program,
            next_power_of_2(head_dim // 2),
            q_weight is not None,
            cache.k.numel() > 0,
            how,
            num_warps=1,
            **overlap(qkv),
        )
    return heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)


# positions and slots are rows of one tensor, and its number of tokens decides whether they are
# aligned: without do_not_specialize, Triton would compile a kernel for each case.
@triton.jit(do_not_specialize=["positions", "slots"])
def _qk_norm_rope_store_kernel(
    qkv,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    positions,
    slots,
    k_cache,
    v_cache,
    scales,
    token_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    HOW: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    # Heads are those of q, then those of k, then those of v.
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    # The two elements of a pair are rotated together: x1 holds one, x2 the other.
    pair = tl.arange(0, HALF)[None, :]
    in_half = pair < D // 2
    inside = (head < H + 2 * G) & in_half
    col1, col2 = columns_of_pairs(pair, D, R, INTERLEAVED)
    at = qkv + token * token_stride + head * D
    x1 = tl.load(at + col1, mask=inside, other=0.0)
    x2 = tl.load(at + col2, mask=inside, other=0.0)
    y1, y2 = x1.to(tl.float32), x2.to(tl.float32)
    if NORM:
        factor = head_norm_factor(x1, x2, D, eps)
        w1 = _head_weight(q_weight, k_weight, head < H, col1, in_half)
        w2 = _head_weight(q_weight, k_weight, head < H, col2, in_half)
        y1 = normed_elements(x1, factor, w1, ZERO_CENTERED)
        y2 = normed_elements(x2, factor, w2, ZERO_CENTERED)
    z1, z2 = y1.to(x1.dtype), y2.to(x1.dtype)
    if R > 0:
        angles = cos_sin + tl.load(positions + token) * R + pair
        cos = tl.load(angles, mask=pair < R // 2, other=1.0)
        sin = tl.load(angles + R // 2, mask=pair < R // 2, other=0.0)
        z1 = rotated_elements(y1, y2, cos, -sin).to(x1.dtype)
        z2 = rotated_elements(y2, y1, cos, sin).to(x1.dtype)
    if scales is None:
        rotates = inside & (head < H + G)
        tl.store(at + col1, z1, mask=rotates)
        tl.store(at + col2, z2, mask=rotates)
        if STORE:
            slot = tl.load(slots + token)
            if slot >= 0:
                k_at = k_cache + (slot * G + head - H) * D
                tl.store(k_at + col1, z1, mask=rotates & (head >= H))
                tl.store(k_at + col2, z2, mask=rotates & (head >= H))
                v_at = v_cache + (slot * G + head - H - G) * D
                tl.store(v_at + col1, x1, mask=inside & (head >= H + G))
                tl.store(v_at + col2, x2, mask=inside & (head >= H + G))
    else:
        tl.store(at + col1, z1, mask=inside & (head < H))
        tl.store(at + col2, z2, mask=inside & (head < H))
        if tl.program_id(1) * HEADS + HEADS > H:
            is_v = head >= H + G
            scale_kv = tl.where(is_v, tl.load(scales + 1), tl.load(scales))
            r1, c1 = encode_scaled(tl.where(is_v, x1, z1), scale_kv, HOW)
            r2, c2 = encode_scaled(tl.where(is_v, x2, z2), scale_kv, HOW)
            tl.store(at + col1, (r1 * scale_kv).to(x1.dtype), mask=inside & (head >= H))
            tl.store(at + col2, (r2 * scale_kv).to(x1.dtype), mask=inside & (head >= H))
            if STORE:
                slot = tl.load(slots + token)
                if slot >= 0:
                    k_at = k_cache + (slot * G + head - H) * D
                    tl.store(k_at + col1, c1, mask=inside & (head >= H) & (head < H + G))
                    tl.store(k_at + col2, c2, mask=inside & (head >= H) & (head < H + G))
                    v_at = v_cache + (slot * G + head - H - G) * D
                    tl.store(v_at + col1, c1, mask=inside & is_v)
                    tl.store(v_at + col2, c2, mask=inside & is_v)


@triton.jit
def columns_of_pairs(pair, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the columns of the first and the second elements of a head's pairs.

    The first R / 2 pairs are rotated. The others are not, and pair whatever columns are left.
    """
    if INTERLEAVED:
        col1 = tl.where(pair < R // 2, 2 * pair, pair + R // 2)
        col2 = tl.where(pair < R // 2, 2 * pair + 1, pair + D // 2)
    elif R == D:
        col1, col2 = pair, pair + D // 2
    else:
        col1 = tl.where(pair < R // 2, pair, pair + R // 2)
        col2 = tl.where(pair < R // 2, pair + R // 2, pair + D // 2)
    return col1, col2


@triton.jit
def head_norm_factor(x1, x2, D: tl.constexpr, eps):
    """Return what the norm multiplies each head by, given the two elements of its pairs."""
    y1, y2 = x1.to(tl.float32), x2.to(tl.float32)
    return tl.rsqrt((tl.sum(y1 * y1, axis=1) + tl.sum(y2 * y2, axis=1)) / D + eps)[:, None]


@triton.jit
def normed_elements(x, factor, weight, ZERO_CENTERED: tl.constexpr):
    """Norm elements of heads. The result is float32, but rounded to the dtype of x.

    Rounds after the factor and after the weight, as the twin does.
    """
    y, weight = x.to(tl.float32) * factor, weight.to(tl.float32)
    if ZERO_CENTERED:
        y *= 1.0 + weight
    else:
        y = y.to(x.dtype).to(tl.float32) * weight
    return y.to(x.dtype).to(tl.float32)


@triton.jit
def rotated_elements(y, other, cos, sin):
    """Rotate elements, given the `other` elements of their pairs, and -sin for first elements."""
    return y * cos + other * sin


@triton.jit
def encode_scaled(x, scale, HOW: tl.constexpr):
    """Round x / scale to FP8. Returns (rounded numbers, codes)."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return encode(x.to(tl.float32) * inverse, HOW)


@triton.jit
def _head_weight(q_weight, k_weight, is_q, col, inside):
    """Load the norm's weight for each head: that of q or that of k."""
    q = tl.load(q_weight + col, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_weight + col, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q, q, k)


def decode_inputs(rows: Tensor, state: BatchState) -> DecodeInputs:
    """Gather the inputs of a decode step, and count its tokens in the state's context_lens.

    rows: [B] int64, the batch slots that decode. The padding slot may occur more than once.
    """
    batch, width = rows.shape[0], state.block_tables.shape[1]
    token_ids, positions, slots = (torch.empty_like(rows) for _ in range(3))
    lens = torch.empty(batch, dtype=torch.int32, device=rows.device)
    tables = torch.empty(batch, width, dtype=torch.int32, device=rows.device)
    if batch:
        _decode_inputs_kernel[(batch,)](
            rows,
            state.last_tokens,
            state.context_lens,
            state.block_tables,
            token_ids,
            positions,
            slots,
            lens,
            tables,
            state.padding_slot,
            width,
            state.block_size,
            min(1024, next_power_of_2(width)),
            num_warps=1,
            **overlap(rows),
        )
    return DecodeInputs(token_ids, positions, slots, lens, tables)


@triton.jit
def _decode_inputs_kernel(
    rows,
    last_tokens,
    context_lens,
    block_tables,
    token_ids,
    positions,
    slots,
    lens,
    tables,
    scratch,
    W,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    i = tl.program_id(0)
    row = tl.load(rows + i)
    position = tl.load(context_lens + row)
    tl.store(token_ids + i, tl.maximum(tl.load(last_tokens + row), 0))  # an invalid token is -1
    tl.store(positions + i, position.to(tl.int64))
    tl.store(lens + i, position + 1)
    block = tl.load(block_tables + row * W + position // BLOCK_SIZE).to(tl.int64)
    is_real = row != scratch
    tl.store(slots + i, tl.where(is_real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    # Only the scratch row may occur twice. Its length is not counted, so no two programs write to
    # the same row.
    tl.store(context_lens + row, position + 1, mask=is_real)
    for start in range(0, W, BLOCK):
        col = start + tl.arange(0, BLOCK)
        entry = tl.load(block_tables + row * W + col, mask=col < W)
        tl.store(tables + i * W + col, entry, mask=col < W)


@triton.jit
def gated(gate, up, alpha, limit):
    """Compute swiglu or, if there is a limit, ClampedSwiGLU."""
    wide = gate.to(tl.float32)
    if limit is not None:
        wide = tl.minimum(wide, limit)
        wide_up = tl.minimum(tl.maximum(up.to(tl.float32), -limit), limit) + 1.0
        result = (wide / (1.0 + tl.exp(-alpha * wide)) * wide_up).to(gate.dtype)
    else:
        silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
        result = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    return result
