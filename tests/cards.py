"""Compile every Triton kernel for GPUs that need not be there, in the variants and with the tiles
that the code chooses on them, and say what each takes.

Run as a script, without TRITON_INTERPRET, it prints a table, and fails if a kernel does not fit a
card. `--cards 86 90` compiles for these alone, `--cases "prefill.*256"` only cases of such names.
"""

import argparse
import ast
import contextlib
import gc
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nanovllm.backends.cuda import products
from nanovllm.backends.cuda.triton import (
    allreduce_norm,
    decode_attention,
    dispatch,
    elementwise,
    fp8_inputs,
    fp8_linear,
    gated_delta,
    invariant_attention,
    invariant_linear,
    moe,
    moe_packed,
    packed_linear,
    prefill_attention,
    resampler,
    router,
    sampler,
    short_conv,
    woven_experts,
)
from nanovllm.backends.cuda.triton.gated_delta import DeltaInputs
from nanovllm.backends.cuda.triton.short_conv import ChunkBlocks
from nanovllm.backends.cuda.triton.unnormed import Stream, Unnormed
from nanovllm.engine.batch_state import BatchState
from nanovllm.engine.model_runner import StepOutput
from nanovllm.layers.attention import AttentionOptions, KVCache, PackedKV, PagedKV
from nanovllm.layers.context import PrefillMetadata
from nanovllm.layers.moe import ClampedSwiGLU

# The shared memory that a program may take, by NVIDIA's programming guide, and the multiprocessors
# of one such card: A100, RTX 3090, L4, H200, B200, RTX 5090.
KB = 1024
CARDS = {
    80: dispatch.GPU((8, 0), 108, 163 * KB),
    86: dispatch.GPU((8, 6), 82, 99 * KB),
    89: dispatch.GPU((8, 9), 58, 99 * KB),
    90: dispatch.GPU((9, 0), 132, 227 * KB),
    100: dispatch.GPU((10, 0), 148, 227 * KB),
    120: dispatch.GPU((12, 0), 170, 99 * KB),
}
# The bytes that a thread may spill in kernels of prompts. In decode steps, it may spill none.
MAX_SPILLS = 32
# On Hopper, these kernels keep the tiles that were chosen on an H200 or an H100, and spill up to so
# many bytes (Triton 3.6; with 3.9 they spill more, and so do a few other kernels).
SPILLS_ON_HOPPER = {
    ("prefix_attention.prefix_kernel", "heads of 256"): 320,
    ("resampler._resample_kernel", ""): 64,
    # It loads all tensors of a block at once, beside the state and its two parts.
    ("gated_delta._pass_over_blocks_kernel", ""): 324,
}
# float16 takes what bfloat16 takes, but for other instructions: it gets fewer cases, on one card
# that multiplies as RTX cards do, and on one that multiplies as data centers' do.
FOR_FLOAT16 = (86, 90)
FLOAT16 = (
    r"(decode 64|decode 512|decode 16 shared prefix|prefill short|prefill cached|prefill graph"
    r"|prefill page 16), heads|skinny 1 4096 4096|decode 64 1024|gated 64 2048|prefill gated$"
    r"|decode (gated )?16 (1024|4096|6144|24576)"
    r"|(decode 64|prefill 4096) of 128|norms 4096|rotation 128$|sample 64|sum of 2"
)
# Triton 3.6 writes the same PTX for sm_80 as for sm_86: it did so for all 236 variants that both
# launch. ptxas makes other code of it. Triton 3.9 does not write the same.
SAME_PTX_ON_80 = triton.__version__.startswith("3.6.")
META = torch.device("meta")
Variant = tuple[str, str]  # a kernel, and Triton's key: it compiles the kernel anew for each


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class Compiled(NamedTuple):
    """What a kernel takes on a card."""

    kernel: str  # with its module
    case: str  # its name says what kernels it is for: those of decode steps, or of prompts
    card: int
    shared: int  # bytes
    registers: int  # of a thread
    spills: int  # bytes of a thread

    @property
    def may_spill(self) -> int:
        """The bytes that a thread may spill."""
        for (kernel, part), most in SPILLS_ON_HOPPER.items():
            if self.card == 90 and kernel == self.kernel and part in self.case:
                return most
        return MAX_SPILLS if self.case.startswith("prefill") else 0

    @property
    def fault(self) -> str:
        """What does not fit; "" if all does."""
        if self.shared > CARDS[self.card].shared_memory:
            return "SHARED MEMORY"
        return "SPILLS" if self.spills > self.may_spill else ""

    def __str__(self) -> str:
        numbers = f"{self.shared / KB:6.1f} KB {self.registers:4} {self.spills:5}"
        return f"{self.kernel:38} {self.case:42} sm_{self.card:<4} {numbers} {self.fault}".rstrip()


