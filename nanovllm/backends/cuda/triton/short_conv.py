"""Triton kernels of short causal convolutions, with what stands around them in a layer.

The twins are `convolve_token` and `convolve_chunks` of layers/short_conv.py. In a Gated DeltaNet,
SiLU follows the convolution. In an LFM2, one gate multiplies the inputs, and another the outputs.
Arithmetic is float32, and results are rounded to the tensors' dtype wherever the twin rounds.

Shapes: T tokens, N prompt chunks, C channels, width K, R rows of state.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import cdiv, launch, overlap, wait_for_inputs
from nanovllm.backends.cuda.triton.prefill_attention import BLOCK_M, TiledPrefill
from nanovllm.layers.context import PrefillMetadata

TOKENS = 64  # of a block; TiledPrefill's tiles are the blocks of a graph's prompts
assert TOKENS == BLOCK_M


class ChunkBlocks(NamedTuple):
    """The prompt chunks of a step, cut into blocks of TOKENS tokens, as the kernels see them.

    In a launch, axis 0 counts blocks, and axis 2 chunks; or axis 0 counts the rows of `tiles`.
    """

    starts: Tensor  # [N + 1] int32, where each chunk starts among the tokens
    tiles: Tensor | None  # [blocks, 2] int32: each block's chunk, and its first token in the chunk
    most: int  # the size of axis 0
    chunks: int  # the size of axis 2

    @classmethod
    def of(cls, prefill: PrefillMetadata) -> "ChunkBlocks":
        """Cut the chunks of a step. Its tensors begin where `prefill.cu_seqlens_q` counts from."""
        starts = prefill.cu_seqlens_q
        if isinstance(prefill, TiledPrefill):
            return cls(starts, prefill.query_tiles, len(prefill.query_tiles), 1)
        return cls(starts, None, cdiv(prefill.max_seqlen_q, TOKENS), len(starts) - 1)


def convolve_token(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: Tensor,
    *,
    out: Tensor,
    silu: bool = False,
    gated: bool = False,
) -> None:
    """Convolve one token of each of B sequences, and shift it into their rows of the state.

    Args:
        x: [B, C], with any stride between its rows. If `gated`, [B, 3 C]: gates of the inputs,
            gates of the outputs, and inputs.
        weight: [C, K].
        bias: [C].
        state: [R, K - 1, C].
        rows: [B] int64. Only a row that no sequence has may occur more than once.
        out: [B, C], which receives the results.
        silu: whether SiLU follows the convolution.
    """
    channels, width = weight.shape
    if len(x):
        block = 256
        launch(
            _convolve_token_kernel,
            (cdiv(channels, block), len(x)),
            *(x, weight, bias, state, rows, out, x.stride(0), out.stride(0)),
            *(channels, width, block, silu, gated),
            num_warps=2,
            **overlap(x),
        )


@triton.jit(do_not_specialize=["rows"])
def _convolve_token_kernel(
    x,
    weight,
    bias,
    state,
    rows,
    out,
    x_stride,
    out_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    last_weight = tl.load(weight + channel * K + K - 1, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    token = tl.program_id(1).to(tl.int64)
    state += tl.load(rows + token) * (K - 1) * C
    x += token * x_stride
    new = _inputs(x, channel, inside, C, GATED)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K - 1):
        value = tl.load(state + j * C + channel, mask=inside, other=0.0)
        total += _weighted(value, weight, channel, inside, j, K)
        if j > 0:
            tl.store(state + (j - 1) * C + channel, value, mask=inside)
    tl.store(state + (K - 2) * C + channel, new, mask=inside)
    total += new.to(tl.float32) * last_weight
    result = _finished(total, new.dtype, x, bias, channel, inside, C, SILU, GATED)
    tl.store(out + token * out_stride + channel, result, mask=inside)


@triton.jit
def _inputs(x, channel, inside, C: tl.constexpr, GATED: tl.constexpr):
    """Load the inputs of the convolution."""
    if GATED:
        gate = tl.load(x + channel, mask=inside, other=0.0)
        value = tl.load(x + 2 * C + channel, mask=inside, other=0.0)
        value = (gate.to(tl.float32) * value.to(tl.float32)).to(value.dtype)
    else:
        value = tl.load(x + channel, mask=inside, other=0.0)
    return value


@triton.jit
def _weighted(value, weight, channel, inside, j: tl.constexpr, K: tl.constexpr):
    factor = tl.load(weight + channel * K + j, mask=inside, other=0.0)
    return value.to(tl.float32) * factor.to(tl.float32)


@triton.jit
def _finished(
    total,
    dtype: tl.constexpr,
    x,
    bias,
    channel,
    inside,
    C: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
):
    """Turn weighted sums into outputs."""
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    result = total.to(dtype)
    if SILU:
        wide = result.to(tl.float32)
        result = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    if GATED:
        gate = tl.load(x + C + channel, mask=inside, other=0.0)
        result = (gate.to(tl.float32) * result.to(tl.float32)).to(dtype)
    return result


def convolve_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: Tensor,
    blocks: ChunkBlocks,
    *,
    out: Tensor,
    silu: bool = False,
    gated: bool = False,
) -> None:
    """Convolve N chunks of sequences, and keep the last inputs of each in its row of the state.

    Only tokens of chunks are written. For the arguments see `convolve_token`; T takes B's place,
    and `rows` is [N].
    """
    channels, width = weight.shape
    assert width - 1 <= TOKENS, "a block reaches back into no other block but the one before it"
    if len(x):
        block = 64
        launch(
            _convolve_chunks_kernel,
            (blocks.most, cdiv(channels, block), blocks.chunks),
            *(x, weight, bias, state, rows, blocks.starts, blocks.tiles, out),
            *(x.stride(0), out.stride(0), channels, width, TOKENS, block, silu, gated),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["rows", "starts"])
def _convolve_chunks_kernel(
    x,
    weight,
    bias,
    state,
    rows,
    starts,
    tiles,
    out,
    x_stride,
    out_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
):
    chunk, first = block_of(tiles, TOKENS)
    begin = tl.load(starts + chunk)
    length = tl.load(starts + chunk + 1) - begin
    if first < length:
        channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
        token = (first + tl.arange(0, TOKENS))[:, None]
        x += begin.to(tl.int64) * x_stride
        state += tl.load(rows + chunk) * (K - 1) * C
        inside = (token < length) & (channel < C)
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for j in tl.static_range(K):
            at = token + (j - K + 1)
            value = _value_at(x, state, at, channel, inside, x_stride, C, K, GATED)
            total += _weighted(value, weight, channel, channel < C, j, K)
        x_at = x + token.to(tl.int64) * x_stride
        dtype: tl.constexpr = out.dtype.element_ty
        result = _finished(total, dtype, x_at, bias, channel, inside, C, SILU, GATED)
        tl.store(out + (begin + token).to(tl.int64) * out_stride + channel, result, mask=inside)
        # The program of a chunk's first block alone reads the state, so it may write it. Its
        # threads must have read all of it: they share rows.
        if first == 0:
            for j in tl.static_range(K - 1):
                last = length + (j - K + 1)
                kept = _value_at(x, state, last, channel, channel < C, x_stride, C, K, GATED)
                tl.debug_barrier()
                tl.store(state + j * C + channel, kept, mask=channel < C)


@triton.jit
def block_of(tiles, TOKENS: tl.constexpr):
    """Return a program's chunk, and the first token of its block in the chunk: see ChunkBlocks."""
    block = tl.program_id(0)
    if tiles is not None:
        chunk, first = tl.load(tiles + 2 * block), tl.load(tiles + 2 * block + 1)
    else:
        chunk, first = tl.program_id(2), block * TOKENS
    return chunk, first


@triton.jit
def _value_at(
    x, state, at, channel, inside, x_stride, C: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr
):
    """Load the inputs at places `at` of a chunk; those before place 0 lie in the state."""
    at = at + tl.zeros_like(channel)
    new = _inputs(x + at.to(tl.int64) * x_stride, channel, inside & (at >= 0), C, GATED)
    carried = state + (at + K - 1) * C + channel
    old = tl.load(carried, mask=inside & (at < 0), other=0.0)
    return tl.where(at >= 0, new, old.to(new.dtype))
