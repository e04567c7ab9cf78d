"""Functions that several kernels in Gluon share.

Gluon is the part of Triton in which a kernel says which thread holds what.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.9 has other names for these two than 3.6.
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def run(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(
        INSTRUCTION + " mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def in_threads(sums):
    """View sums [16 W, N] of W warps as [N // 8, threads, 4]: what a thread holds."""
    WARPS: gl.constexpr = sums.shape[0] // 16
    N: gl.constexpr = sums.shape[1]
    sums = sums.reshape([WARPS, 2, 8, N // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return sums.reshape([N // 8, 32 * WARPS, 4])


@gluon.jit
def from_threads(sums):
    """Undo in_threads: view [N // 8, threads, 4] as sums [16 W, N] of W warps."""
    WARPS: gl.constexpr = sums.shape[1] // 32
    N: gl.constexpr = sums.shape[0] * 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    sums = sums.reshape([N // 8, WARPS, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(sums.reshape([16 * WARPS, N]), MMA, assert_trivial=True)


@gluon.jit
def part_places(sums, part, parts, BLOCK: gl.constexpr):
    """Return the places in memory of a part's numbers: [N // 8, threads, 4].

    The parts of a block of BLOCK outputs follow each other, then those of the next block.
    """
    P: gl.constexpr = sums.type.layout
    THREADS: gl.constexpr = sums.shape[1]
    i = gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, P)))
    t = gl.arange(0, THREADS, layout=gl.SliceLayout(0, gl.SliceLayout(2, P)))
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, P)))
    EIGHTS: gl.constexpr = BLOCK // 8
    i = ((i // EIGHTS * parts + part) * EIGHTS + i % EIGHTS) * (4 * THREADS)
    place = gl.expand_dims(i, 1) + gl.expand_dims(4 * t, 0)
    return gl.expand_dims(place, 2) + gl.expand_dims(gl.expand_dims(j, 0), 1)