def new_cache(page: int, groups: int, head_dim: int, dtype: torch.dtype, fp8: bool) -> KVCache:
    """Make the KV cache of a layer."""
    k, v = (new(64, page, groups, head_dim, dtype=torch.uint8 if fp8 else dtype) for _ in range(2))
    return KVCache(k, v, new(2, dtype=torch.float32) if fp8 else None)


def attention_cases(dtype: torch.dtype, head_dim: int) -> Iterator[tuple[str, Callable]]:
    """Yield cases of attention: their names, and functions that launch their kernels."""
    heads, groups = {64: (16, 2), 128: (32, 8), 256: (8, 4)}[head_dim]
    plain = AttentionOptions(0.1)
    full = AttentionOptions(0.1, softcap=50.0, sinks=new(heads, dtype=dtype), window=1024)

    def paged(rows: int, page: int = 256, fp8: bool = False) -> PagedKV:
        cache = new_cache(page, groups, head_dim, dtype, fp8)
        tables, lens = (new(*shape, dtype=torch.int32) for shape in ((rows, 4096 // page), (rows,)))
        return PagedKV(cache, tables, lens)

    def room(rows):
        width = heads * head_dim
        codes = new(128, width, dtype=torch.uint8)
        scales = new(128, heads, dtype=torch.float32)
        matrix = fp8_inputs.Fp8Matrix(
            codes, scales, head_dim, 128, "group", block_scales=scales[:1]
        )
        return fp8_inputs.empty_rows(rows, width, matrix)

    def decode(rows, options, page=256, shared=False, fp8=False, to_fp8=False):
        prefix = new(1, dtype=torch.int32) if shared else None
        decode_attention.decode_attention(
            new(rows, heads, head_dim, dtype=dtype),
            paged(rows, page, fp8),
            options,
            shared_prefix_len=prefix,
            out=room(rows) if to_fp8 else None,
        )

    def prefill(tokens, options, kv, tiled=False):
        ends = new(2, dtype=torch.int32)
        tables = kv.block_tables if isinstance(kv, PagedKV) else None
        meta = PrefillMetadata(ends, ends, tokens, tokens, tables)
        if tiled:
            tiles = new(8, 2, dtype=torch.int32)
            meta = prefill_attention.TiledPrefill(ends, ends, 0, 0, tables, tiles)
        q = new(tokens, heads, head_dim, dtype=dtype)
        prefill_attention.prefill_attention(q, kv, meta, options)

    def packed(tokens: int) -> PackedKV:
        return PackedKV(*(new(tokens, groups, head_dim, dtype=dtype) for _ in range(2)))

    def decode_qkv(
        rows, normed, turning, interleaved=False, fp8=False, options=plain, to_fp8=False
    ):
        weight = new(head_dim, dtype=dtype) if normed else None
        ints = new(rows, dtype=torch.int64)
        cos_sin = new(4096, turning, dtype=torch.float32)
        how = decode_attention.NormRopeStore(
            *(weight, weight, 1e-6, cos_sin, ints, ints),
            zero_centered=turning < head_dim,
            interleaved=interleaved,
        )
        kv = paged(rows, fp8=fp8)
        if decode_attention.takes_qkv(rows, heads // groups, kv.cache, how):
            qkv = new(rows, (heads + 2 * groups) * head_dim, dtype=dtype)
            out = room(rows) if to_fp8 else None
            decode_attention.decode_attention_of_qkv(qkv, kv, options, how, out=out)

    # With few rows there are many splits; each row of 512 is a program of its own.
    for rows in (1, 64, 512):
        yield f"decode {rows}", partial(decode, rows, plain)
    for rows in (1, 64, 256):
        yield f"decode {rows} qkv", partial(decode_qkv, rows, True, head_dim)
        yield f"decode {rows} qkv of FP8", partial(decode_qkv, rows, True, head_dim, fp8=True)
    for rows, fp8 in ((16, False), (64, True), (256, False), (256, True)):
        name = f"decode {rows}{' of FP8' if fp8 else ''} to FP8"
        yield name, partial(decode, rows, plain, fp8=fp8, to_fp8=True)
        yield f"{name} qkv", partial(decode_qkv, rows, True, head_dim, fp8=fp8, to_fp8=True)
    yield "decode 1 qkv partial", partial(decode_qkv, 1, True, head_dim // 4, options=full)
    yield "decode 1 qkv interleaved", partial(decode_qkv, 1, False, head_dim, True)
    yield "decode 64 all options", partial(decode, 64, full)
    yield "decode 1 page 16", partial(decode, 1, plain, page=16)
    for rows in (16, 256):
        yield f"decode {rows} shared prefix", partial(decode, rows, plain, shared=True)
    yield "prefill short", partial(prefill, 32, plain, packed(32))
    yield "prefill long", partial(prefill, 512, plain, packed(512))
    yield "prefill cached", partial(prefill, 512, plain, paged(1))
    yield "prefill page 16", partial(prefill, 512, plain, paged(1, 16))
    yield "prefill graph", partial(prefill, 512, plain, paged(1), tiled=True)
    yield "prefill all options", partial(prefill, 512, full, paged(1))
    for rows in (1, 64, 512):
        yield f"decode {rows} of FP8", partial(decode, rows, plain, fp8=True)
    yield "decode 64 of FP8 all options", partial(decode, 64, full, fp8=True)
    yield "decode 256 of FP8 shared prefix", partial(decode, 256, plain, 256, True, True)
    yield "prefill cached FP8", partial(prefill, 512, plain, paged(1, fp8=True))
    yield "prefill graph FP8", partial(prefill, 512, plain, paged(1, fp8=True), tiled=True)


def linear_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable]]:
    """Yield cases of linear layers: of few rows, of a decode step, of prompts."""

    def run(rows, outputs, inputs, gated, gelu=False):
        x, weight = new(rows, inputs, dtype=dtype), new(outputs, inputs, dtype=dtype)
        if gated:
            products.gated_linear(x, weight, None, gelu)
        else:
            products.linear(x, weight, new(outputs, dtype=dtype))

    skinny = (1, 4096, 1024), (1, 4096, 4096), (1, 4096, 16384), (2, 4096, 4096), (4, 1024, 1024)
    for rows, outputs, inputs in (*skinny, (4, 512, 12288)):
        for gated in (False, True):
            name = f"decode skinny {rows} {outputs} {inputs}"
            yield name, partial(run, rows, outputs, inputs, gated)
    for rows, outputs, inputs in ((64, 1024, 1024), (128, 4096, 1024), (256, 4096, 2048)):
        yield f"decode {rows} {outputs} {inputs}", partial(run, rows, outputs, inputs, False)
    for rows, outputs in ((64, 2048), (128, 6144)):
        yield f"decode gated {rows} {outputs}", partial(run, rows, outputs, 1024, True)
    # Turned tiles: fetched at once, or in steps; of 64 gates, of 32 gates; whole_gated.
    for rows in (5, 16, 32):
        for outputs, inputs in ((1024, 2048), (4096, 1024), (4096, 4096), (6144, 4096)):
            name = f"decode {rows} {outputs} {inputs}"
            yield name, partial(run, rows, outputs, inputs, False)
        for outputs, inputs in ((6144, 1024), (24576, 4096)):
            yield f"decode gated {rows} {outputs}", partial(run, rows, outputs, inputs, True)
    yield "prefill gated", partial(run, 16384, 6144, 1024, True)
    yield "prefill gated gelu", partial(run, 16384, 6144, 1024, True, True)


def invariant_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable]]:
    """Yield cases of the kernels of batch_invariant, which serve Hopper alone."""

    def products(rows):
        x, weight = new(rows, 1024, dtype=dtype), new(4096, 1024, dtype=dtype)
        invariant_linear.linear(x, weight, new(4096, dtype=dtype))
        invariant_linear.gated_linear(x, weight)
        x, weight = new(rows, 3072, dtype=dtype), new(1024, 3072, dtype=dtype)
        invariant_linear.linear(x, weight, new(1024, dtype=dtype))
        x, weight = new(rows, 12288, dtype=dtype), new(4096, 12288, dtype=dtype)
        invariant_linear.linear(x, weight)
        x, weight = new(rows, 4096, dtype=dtype), new(24576, 4096, dtype=dtype)
        invariant_linear.linear(x, weight)
        invariant_linear.gated_linear(x, weight)

    def fp8(rows):
        x = new(rows, 2048, dtype=dtype)
        for how, group, block in (("group", 128, 128), ("token", 2048, 1), (None, 2048, 1)):
            codes = new(4096, 2048, dtype=torch.float8_e4m3fn)
            scales = new(4096, 2048 // group, dtype=torch.float32)
            matrix = fp8_inputs.Fp8Matrix(codes, scales, group, block, how)
            fp8_linear.invariant_linear(x, matrix, new(4096, dtype=dtype), dtype)

    def attention(head_dim):
        options = AttentionOptions(0.1, softcap=50.0, window=1024)
        ends, tables = new(2, dtype=torch.int32), new(1, 16, dtype=torch.int32)
        q = new(512, 8, head_dim, dtype=dtype)
        kv = PagedKV(new_cache(256, 4, head_dim, dtype, False), tables, new(1, dtype=torch.int32))
        meta = PrefillMetadata(ends, ends, 512, 512, tables)
        invariant_attention.prefill_attention(q, kv, meta, options)
        invariant_attention.decode_attention(q[:1], kv, options)

    def on_hopper(run, size):
        if dispatch.is_hopper(torch.device("cpu")):
            run(size)

    for rows in (1, 32, 64, 256, 16384):
        yield f"invariant products {rows}", partial(on_hopper, products, rows)
        yield f"invariant FP8 products {rows}", partial(on_hopper, fp8, rows)
    for head_dim in (64, 128, 256):
        yield f"invariant attention {head_dim}", partial(on_hopper, attention, head_dim)


def unnormed(x: torch.Tensor) -> Unnormed:
    """Make a row for a product that norms it."""
    stream = Stream(x, new(x.shape[1] // 16, dtype=torch.float32))
    return Unnormed(stream, new(x.shape[1], dtype=x.dtype), 1e-6)


def fp8_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable]]:
    """Yield cases of linear layers in FP8, by blocks, by rows, and with weights alone."""

    def run(rows, outputs, inputs, how, gated):
        is_grouped = how == "group"
        groups = inputs // 128 if is_grouped else 1
        matrix = fp8_inputs.Fp8Matrix(
            new(outputs, inputs, dtype=torch.float8_e4m3fn),
            new(outputs, groups, dtype=torch.float32),
            group=128 if is_grouped else inputs,
            block_rows=128 if is_grouped else 1,
            activations=how,
        )
        if is_grouped and 16 < rows <= dispatch.MAX_ROWS:
            blocks = new(outputs // 128, groups, dtype=torch.float32)
            matrix = matrix._replace(block_scales=blocks)
        x = new(rows, inputs, dtype=dtype)
        if products.fp8_row is not None and products.fp8_row.suits(x, matrix):
            if gated:
                products.gated_linear_fp8(unnormed(x), matrix, dtype)
            else:
                residual = new(1, outputs, dtype=dtype)
                products.linear_fp8(x, matrix, new(outputs, dtype=dtype), dtype, residual=residual)
        if gated:
            products.gated_linear_fp8(x, matrix, dtype)
            products.gated_linear_fp8(fp8_inputs.as_rows(x, matrix), matrix, dtype)
            if how:
                weight = new(inputs, dtype=dtype)
                fp8_inputs.norm_and_quantise(x, x, matrix, weight=weight, eps=1e-6)
                product = new(rows, 2 * inputs, dtype=dtype)
                fp8_inputs.activate_and_quantise(product, matrix)
        else:
            for inputs in (x, fp8_inputs.as_rows(x, matrix)):
                products.linear_fp8(inputs, matrix, new(outputs, dtype=dtype), dtype)

    for how in ("group", "token", None):
        of_blocks = (96, 192) if how == "group" else ()  # where fp8_splitk.py has other tiles
        for rows in (1, 16, 64, *of_blocks, 256, 8192):
            kind = "prefill" if rows > dispatch.MAX_ROWS else "decode"
            name = f"{kind} FP8 {rows} {how}"
            yield f"{name} 4096 12288", partial(run, rows, 4096, 12288, how, False)
            yield f"{name} gated", partial(run, rows, 24576, 4096, how, True)


def packed_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable]]:
    """Yield cases of linear layers whose weights are codes of 4 or 8 bits."""

    def run(rows, outputs, inputs, group, bits, gated):
        codes = new(outputs, inputs * bits // 32, dtype=torch.int32)
        factors = new(inputs // group, outputs, dtype=torch.int32)
        woven = packed_linear.takes_woven(META, bits, group, outputs, inputs)
        weight = packed_linear.PackedTensors(codes, factors, bits, group, inputs, woven)
        x = new(rows, inputs, dtype=dtype)
        if gated:
            products.gated_linear_int(x, weight)
        else:
            products.linear_int(x, weight, new(outputs, dtype=dtype))

    def run_woven(rows, outputs, inputs):
        if not packed_linear.takes_woven(META, 4, 128, outputs, inputs):
            return
        run(rows, outputs, inputs, 128, 4, False)
        if rows == 1:
            codes = new(outputs, inputs // 8, dtype=torch.int32)
            factors = new(inputs // 128, outputs, dtype=torch.int32)
            weight = packed_linear.PackedTensors(codes, factors, 4, 128, inputs, True)
            x, residual = new(1, inputs, dtype=dtype), new(1, outputs, dtype=dtype)
            products.linear_int(x, weight, None, residual)
            if packed_linear.woven_row.norms(inputs):
                products.linear_int(unnormed(x), weight)
                products.gated_linear_int(unnormed(x), weight)

    for rows in (1, 16, 64, 160, 256, 8192):
        kind = "prefill" if rows > dispatch.MAX_ROWS else "decode"
        for group, bits in ((128, 4), (64, 4), (128, 8)):
            name = f"{kind} INT{bits} {rows} by {group}"
            yield f"{name} 4096 12288", partial(run, rows, 4096, 12288, group, bits, False)
            yield f"{name} gated", partial(run, rows, 24576, 4096, group, bits, True)
    # On Hopper, warps divide a row evenly or not, and take their share at once or in blocks.
    for outputs, inputs in ((2048, 1024), (2560, 9728), (5120, 5120), (5120, 17408), (5120, 25600)):
        name = f"decode INT4 1 woven {outputs} {inputs}"
        yield name, partial(run_woven, 1, outputs, inputs)
    for rows in (8, 32, 96, 128, 192, 224):
        yield f"decode INT4 {rows} woven", partial(run_woven, rows, 4096, 4096)


def moe_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable]]:
    """Yield cases of mixtures of experts, from one token to many."""

    def plain(*shape):
        return new(*shape, dtype=dtype)

    def run(tokens, experts, top_k, width, inner, clamped=None, make=plain):
        bias = (lambda size: new(experts, size, dtype=dtype)) if clamped else lambda size: None
        x, weight = new(tokens, width, dtype=dtype), new(experts, width, dtype=dtype)
        logits: Any = new(tokens, experts, dtype=dtype)
        if router.suits(x, weight):
            logits = router.partial_logits(
                x, weight, new(experts, dtype=dtype) if clamped else None
            )
        moe.moe(
            x,
            logits,
            gate_up=make(experts, 2 * inner, width),
            down=make(experts, width, inner),
            gate_up_bias=bias(2 * inner),
            down_bias=bias(width),
            top_k=top_k,
            renormalize=True,
            clamped=clamped,
        )

    def packed(kind, sharing=None, woven=False):
        """Make weights of gpt-oss in 4 bits, or of Qwen3-30B-A3B in FP8."""

        def make(experts, outputs, inputs):
            group = {"e4m3": 128, "e2m1": 32, "int4": 128}[kind]
            groups = -(-inputs // group)
            if kind == "e4m3":
                codes = new(experts, outputs, inputs, dtype=torch.float8_e4m3fn)
                scales = new(experts, outputs, groups, dtype=torch.float32)
                return moe_packed.PackedExperts(kind, codes, scales, group, sharing, 128)
            if kind == "e2m1":
                codes = new(experts, outputs, inputs // 2, dtype=torch.uint8)
                scales = new(experts, outputs, groups, dtype=torch.uint8)
                if woven and woven_experts.is_woven(META, dtype, inputs, inputs):
                    return woven_experts.view_woven(codes, scales)
                return moe_packed.PackedExperts(kind, codes, scales, group)
            codes = new(experts, outputs, inputs // 8, dtype=torch.int32)
            zeros = new(experts, outputs, groups, dtype=torch.uint8)
            scales = new(experts, outputs, groups, dtype=dtype)
            return moe_packed.PackedExperts(kind, codes, scales, group, zeros=zeros)

        return make

    qwen, gpt_oss = (128, 8, 2048, 768), (32, 4, 2880, 2880)
    packings = {
        "FP8": (packed("e4m3", 128), qwen),
        "FP8 weights": (packed("e4m3"), qwen),
        "MXFP4": (packed("e2m1"), gpt_oss),
        "woven MXFP4": (packed("e2m1", woven=True), gpt_oss),
        "INT4": (packed("int4"), qwen),
    }
    clamped = ClampedSwiGLU(1.702, 7.0)
    for tokens in (1, 16, 64, 256, 4096):
        name = "prefill" if tokens > dispatch.MAX_ROWS else "decode"
        for kind, (make, sizes) in packings.items():
            limits = clamped if sizes == gpt_oss else None
            yield f"{name} {tokens} experts in {kind}", partial(run, tokens, *sizes, limits, make)
        if tokens == 16:
            continue
        yield f"{name} {tokens} of 128", partial(run, tokens, 128, 8, 2048, 768)
        yield f"{name} {tokens} of 32 clamped", partial(run, tokens, 32, 4, 2880, 2880, clamped)
    # One token has kernels of its own. The width is that of DeepSeek-V3, and the other one the most
    # that the kernels take.
    yield "decode 1 of 8 wide in FP8", partial(run, 1, 8, 2, 7168, 512, None, packings["FP8"][0])
    make, sizes = packings["woven MXFP4"]
    yield "decode 1 of 8 wide in woven MXFP4", partial(run, 1, 8, 2, 4096, 4096, clamped, make)
    # For two tokens, programs share the columns.
    case = partial(run, 2, 128, 4, 2880, 2880, clamped, make)
    yield "decode 2 of 128 experts in woven MXFP4", case
    for name, tokens in (
        ("decode", 4),
        ("decode", 96),
        ("decode", 160),
        ("prefill", 512),
        ("prefill", 1024),
        ("prefill", 8192),
    ):
        case = partial(run, tokens, *sizes, clamped, make)
        yield f"{name} {tokens} experts in woven MXFP4", case


def recurrent_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable]]:
    """Yield cases of layers with a state: Gated DeltaNet, and the convolutions of LFM2."""
    ints = new(4, dtype=torch.int64)
    ends, tiles = new(5, dtype=torch.int32), new(8, 2, dtype=torch.int32)
    in_graph = ChunkBlocks(ends, tiles, 8, 1)

    def delta(tokens, key_heads, heads, size, blocks=None, state_dtype=torch.float32):
        norm = dict(z=new(tokens, heads * size, dtype=dtype), norm_weight=new(size, dtype=dtype))
        inputs = DeltaInputs(
            new(tokens, (2 * key_heads + heads) * size, dtype=dtype),
            new(tokens, 2 * heads, dtype=dtype),
            *(new(heads, dtype=torch.float32) for _ in range(2)),
            key_heads,
            size,
        )
        state = new(9, heads, size, size, dtype=state_dtype)
        options: dict[str, Any] = dict(eps=1e-6, out=new(tokens, heads * size, dtype=dtype)) | norm
        if blocks is None:
            gated_delta.delta_rule_token(inputs, state, ints, **options)
        else:
            gated_delta.delta_rule_chunks(inputs, state, ints, blocks, **options)

    def convolution(width, gated, blocks=None):
        channels = 512
        args = (
            new(4, 3 * channels if gated else channels, dtype=dtype),
            new(channels, width, dtype=dtype),
            new(channels, dtype=dtype) if gated else None,
            new(9, width - 1, channels, dtype=dtype),
            ints,
        )
        options: dict[str, Any] = dict(out=new(4, channels, dtype=dtype), gated=gated)
        options["silu"] = not gated
        if blocks is None:
            short_conv.convolve_token(*args, **options)
        else:
            short_conv.convolve_chunks(*args, blocks, **options)

    for tokens in (4, 64):
        yield f"decode delta rule {tokens}", partial(delta, tokens, 16, 32, 128)
    for name, blocks in (("", in_graph._replace(tiles=None)), (" graph", in_graph)):
        yield f"prefill delta rule{name}", partial(delta, 4, 16, 32, 128, blocks)
    yield "prefill delta rule of few heads", partial(delta, 4, 2, 4, 128, in_graph)
    if dtype == torch.bfloat16:
        for name, blocks in (("decode", None), ("prefill", in_graph)):
            case = partial(delta, 4, 16, 32, 128, blocks, torch.bfloat16)
            yield f"{name} delta rule, states in bfloat16", case
    for width, gated in ((4, False), (3, True)):
        yield f"decode convolution {width}", partial(convolution, width, gated)
        yield f"prefill convolution {width}", partial(convolution, width, gated, in_graph)


def small_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable]]:
    """Yield cases of norms, activations, rotations, sums over ranks and decode inputs."""

    def norms(rows, width):
        x, weight = new(rows, width, dtype=dtype), new(width, dtype=dtype)
        elementwise.rms_norm(x, weight, 1e-6)
        elementwise.embed_and_norm(new(rows, dtype=torch.int64), x, weight, 1e-6)
        elementwise.add_rms_norm(x, x, weight=weight, eps=1e-6)
        elementwise.norm_add_norm(x, x, after=weight, weight=weight, eps=1e-6, zero_centered=True)
        elementwise.activate_and_mul(x)
        elementwise.activate_and_mul(x, gelu=True)
        elementwise.multiply_by_sigmoid(x, x)

    def rotation(head_dim, normed, interleaved, fp8=False):
        weight = new(head_dim, dtype=dtype) if normed else None
        cache = new_cache(256, 8, head_dim, dtype, fp8)
        elementwise.qk_norm_rope_store(
            new(8, 48 * head_dim, dtype=dtype),
            head_dim=head_dim,
            num_kv_heads=8,
            q_weight=weight,
            k_weight=weight,
            eps=1e-6,
            cos_sin=new(4096, head_dim, dtype=torch.float32),
            positions=new(8, dtype=torch.int64),
            slot_mapping=new(8, dtype=torch.int64),
            cache=cache,
            interleaved=interleaved,
        )

    def sums(size, direct_bytes):
        x, weight = new(8, 4096, dtype=dtype), new(4096, dtype=dtype)
        rows = allreduce_norm.SharedRows(new(size, dtype=torch.int64), 0, direct_bytes)
        allreduce_norm.sum_add_rms_norm(x, x, weight=weight, eps=1e-6, shared=rows)

    def inputs():
        elementwise.decode_inputs(new(8, dtype=torch.int64), BatchState(512, 160, 256, META))
        elementwise.copy(new(8, dtype=torch.int64), new(8, dtype=torch.int64))

    for width in (4096, 8192):
        yield f"decode norms {width}", partial(norms, 8, width)
    for head_dim in (64, 128, 256):
        yield f"decode rotation {head_dim}", partial(rotation, head_dim, True, False)
        yield f"decode rotation {head_dim} interleaved", partial(rotation, head_dim, False, True)
        yield f"decode rotation {head_dim} FP8", partial(rotation, head_dim, True, False, True)
    for size in (2, 8):
        for direct_bytes in (1 << 20, 0):
            yield f"decode sum of {size}", partial(sums, size, direct_bytes)
    yield "decode inputs", inputs


def sampling_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable]]:
    """Yield cases of sampling."""
    vocab = 151936

    def sample(rows):
        sampler.sample(
            new(rows, vocab, dtype=dtype),
            temperatures=new(rows, dtype=torch.float32),
            seeds=new(rows, dtype=torch.int64),
            positions=new(rows, dtype=torch.int32),
            slots=new(rows, dtype=torch.int64),
            last_tokens=new(512, dtype=torch.int64),
        )

    def resample():
        rows, slots = 8, 512
        ints = new(rows, dtype=torch.int64)
        step = StepOutput(ints, new(rows, vocab, dtype=dtype), new(rows, dtype=torch.int32), ints)
        space = resampler.Workspace(rows, vocab, META)
        table = new(slots, 9, dtype=torch.int32)
        params: Any = SimpleNamespace(params=table[:, :6].view(torch.float32), limits=table[:, 6:])
        none = new(1, dtype=torch.int32)
        resampler.resample(
            step.logits,
            ints,
            step,
            state=BatchState(slots, 160, 256, META),
            slot_params=params,
            counts=none,
            barred=none.view(torch.bool),
            cells=none.view(torch.bool),
            workspace=space,
        )
        resampler.logprobs(step.logits, ints, step, slot_params=params, most=5, workspace=space)

    yield "decode sample 1", partial(sample, 1)
    yield "decode sample 64", partial(sample, 64)
    yield "decode resample", resample


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable]]:
    """Yield all cases of a dtype: their names, and functions that launch their kernels."""
    for head_dim in (64, 128, 256):
        for name, run in attention_cases(dtype, head_dim):
            yield f"{name}, heads of {head_dim}", run
    makers = (
        linear_cases,
        invariant_cases,
        fp8_cases,
        packed_cases,
        moe_cases,
        recurrent_cases,
        small_cases,
        sampling_cases,
    )
    for make in makers:
        yield from make(dtype)


