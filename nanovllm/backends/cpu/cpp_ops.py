"""Fused CPU kernels in C++ (cpp_ops.cpp), compiled for this machine at the first start.

The kernels compute products with weights, and what the plain layers RMSNorm, GatedMLP and
SelfAttention compute: in float32, and in bfloat16 where the processor has an instruction for its
products (AVX512_BF16).
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.backends.cpu.library_cache import load_library, open_cache
from nanovllm.layers.attention import AttentionOptions, KVCache, PagedKV

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ["-shared", "-fPIC", "-O3", "-march=native"]
# Let loops with exponentials and comparisons become vector code. Where these could lose NaN or an
# infinity, the code looks at the bits of floats. None of the flags lets the compiler reorder a sum,
# so the sums of a token are the same however many tokens a kernel takes at a time.
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffinite-math-only", "-fno-signed-zeros"]
# Tell only the compiler of -fopenmp, not the linker. Then no second OpenMP library is linked, and
# the kernels run on the threads of the one that PyTorch has loaded.
FLAGS += ["-Wp,-fopenmp", str(SOURCE)]
BFLOAT16_FLAGS = ["-DVALUES_IN_BFLOAT16", *FLAGS]

KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}
# The kinds of each kernel's arguments, in order, by the letters above.
ARGUMENTS = {
    "panel_width": "",
    "takes_float16": "",
    "linear": "ppppnnnn",
    "rms_norm": "pppnnf",
    "silu_and_mul": "ppnn",
    "qk_norm_rope_store": "ppppppppnnnnf",
    "decode_attention": "ppppppppnnnnnnnnff",
    "arg_max": "pppnn",
    "decode": "ppnpppppnnn",
}
# The dtypes of panels, by the number that C++ has for them.
PANEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def load() -> ctypes.CDLL | None:
    """Load the kernels; compile them first, in four seconds, unless an earlier start kept them.

    Returns None if there is no compiler, or if it fails.
    """
    return load_kernels(SOURCE, FLAGS, ARGUMENTS)


@cache
def load_bfloat16() -> ctypes.CDLL | None:
    """Load the kernels of models in bfloat16, as `load` does.

    Returns None, too, if the processor has no AVX512_BF16.
    """
    return load_kernels(SOURCE, BFLOAT16_FLAGS, ARGUMENTS) if has_avx512_bf16() else None


def has_avx512_bf16() -> bool:
    """Return whether the processor has an instruction for products of bfloat16."""
    # Older releases of PyTorch cannot tell.
    return getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


def kernels_of(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Load the kernels of models in this dtype. Returns None if there are none."""
    if dtype == torch.bfloat16:
        return load_bfloat16()
    return load() if dtype == torch.float32 else None


def load_kernels(source: Path, flags: list[str], arguments: dict[str, str]) -> ctypes.CDLL | None:
    """Load the kernels of a source, as `load` does.

    arguments: The kinds of each kernel's arguments, as in ARGUMENTS.
    """
    compiler = find_compiler()
    if compiler is None:
        return None
    command = [*compiler, *flags]
    name = file_name(command, source)
    loaded = None
    with open_cache() as cache:
        if cache and (library := cache.read(name)):
            with suppress(OSError):  # it was compiled where the C library is newer
                loaded = load_library(library)
        if loaded is None:
            try:
                library = compile_library(command)
                loaded = load_library(library)
            except (OSError, subprocess.SubprocessError):
                return None
            if cache:
                cache.keep(name, library)
    for name, kinds in arguments.items():
        getattr(loaded, name).argtypes = [KINDS[kind] for kind in kinds]
    return loaded


def find_compiler() -> list[str] | None:
    """Return the command that compiles C++: the variable CXX, else g++.

    CXX may hold options, as in make. Returns None if there is no such program.
    """
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # CXX has a quotation mark without its partner
        return None
    command = chosen or ["g++"]
    return command if shutil.which(command[0]) else None


