"""The operations between the matrix products, each in two forms: a Triton kernel and its plain PyTorch twin.

The functions here pick the form by the device their tensors live on; `cpp_kernels` brings a third one for CPUs.
Triton and flash-attn are imported by modules of this package alone, and only when a CUDA tensor asks for them, so that
the library runs where neither is installed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.nn.functional as F

from nanovllm.kernels import cpp_ops, grouped_experts, reference
from nanovllm.kernels.backends import CPP_BACKEND, TORCH_BACKEND, AttentionBackend, select_attention_backend
from nanovllm.kernels.grouped_experts import can_group

__all__ = [
    "CPP_BACKEND",
    "TORCH_BACKEND",
    "AttentionBackend",
    "add_rms_norm",
    "can_group",
    "cpp_kernels",
    "decode_inputs",
    "linear",
    "moe",
    "qk_norm_rope_store",
    "rms_norm",
    "sample",
    "select_attention_backend",
    "silu_and_mul",
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


def rms_norm(x, weight, eps):
    return _elementwise(x).rms_norm(x, weight, eps)


def add_rms_norm(x, residual, weight, eps):
    return _elementwise(x).add_rms_norm(x, residual, weight, eps)


def silu_and_mul(x):
    return _elementwise(x).silu_and_mul(x)


def qk_norm_rope_store(qkv, *args):
    return _elementwise(qkv).qk_norm_rope_store(qkv, *args)


def decode_inputs(rows, *args):
    return _elementwise(rows).decode_inputs(rows, *args)


def sample(logits, *args, **kwargs):
    if not logits.is_cuda:
        return reference.sample(logits, *args, **kwargs)
    from nanovllm.kernels import triton_sampling

    return triton_sampling.sample(logits, *args, **kwargs)


def linear(x, weight, bias=None):
    if not x.is_cuda:
        if x.shape[0] == 1:  # a CPU's matrix-vector product is several times slower than one of two rows
            return F.linear(x.expand(2, -1), weight, bias)[:1]
        return F.linear(x, weight, bias)
    from nanovllm.kernels import skinny_linear

    return skinny_linear.linear(x, weight, bias)


def moe(x, experts, weights, gate_up, down):
    form = grouped_experts if can_group(x.dtype, gate_up, down) else reference
    return form.moe(x, experts, weights, gate_up, down)


def _elementwise(x):
    if not x.is_cuda:
        return _on_cpu.get()
    from nanovllm.kernels import triton_ops

    return triton_ops