def stand_in_for(card: int, do: Callable[..., Any]) -> None:
    """Let the code choose as on a card, and call do(kernel, args, options) at each launch."""
    number = list(CARDS).index(card)

    def gpu(device: torch.device) -> dispatch.GPU:
        return CARDS[card]

    for module in list(sys.modules.values()):  # those that import `gpu` by name, too
        if getattr(module, "gpu", None) is dispatch.gpu and module is not dispatch:
            module.gpu = gpu
    dispatch.gpu = gpu  # the same function, so that the next card finds those modules again
    dispatch._counters.cache_clear()  # each card has its own number of them
    dispatch.TAKES_ALL_ARGUMENTS = False  # `launch` would keep what it launched
    JITFunction.__getitem__ = lambda kernel, grid: partial(launch, do, kernel, grid)
    driver.set_active(
        SimpleNamespace(
            # By this number Triton tells apart what it compiled for each device.
            get_current_device=lambda: number,
            get_current_stream=lambda device=None: 0,
            get_current_target=lambda: GPUTarget("cuda", card, 32),
        )
    )


def launch(do: Callable[..., Any], kernel: Any, grid: tuple, *args: Any, **options: Any) -> Any:
    return do(kernel, grid, args, options)


def variants_of(card: int, dtype: torch.dtype, wanted: str) -> dict[Variant, str]:
    """Find what the cases whose names match launch on a card, without compiling it.

    Returns each variant, and the first case that launches it.
    """
    found: dict[Variant, str] = {}

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found.setdefault((f"{fn.module}.{fn.name}", key), case)
        return True  # Triton does not compile

    stand_in_for(card, run_kernel)
    knobs.runtime.jit_cache_hook = note
    for case, run in cases(dtype):
        if re.search(wanted, case):
            run()
    return found


