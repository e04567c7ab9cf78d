"""The gated product of a few rows in a small model, on Hopper: programs fetch all weights at once.

A decode step of few rows waits for the weights. Here a program asks for all of its weights at once,
before the kernel that computes the inputs has ended. 32 gates and 32 ups are the rows of a tensor
core's operand, which it reads from shared memory; the rows of x are its columns.

The default and batch_invariant use it: the sums are those of invariant_linear.py, to the bit. With
one row, 1,024 inputs and 3,072 outputs on an H200 (torch 2.11, Triton 3.6) the product takes 4.3
us, and 9.8 us by the kernel there.

Shapes: M rows, K inputs, N outputs.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.backends.cuda.triton.dispatch import cdiv, is_hopper, next_power_of_2, overlap
from nanovllm.backends.cuda.triton.gluon_common import fetch, run

ROWS = 32  # of x, at most
OUTPUTS = 32  # of a program
COLUMNS = 64  # of a tile in shared memory: 128 bytes a row
SHARED_MEMORY = 200_000  # bytes that the tiles of a program may fill


def takes(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `gated_linear` takes x [M, K] and weight [2 N, K]."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return False
    rows, inputs = x.shape
    tiles = (2 * OUTPUTS + rows_of_tile(rows)) * inputs * x.element_size()
    fits = 0 < rows <= ROWS and inputs % COLUMNS == 0 and tiles <= SHARED_MEMORY
    aligned = (x.data_ptr() | weight.data_ptr()) % 16 == 0
    return fits and aligned and x.is_contiguous() and weight.is_contiguous() and is_hopper(x.device)


def rows_of_tile(rows: int) -> int:
    return max(8, next_power_of_2(rows))


def gated_linear(x: Tensor, weight: Tensor, gelu: bool = False) -> Tensor:
    """Compute silu(gates) * ups, or gelu(gates) * ups by tanh: x [M, K] -> [M, N].

    weight [2 N, K] yields gates first, then ups: x @ weight.T. No running kernel may write to the
    weights.
    """
    rows, inputs = x.shape
    outputs = len(weight) // 2
    block_m = rows_of_tile(rows)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    layouts = [gl.NVMMASharedLayout(128, 16, rank) for rank in (2, 3)]
    matrices = weight.view(2, outputs, inputs)
    _whole_gated_kernel[(cdiv(outputs, OUTPUTS),)](
        out,
        TensorDescriptor.from_tensor(x, [block_m, COLUMNS], layouts[0]),
        TensorDescriptor.from_tensor(matrices, [2, OUTPUTS, COLUMNS], layouts[1]),
        *(rows, outputs, inputs // COLUMNS, block_m, OUTPUTS, COLUMNS, gelu),
        num_warps=4,
        **overlap(x),
    )
    return out


@gluon.jit(do_not_specialize=["M"])
def _whole_gated_kernel(
    out,
    x_tiles,
    w_tiles,
    M,
    N,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GELU: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = out.dtype.element_ty
    if PDL:
        run("griddepcontrol.launch_dependents;")
    weights = gl.allocate_shared_memory(dtype, [STEPS, 2, BLOCK_N, BLOCK_K], w_tiles.layout)
    inputs = gl.allocate_shared_memory(dtype, [STEPS, BLOCK_M, BLOCK_K], x_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    first = gl.program_id(0) * BLOCK_N
    mbarrier.expect(ready.index(0), STEPS * w_tiles.block_type.nbytes)
    for step in range(STEPS):
        fetch(w_tiles, [0, first, step * BLOCK_K], ready.index(0), weights.index(step))
    mbarrier.expect(ready.index(1), STEPS * x_tiles.block_type.nbytes)
    if PDL:
        run("griddepcontrol.wait;")
    for step in range(STEPS):
        fetch(x_tiles, [0, step * BLOCK_K], ready.index(1), inputs.index(step))
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    acc = gl.zeros([2 * BLOCK_N, BLOCK_M], gl.float32, ACC)
    mbarrier.wait(ready.index(0), 0)
    mbarrier.wait(ready.index(1), 0)
    for step in gl.static_range(STEPS):
        rows = weights.index(step).reshape([2 * BLOCK_N, BLOCK_K])
        acc = warpgroup_mma(rows, inputs.index(step).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    PAIRS: gl.constexpr = gl.BlockedLayout([1, BLOCK_M // 4, 2], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    pairs = acc.reshape([2, BLOCK_N, BLOCK_M]).permute([1, 2, 0])
    gate, up = gl.split(gl.convert_layout(pairs, PAIRS))
    # Round as separate kernels would.
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + gl.exp(-slope))
    result = (active.to(dtype).to(gl.float32) * up).to(dtype)
    LAYOUT: gl.constexpr = result.type.layout
    col = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))
    inside = (row < M)[None, :] & (col < N)[:, None]
    gl.store(out + row[None, :] * N + col[:, None], result, mask=inside)
