"""Linear layers of one row whose weights are in FP8, as fast as the memory can deliver them.

As in gemv.py, each program asks for all of its weights before its inputs are ready. Codes become
float16, which holds them without loss, then products are added up in float32, so the result is more
precise than that of Hopper's tensor cores for FP8.

Shapes: K inputs, N outputs, W words of four codes in a row, G groups of inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton import e4m3
from nanovllm.backends.cuda.triton.dispatch import cdiv, next_power_of_2, overlap, wait_for_inputs
from nanovllm.backends.cuda.triton.fp8_inputs import Fp8Matrix, Rows

# Measured for the shapes of 8B on an H200: programs of one row took 6 to 30 % longer, those of four
# rows 2 to 20 %.
BLOCK_N = 2
WORDS_OF_PART = 1024  # words of a row that a program's threads load side by side


def suits(x: Rows, matrix: Fp8Matrix) -> bool:
    """Tell whether there is a single row, and the kernel knows the sizes."""
    inputs = matrix.codes.shape[1]
    return (
        len(x) == 1
        and x.codes.dtype != torch.float32
        and inputs % 16 == 0
        and inputs <= 16384
        and matrix.group % 16 == 0
        and matrix.codes.is_contiguous()
    )


def linear(
    x: Rows,
    matrix: Fp8Matrix,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute x @ weight.T + bias, where `suits` holds: x [1, K], bias [N] -> [1, N].

    No running kernel may write to the weights.
    """
    outputs, inputs = matrix.codes.shape
    out = torch.empty(1, outputs, dtype=dtype, device=matrix.codes.device)
    words = inputs // 4
    is_fp8 = x.codes.dtype == torch.float8_e4m3fn
    _gemv_kernel[(cdiv(outputs, BLOCK_N),)](
        x.codes.view(torch.int32) if is_fp8 else x.codes,
        x.scales,
        matrix.codes.view(torch.int32),
        *(matrix.scales, bias, out, outputs),
        *(words, matrix.scales.shape[1], matrix.group, matrix.block_rows),
        x.scales is not None and len(x.scales) > 1,
        *(BLOCK_N, min(WORDS_OF_PART, next_power_of_2(words))),
        e4m3.how_to_decode(out.device),
        num_warps=4,
        **overlap(out),
    )
    return out


@triton.jit
def _gemv_kernel(
    x,
    x_scales,
    weight,
    w_scales,
    bias,
    out,
    N,
    W: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    X_GROUPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    HOW: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = PART // 4  # a thread loads four words at once
    PARTS: tl.constexpr = (W + PART - 1) // PART
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(own, N - 1)
    rows = weight + n.to(tl.int64)[:, None] * W
    at = tl.arange(0, PART)
    chunk = tl.arange(0, CHUNKS)
    # Ask for all weights before the inputs are ready, so that the memory is never idle.
    words = ()
    for part in tl.static_range(PARTS):
        loaded = _words_at(rows, (part * PART + at)[None, :], W, part * PART + PART > W)
        words += (loaded,)  # type: ignore[assignment]
    if G > 1:
        scales = ()
        # Rows of a block share scales: read those of its first row, which the cache has already.
        first = n // BLOCK_ROWS * BLOCK_ROWS
        for part in tl.static_range(PARTS):
            group = tl.minimum((part * CHUNKS + chunk) * 16 // GROUP, G - 1)
            loaded = tl.load(w_scales + first[:, None] * G + group[None, :])
            scales += (loaded,)  # type: ignore[assignment]
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    for part in tl.static_range(PARTS):
        a, b, c, d = _inputs_at(x, part * PART + at, W, part * PART + PART > W, HOW)
        p, q, r, s = e4m3.from_words(words[part], HOW)
        sums = p.to(tl.float32) * a[None, :]
        sums += q.to(tl.float32) * b[None, :]
        sums += r.to(tl.float32) * c[None, :]
        sums += s.to(tl.float32) * d[None, :]
        sums = tl.sum(sums.reshape(BLOCK_N, CHUNKS, 4), axis=2)
        if G > 1:
            sums *= scales[part]
        if X_GROUPED:
            group = tl.minimum((part * CHUNKS + chunk) * 16 // GROUP, G - 1)
            sums *= tl.load(x_scales + group)[None, :]
        total += sums
    result = tl.sum(total, axis=1)
    if G == 1:
        result *= tl.load(w_scales + n)
    if x_scales is not None and not X_GROUPED:
        result *= tl.load(x_scales)
    if bias is not None:
        result += tl.load(bias + n).to(tl.float32)
    tl.store(out + own, result.to(out.dtype.element_ty), mask=own < N)


@triton.jit
def _words_at(rows, at, W: tl.constexpr, MASKED: tl.constexpr):
    """Load words of rows."""
    return tl.load(rows + at, mask=at < W, other=0) if MASKED else tl.load(rows + at)


@triton.jit
def _inputs_at(x, at, W: tl.constexpr, MASKED: tl.constexpr, HOW: tl.constexpr):
    """Load the inputs that belong to words: the first of all words, the second, ..."""
    if x.dtype.element_ty == tl.int32:
        a, b, c, d = e4m3.from_words(_words_at(x, at, W, MASKED), HOW)
    else:
        fours = _words_at(x.to(tl.pointer_type(tl.int64)), at, W, MASKED)
        a = fours.to(tl.int16).to(x.dtype.element_ty, bitcast=True)
        b = (fours >> 16).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
        c = (fours >> 32).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
        d = (fours >> 48).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
