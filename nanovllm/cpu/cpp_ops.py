"""Fused CPU kernels in C++ (cpp_ops.cpp), compiled for this machine when first asked for; float32.

What they compute is said by the plain layers: RMSNorm, GatedMLP and SelfAttention.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# What lets loops with sums, exponentials and comparisons become vector code; they meet no NaN,
# infinity or trap.
FLAGS = [
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffinite-math-only",
]
FLAGS += ["-fno-signed-zeros", "-fassociative-math", "-shared", "-fPIC"]

KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}
ARGUMENTS = {
    "rms_norm": "pppnnf",
    "silu_and_mul": "ppnn",
    "qk_norm_rope_store": "ppppppppnnnnf",
    "decode_attention": "ppppppnnnnnnnf",
}


def find_compiler() -> list[str] | None:
    """The command that compiles C++: CXX, which may hold options as in make, else g++ or clang++.

    None if there is no such program.
    """
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation mark without its partner
        return None
    commands = [chosen] if chosen else [["g++"], ["clang++"]]
    return next((command for command in commands if shutil.which(command[0])), None)


@cache
def load() -> ctypes.CDLL:
    """Compile and load. It takes half a second, so nothing is kept on disk.

    Raises ValueError if it cannot be done.
    """
    compiler = find_compiler()
    if compiler is None:
        chosen = os.environ.get("CXX")
        why = f"CXX is {chosen!r}, which names no program" if chosen else "there is no C++ compiler"
        raise ValueError(f"kernels is 'cpp', but {why}: install g++, set CXX, or use 'auto'")
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "cpp_ops.so")
        command = [*compiler, *FLAGS, str(Path(__file__).with_suffix(".cpp")), "-o", library]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise ValueError(
                f"kernels is 'cpp', but {' '.join(command)} fails: set CXX, or use "
                f"'auto'\n{run.stderr}"
            )
        loaded = ctypes.CDLL(library)
    for name, kinds in ARGUMENTS.items():
        getattr(loaded, name).argtypes = [KINDS[kind] for kind in kinds]
    return loaded


def _call(name: str, *args: Tensor | int | float | None) -> None:
    """Tensors, all dense, go as pointers, None as a null pointer."""
    values = []
    for x in args:
        if isinstance(x, Tensor):
            assert x.is_contiguous()
            x = x.data_ptr()
        values.append(x)
    getattr(load(), name)(*values)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _call("rms_norm", x, weight, out, x.numel() // x.shape[-1], x.shape[-1], eps)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _call("silu_and_mul", x, out, *out.shape)
    return out


def qk_norm_rope_store(
    qkv: Tensor,
    head_dim: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    caches = (k_cache, v_cache) if k_cache.numel() else (None, None)
    sizes = qkv.shape[0], num_heads, num_kv_heads, head_dim
    _call(
        "qk_norm_rope_store",
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        slots,
        *caches,
        *sizes,
        eps,
    )
    return heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lens: Tensor,
    tables: Tensor,
    scale: float,
) -> Tensor:
    out = q.new_empty(q.shape)
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    sizes = q.shape[0], q.stride(0), q.shape[1], num_kv_heads, head_dim, tables.shape[1], block_size
    assert q.stride()[1:] == (head_dim, 1)
    _call("decode_attention", q.data_ptr(), k_cache, v_cache, lens, tables, out, *sizes, scale)
    return out