def file_name(command: list[str], source: Path) -> str:
    """Return the file name of the library that `command` makes of a source here."""
    # Machines may share a home folder, but code of -march=native fits one CPU. So the CPU is part
    # of the name.
    parts = [source.read_bytes(), shlex.join(command).encode(), this_cpu().encode()]
    return f"{source.stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def this_cpu() -> str:
    """Describe this CPU so that CPUs for which compilers make different code differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # this is not Linux
        lines = []
    names = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({x for x in lines if x.startswith(names)}))


def compile_library(command: list[str]) -> bytes:
    """Compile the kernels and return the bytes of the library.

    Raises SubprocessError if the compiler fails, and OSError if it leaves no file.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "cpp_ops.so")
        command = [*command, "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return library.read_bytes()


def _call(name: str, x: Tensor, *args: Tensor | int | float | None) -> None:
    """Call the kernel of x's dtype."""
    call(kernels_of(x.dtype), name, x, *args)


def call(kernels: ctypes.CDLL | None, name: str, *args: Tensor | int | float | None) -> None:
    """Call a kernel. Tensors must be dense and are passed as pointers, None as a null pointer."""
    values = []
    for x in args:
        if isinstance(x, Tensor):
            assert x.is_contiguous()
            x = x.data_ptr()
        values.append(x)
    assert kernels is not None
    getattr(kernels, name)(*values)


def pack(weight: Tensor) -> Tensor | None:
    """Copy a weight [N, K] into the order in which `linear` reads it: panels [N / width, K, width].

    In bfloat16, pairs of inputs lie side by side: [N / width, ceil(K / 2), 2 width].
    The panels are in bfloat16 or float16 if that changes no number, as it changes none of a
    checkpoint in this dtype: a step of few tokens takes the time in which memory yields the
    weights. The kernels compute in float32 all the same. Returns None if the width of a panel does
    not divide N, or if K is odd in a model of bfloat16.
    """
    kernels = kernels_of(weight.dtype)
    assert kernels is not None
    width = kernels.panel_width()
    if len(weight) % width or weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
        return None
    if weight.dtype == torch.float32:
        for dtype in PANEL_DTYPES[1 : 3 if kernels.takes_float16() else 2]:
            halves = weight.to(dtype)
            if torch.equal(halves.float(), weight):
                weight = halves
                break
    panels = weight.unflatten(0, (-1, width)).transpose(1, 2)  # [N / width, K, width]
    if weight.dtype == torch.bfloat16:
        pairs = F.pad(panels, (0, 0, 0, weight.shape[1] % 2)).unflatten(1, (-1, 2))
        panels = pairs.transpose(2, 3).flatten(2)
    return panels.contiguous()


def linear(x: Tensor, panels: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + bias for packed weights: [..., K] -> [..., N]."""
    kernels = kernels_of(x.dtype)
    assert kernels is not None
    inputs = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], len(panels) * kernels.panel_width())
    sizes = x.numel() // inputs, inputs, out.shape[-1]
    kind = PANEL_DTYPES.index(panels.dtype)
    _call("linear", x.contiguous(), panels, bias, out, *sizes, kind)
    return out


def arg_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the place of the largest logit of each row, the first of equals, and its value.

    Rows [B, V] without a finite largest logit get the results that layers/sampler.py says.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64)
    values = logits.new_empty(len(logits))
    _call("arg_max", logits.contiguous(), tokens, values, *logits.shape)
    return tokens, values


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm each row by its root mean square: x [..., N], weight [N] -> [..., N]."""
    out = torch.empty_like(x)
    _call("rms_norm", x, weight, out, x.numel() // x.shape[-1], x.shape[-1], eps)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute silu(gate) * up, where a row of x holds gate and then up: [T, 2F] -> [T, F]."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _call("silu_and_mul", x, out, *out.shape)
    return out


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate q and k, and store k and v in the cache: qkv [T, (H + 2G) D] is overwritten.

    q and k are not normed where q_weight and k_weight are None. A cache in FP8 is left to
    `store_kv`. Returns views of qkv: q [T, H, D], k and v [T, G, D].
    """
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    stores = cache.k.numel() and cache.scales is None
    caches = (cache.k, cache.v) if stores else (None, None)
    sizes = qkv.shape[0], num_heads, num_kv_heads, head_dim
    _call(
        "qk_norm_rope_store",
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        slot_mapping,
        *caches,
        *sizes,
        eps,
    )
    return heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)


def decode_attention(q: Tensor, kv: PagedKV, options: AttentionOptions) -> Tensor:
    """Attend with one query a sequence to its cached tokens: q [B, H, D] -> [B, H, D]."""
    out = q.new_empty(q.shape)
    cache, tables = kv.cache, kv.block_tables
    block_size, num_kv_heads, head_dim = cache.k.shape[1:]
    if q.stride()[1:] != (head_dim, 1):
        q = q.contiguous()
    kernels = kernels_of(q.dtype)
    sizes = q.shape[0], q.stride(0), q.shape[1], num_kv_heads, head_dim, tables.shape[1], block_size
    how = options.window or 2**62, options.scale, options.softcap or 0.0
    tensors = cache.k, cache.v, cache.scales, kv.context_lens, tables, options.sinks, out
    call(kernels, "decode_attention", q.data_ptr(), *tensors, *sizes, *how)
    return out