def compile_variants(
    card: int,
    dtype: torch.dtype,
    case: str,
    variants: set[Variant],
    assembled: dict[Variant, tuple[int, str]],
    folder: str,
) -> list[Compiled]:
    """Compile for a card those kernels of a case that are among `variants`.

    assembled: the card and the case that a variant's PTX is assembled for besides.
    """
    knobs.cache.dir = folder
    knobs.nvidia.dump_ptxas_log = True
    found: list[Compiled] = []
    variant = ("", "")  # the last one that Triton asked about

    def is_not_asked_for(*, key: str, fn: Any, **_: Any) -> bool:
        nonlocal variant
        variant = f"{fn.module}.{fn.name}", key
        return variant not in variants

    def note(kernel: Any, case: str, card: int, shared: int, report: str) -> None:
        spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))
        registers = max(map(int, re.findall(r"Used (\d+) registers", report)))
        of_dtype = case + (" float16" if dtype == torch.float16 else "")
        found.append(Compiled(name_of(kernel), of_dtype, card, shared, registers, spills))

    def compile_it(kernel, grid, args, options):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            compiled = run_kernel(kernel, grid, args, options)
        if not said.getvalue():  # it was not asked for, or is compiled already
            return
        note(kernel, case, card, compiled.metadata.shared, said.getvalue())
        if variant in assembled:
            other, other_case = assembled[variant]
            with contextlib.redirect_stdout(io.StringIO()) as said:
                assemble(compiled, card, other)
            note(kernel, other_case, other, compiled.metadata.shared, said.getvalue())

    stand_in_for(card, compile_it)
    knobs.runtime.jit_cache_hook = is_not_asked_for
    for name, run in cases(dtype):
        if name == case:
            run()
    return found


