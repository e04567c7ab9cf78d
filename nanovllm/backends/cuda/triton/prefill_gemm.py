"""The product of many rows with gate and up weights, and the activation, in one kernel.

The time of such a product is that of its arithmetic. Its result is a prefill's largest tensor: a
separate activation kernel, which reads that tensor again, takes up to a quarter of the product's
time. In this kernel a tile holds gates and the ups that belong to them, and only their activated
product is written. Each program computes one tile after the other, and fetches the inputs of the
next tile during the activation. Written for Hopper, as decode_gemm is.

Shapes: M rows, K inputs, N outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    MAX_ROWS,
    TensorDescriptor,
    cdiv,
    is_hopper,
    launch,
    num_processors,
)
from nanovllm.backends.cuda.triton.elementwise import activated

# BLOCK_M rows and BLOCK_N gates, with as many ups, are a tile; BLOCK_K inputs are fetched at a
# time. COLUMN tiles below each other are computed before those beside them, so that they share
# weights in the L2 cache. Of 21 kernels that were measured on an H200 (Triton 3.6) at 16,384 rows,
# only this one took at most 7 % longer than cuBLAS without the activation. Microseconds of cuBLAS
# alone, of cuBLAS and the activation, and of this kernel: 307, 380 and 337 for K = 1,024 and N =
# 3,072; 4,783, 5,062 and 4,878 for K = 4,096 and N = 12,288.
BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
COLUMN = 8
# The least number of tiles a multiprocessor for which this kernel is used. With fewer, too many
# multiprocessors idle while the last tiles are computed. For 6 shapes and 11 numbers of rows on an
# H200, the choice by this limit is 0.3 % slower than the faster way on average, and 7 % at worst.
MIN_TILES = 2.5


def suits(x: Tensor, weight: Tensor) -> bool:
    """Tell whether this kernel is the fastest way to compute the product."""
    rows, outputs = x.shape[0], weight.shape[0] // 2
    tiles = cdiv(rows, BLOCK_M) * cdiv(outputs, BLOCK_N)
    is_much = rows > MAX_ROWS and tiles >= MIN_TILES * num_processors(x.device)
    return is_much and is_able(x, weight)


def is_able(x: Tensor, weight: Tensor) -> bool:
    """Tell whether the kernel can compute the product, for any number of rows.

    The accelerator needs rows of a multiple of 16 bytes. Devices newer than Hopper were not
    measured: cuBLAS serves them.
    """
    return (
        TensorDescriptor is not None
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % BLOCK_K == 0
        and weight.shape[0] // 2 % 8 == 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and is_hopper(x.device)
    )


def gated_linear(x: Tensor, weight: Tensor, gelu: bool = False) -> Tensor:
    """Compute silu(x @ gate.T) * (x @ up.T), or with gelu: x [M, K] -> [M, N].

    weight [2 N, K] consists of gate and then up.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    outputs //= 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tiles = cdiv(rows, BLOCK_M) * cdiv(outputs, BLOCK_N)
    pairs = weight.view(2, outputs, inputs)
    launch(
        _gated_linear_kernel,
        (min(tiles, num_processors(x.device)),),
        out,
        TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K]),
        TensorDescriptor.from_tensor(pairs, [2, BLOCK_N, BLOCK_K]),
        TensorDescriptor.from_tensor(out, [BLOCK_M, BLOCK_N]),
        *(outputs, inputs, BLOCK_M, BLOCK_N, BLOCK_K, COLUMN, gelu),
        num_warps=8,
        num_stages=3,
    )
    return out


@triton.jit
def _gated_linear_kernel(
    out,
    x_tiles,
    w_tiles,
    out_tiles,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMN: tl.constexpr,
    GELU: tl.constexpr,
):
    # The descriptor of x has the number of rows. As an argument of its own, each number would be
    # another launch to `launch`.
    tiles_m, tiles_n = tl.cdiv(x_tiles.shape[0], BLOCK_M), tl.cdiv(N, BLOCK_N)
    # `flatten` merges both loops into one, so that fetching goes on from tile to tile.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        m, n = place(tile, tiles_m, tiles_n, COLUMN)
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            inputs = x_tiles.load([m * BLOCK_M, k])
            weights = w_tiles.load([0, n * BLOCK_N, k]).reshape(2 * BLOCK_N, BLOCK_K)
            acc = tl.dot(inputs, weights.T, acc)
        gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        # Round where separate kernels for the product and the activation would round.
        dtype = out.dtype.element_ty
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        active = activated(gate, GELU).to(dtype).to(tl.float32)
        out_tiles.store([m * BLOCK_M, n * BLOCK_N], (active * up).to(dtype))


@triton.jit
def place(tile, tiles_m, tiles_n, COLUMN: tl.constexpr):
    """Return the row and column of a tile, by its number.

    Numbers go down a column of COLUMN tiles, then down the next column of the same rows, so that
    programs that run at the same time share inputs and weights in the L2 cache.
    """
    band = tile // (COLUMN * tiles_n)
    first = band * COLUMN
    height = tl.minimum(tiles_m - first, COLUMN)
    inside = tile % (COLUMN * tiles_n)
    return first + inside % height, inside // height
