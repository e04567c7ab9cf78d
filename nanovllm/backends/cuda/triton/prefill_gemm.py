"""The gates' and ups' product of many rows, and the activation, in one kernel.

Knows that such a product is bound by arithmetic, and that its result is a prefill's largest tensor:
to read it again for the activation takes up to a quarter of the product's time. Here gates and ups
that belong together are one tile, and only what the activation makes of them is written. Each
program makes one tile after the other, and fetches the next one's inputs while it activates.
Shapes: M rows, K inputs, N outputs. Written for Hopper, as decode_gemm is.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    MAX_ROWS,
    TensorDescriptor,
    launch,
    num_processors,
)
from nanovllm.backends.cuda.triton.elementwise import activated

# A tile's rows, its gates and as many ups, and the inputs fetched at a time; and how many tiles
# below each other are made before those beside them, so that they share weights in the L2 cache. Of
# 21 kernels that were measured on an H200 (Triton 3.6) at 16,384 rows, this one alone took no more
# than 7 % longer than cuBLAS without the activation. Microseconds of cuBLAS alone, of it and the
# activation, of this: 307, 380 and 337 of K = 1,024 and N = 3,072; 4,783, 5,062 and 4,878 of K =
# 4,096 and N = 12,288.
BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
COLUMN = 8
# Tiles a multiprocessor, at least. With fewer, too many idle while the last ones are made. Of 6
# shapes and 11 numbers of rows on an H200, what this chooses is 0.3 % slower than the faster way on
# average, and 7 % at worst.
MIN_TILES = 2.5


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether this is the fastest way there is to compute the product."""
    rows, outputs = x.shape[0], weight.shape[0] // 2
    tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(outputs, BLOCK_N)
    is_much = rows > MAX_ROWS and tiles >= MIN_TILES * num_processors(x.device)
    return is_much and is_able(x, weight)


def is_able(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can compute it, were the rows enough. Tiles need rows of whole 16 bytes.

    Newer devices than Hopper were not measured, and are left to cuBLAS.
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


@lru_cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def gated_linear(x: Tensor, weight: Tensor, gelu: bool = False) -> Tensor:
    """silu, or gelu, of x @ gate.T, times x @ up.T: -> [M, N].

    weight [2 N, K] holds gate and then up.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    outputs //= 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(outputs, BLOCK_N)
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
    # The number of rows comes with the tiles: as an argument, `launch` would tell each apart.
    tiles_m, tiles_n = tl.cdiv(x_tiles.shape[0], BLOCK_M), tl.cdiv(N, BLOCK_N)
    # `flatten` makes one loop of both, so that fetching goes on from tile to tile.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        m, n = _place(tile, tiles_m, tiles_n, COLUMN)
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            inputs = x_tiles.load([m * BLOCK_M, k])
            weights = w_tiles.load([0, n * BLOCK_N, k]).reshape(2 * BLOCK_N, BLOCK_K)
            acc = tl.dot(inputs, weights.T, acc)
        gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        # Round where the product and the activation would, were they apart.
        dtype = out.dtype.element_ty
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        active = activated(gate, GELU).to(dtype).to(tl.float32)
        out_tiles.store([m * BLOCK_M, n * BLOCK_N], (active * up).to(dtype))


@triton.jit
def _place(tile, tiles_m, tiles_n, COLUMN: tl.constexpr):
    """Tiles go down a column of COLUMN, then to the next one of the same rows."""
    band = tile // (COLUMN * tiles_n)
    first = band * COLUMN
    height = tl.minimum(tiles_m - first, COLUMN)
    inside = tile % (COLUMN * tiles_n)
    return first + inside % height, inside // height
