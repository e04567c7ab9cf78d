"""Fused CPU kernels in C++ (cpp_ops.cpp), compiled for this machine when first asked for; float32.

Their signatures are those of the twins in reference.py and torch_attention.py.
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

__all__ = ["add_rms_norm", "decode_attention", "decode_inputs", "qk_norm_rope_store", "rms_norm", "silu_and_mul"]

# What lets loops with sums, exponentials and comparisons become vector code; they meet no NaN, infinity or trap.
FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffinite-math-only"]
FLAGS += ["-fno-signed-zeros", "-fassociative-math", "-shared", "-fPIC"]

KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}
ARGUMENTS = {
    "rms_norm": "ppppnnf",
    "silu_and_mul": "ppnn",
    "qk_norm_rope_store": "ppppppppnnnnf",
    "decode_inputs": "pppppppppnnnn",
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
    """Compile and load. It takes half a second, so nothing is kept on disk. Raises ValueError if it cannot be done."""
    compiler = find_compiler()
    if compiler is None:
        chosen = os.environ.get("CXX")
        why = f"CXX is {chosen!r}, which names no program" if chosen else "there is no C++ compiler"
        raise ValueError(f"cpp_kernels is True, but {why}: install g++, set CXX, or use False")
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "cpp_ops.so")
        command = [*compiler, *FLAGS, str(Path(__file__).with_suffix(".cpp")), "-o", library]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise ValueError(f"cpp_kernels is True, but {' '.join(command)} fails: set CXX, or use False\n{run.stderr}")
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
    _call("rms_norm", x, None, weight, out, x.numel() // x.shape[-1], x.shape[-1], eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _call("rms_norm", x, residual, weight, x, x.shape[0], x.shape[1], eps)
    return x, residual


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
    _call("qk_norm_rope_store", qkv, q_weight, k_weight, cos_sin, positions, slots, *caches, *sizes, eps)
    return heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)


def decode_inputs(
    rows: Tensor, last_tokens: Tensor, context_lens: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    token_ids, positions, slots = (torch.empty_like(rows) for _ in range(3))
    lens = torch.empty(len(rows), dtype=torch.int32)
    tables = torch.empty(len(rows), block_tables.shape[1], dtype=torch.int32)
    state, inputs = (rows, last_tokens, context_lens, block_tables), (token_ids, positions, slots, lens, tables)
    _call("decode_inputs", *state, *inputs, len(rows), *block_tables.shape, block_size)
    return inputs


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lens: Tensor,
    tables: Tensor,
    scale: float,
    shared: Tensor | None = None,
) -> Tensor:
    out = q.new_empty(q.shape)
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    sizes = q.shape[0], q.stride(0), q.shape[1], num_kv_heads, head_dim, tables.shape[1], block_size
    assert q.stride()[1:] == (head_dim, 1)
    _call("decode_attention", q.data_ptr(), k_cache, v_cache, lens, tables, out, *sizes, scale)
    return out