def run_kernel(kernel: Any, grid: tuple, args: tuple, options: dict[str, Any]) -> Any:
    return kernel.run(*args, grid=grid, warmup=True, **options)


def assemble(compiled: Any, card: int, other: int) -> None:
    """Assemble the PTX of a kernel, compiled for a card, for another card."""
    ptx = compiled.asm["ptx"].replace(f".target sm_{card}", f".target sm_{other}")
    CUDABackend(GPUTarget("cuda", other, 32)).make_cubin(ptx, {}, compiled.metadata, other)


def compiled_for(card: int) -> int:
    """Return the card for which a variant is compiled that both launch.

    sm_89 takes as much as sm_86 does for the same variant. What it can do besides is in a variant's
    arguments.
    """
    return 86 if card == 89 else card


def spare_garbage_collection() -> None:
    """Let a process that compiles look for garbage seldom, and not among what was imported."""
    gc.freeze()
    gc.set_threshold(100_000)


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.__name__}"


def kernels_without_case() -> set[str]:
    """Find the kernels that no case launches on Hopper, which runs them all."""
    kernels = set()
    for path in Path(dispatch.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                kernels.add(f"{path.stem}.{node.name}")
    stand_in_for(90, lambda kernel, *_: kernels.discard(name_of(kernel)))
    for _, run in cases(torch.bfloat16):
        run()
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", type=int, nargs="+", default=list(CARDS), choices=list(CARDS))
    parser.add_argument("--cases", help="a regular expression that their names match")
    options = parser.parse_args()
    begin = time.monotonic()
    cards = sorted(options.cards, key=lambda card: (card == 80, card))  # see SAME_PTX_ON_80
    wanted = [(torch.bfloat16, card, options.cases or "") for card in cards]
    if options.cases is None:
        wanted += [(torch.float16, card, FLOAT16) for card in options.cards if card in FOR_FLOAT16]
    # Triton says what a kernel takes when it compiles it, and nothing about one that it kept.
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(os.cpu_count(), initializer=spare_garbage_collection) as pool,
    ):
        without_case = pool.submit(kernels_without_case)
        noted = [pool.submit(variants_of, card, dtype, names) for dtype, card, names in wanted]
        if missing := without_case.result():
            sys.exit(f"no case launches {sorted(missing)}: add one to tests/cards.py")
        tasks: dict[tuple, set[Variant]] = {}
        tasks_of: dict[tuple[int, Variant], tuple] = {}  # by card and variant
        assembled: dict[tuple, dict[Variant, tuple[int, str]]] = {}
        for (dtype, card, _), variants in zip(wanted, noted):
            for variant, case in variants.result().items():
                known, task = (compiled_for(card), variant), (card, dtype, case)
                alike = tasks_of.get((86, variant))
                if SAME_PTX_ON_80 and card == 80 and alike is not None and alike[0] == 86:
                    assembled.setdefault(alike, {})[variant] = card, case
                elif known not in tasks_of:
                    tasks_of[known] = task
                    tasks.setdefault(task, set()).add(variant)
        compiling = [
            pool.submit(compile_variants, *task, variants, assembled.get(task, {}), folder)
            for task, variants in tasks.items()
        ]
        found = [compiled for task in compiling for compiled in task.result()]
    print(f"{'kernel':38} {'case':42} {'card':7} {'shared':>9} regs spills (bytes a thread)")
    for compiled in sorted(found):
        print(compiled)
    faults = [compiled for compiled in found if compiled.fault]
    print(
        f"{len(found)} kernels, {len(faults)} do not fit; "
        f"Triton {triton.__version__}, {time.monotonic() - begin:.0f} s"
    )
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
