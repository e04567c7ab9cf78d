"""The operations between the matrix products, each in two forms: a Triton kernel and its plain PyTorch twin.

The functions here pick the form by the device their tensors live on; `cpp_kernels` brings a third one for CPUs.
Triton and flash-attn are imported by modules of this package alone, and only when a CUDA tensor asks for them, so that
the library runs where neither is installed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.nn.functional as F

from nanovllm.cpu import cpp_ops
from nanovllm.kernels import reference
from nanovllm.kernels.attention_backends import CPP_BACKEND, TORCH_BACKEND, AttentionBackend, select_attention_backend

__all__ = [
    "CPP_BACKEND",
    "TORCH_BACKEND",
    "AttentionBackend",
    "add_rms_norm",
    "cpp_kernels",
    "decode_inputs",
    "find_uncompiled",
    "gated_linear",
    "linear",
    "moe",
    "qk_norm_rope_store",
    "rms_norm",
    "sample",
    "select_attention_backend",
    "silu_and_mul",
    "sum_add_rms_norm",
]

_on_cpu = ContextVar("on_cpu", default=reference)


@contextmanager
def cpp_kernels(enabled: bool) -> Iterator[None]:
    """Whether the C++ kernels serve inside the block where tensors live on a CPU."""
    token = _on_cpu.set(cpp_ops if enabled else reference)
    try:
        yield
    finally:
        _on_cpu.reset(token)


def find_uncompiled(run):
    from nanovllm.gpu import precompile

    return precompile.find_uncompiled(run)


def rms_norm(x, weight, eps):
    return _elementwise(x).rms_norm(x, weight, eps)


def add_rms_norm(x, residual, weight, eps):
    return _elementwise(x).add_rms_norm(x, residual, weight, eps)


def sum_add_rms_norm(x, residual, weight, eps, shared):
    """On a GPU alone: what shares rows is GPUs that read each other's memory."""
    from nanovllm.kernels.triton import allreduce_norm as triton_sum

    return triton_sum.sum_add_rms_norm(x, residual, weight, eps, shared)


def silu_and_mul(x):
    return _elementwise(x).silu_and_mul(x)


def qk_norm_rope_store(qkv, *args):
    return _elementwise(qkv).qk_norm_rope_store(qkv, *args)


def decode_inputs(rows, *args):
    return _elementwise(rows).decode_inputs(rows, *args)


def sample(logits, *args, **kwargs):
    if not logits.is_cuda:
        return reference.sample(logits, *args, **kwargs)
    from nanovllm.kernels.triton import sampling as triton_sampling

    return triton_sampling.sample(logits, *args, **kwargs)


def linear(x, weight, bias=None, spare=None):
    """`spare`: memory of the result's shape that nobody needs any more, where it may go."""
    if not x.is_cuda:
        if x.shape[0] == 1:  # a CPU's matrix-vector product is several times slower than one of two rows
            return F.linear(x.expand(2, -1), weight, bias)[:1]
        return F.linear(x, weight, bias)
    from nanovllm.kernels.triton import decode_gemm, gemv

    if tiling := decode_gemm.tiling(x, weight):
        return decode_gemm.linear(x, weight, bias, tiling)
    return gemv.linear(x, weight, bias, spare)


def gated_linear(x, weight, bias=None):
    """silu(gate) * up of x, where weight [2 N, K] and bias [2 N] hold gate and then up: [M, K] -> [M, N]."""
    if x.is_cuda and bias is None:
        from nanovllm.kernels.triton import decode_gemm

        if tiling := decode_gemm.tiling(x, weight, gated=True):
            return decode_gemm.gated_linear(x, weight, tiling)
    return silu_and_mul(linear(x, weight, bias))


def moe(x, *args):
    if not x.is_cuda:
        return reference.moe(x, *args)
    from nanovllm.kernels.triton import moe as triton_moe

    return triton_moe.moe(x, *args)


def _elementwise(x):
    if not x.is_cuda:
        return _on_cpu.get()
    from nanovllm.kernels.triton import elementwise as triton_ops

    return triton_ops
