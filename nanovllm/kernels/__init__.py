"""The operations between the matrix products, each in two forms: a Triton kernel and its plain PyTorch twin.

The functions here pick the form by the device their tensors live on. Triton and flash-attn are imported by modules of
this package alone, and only when a CUDA tensor asks for them, so that the library runs where neither is installed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import grouped_experts, reference, torch_attention


@dataclass(frozen=True)
class AttentionBackend:
    """How attention is computed: one function for prompt chunks, one for decoding (see torch_attention for both)."""

    name: str
    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]


TORCH_BACKEND = AttentionBackend("torch", torch_attention.prefill_attention, torch_attention.decode_attention)


def _form(x: Tensor):
    return reference


def rms_norm(x, weight, eps):
    return _form(x).rms_norm(x, weight, eps)


def add_rms_norm(x, residual, weight, eps):
    return _form(x).add_rms_norm(x, residual, weight, eps)


def silu_and_mul(x):
    return _form(x).silu_and_mul(x)


def qk_norm_rope_store(qkv, *args):
    return _form(qkv).qk_norm_rope_store(qkv, *args)


def decode_inputs(rows, *args):
    return _form(rows).decode_inputs(rows, *args)


def sample(logits, *args, **kwargs):
    return _form(logits).sample(logits, *args, **kwargs)


def select_attention_backend(name, device, dtype, head_dim, block_size):
    return TORCH_BACKEND


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def moe(x, experts, weights, gate_up, down):
    form = grouped_experts if grouped_experts.can_group(x, gate_up, down) else reference
    return form.moe(x, experts, weights, gate_up, down)
