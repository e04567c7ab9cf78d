"""What the kernels compute, by the plain layers that they take the place of, in the kernels'
signatures.
"""

import torch
from torch import nn

from nanovllm.layers import attention
from nanovllm.layers.mlp import GatedMLP, gelu_tanh
from nanovllm.layers.moe import MixtureOfExperts, swiglu
from nanovllm.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.partial_rotary import (
    InterleavedRotaryEmbedding,
    NoRotaryEmbedding,
    PartialRotaryEmbedding,
)

decode_attention, prefill_attention = attention.decode_attention, attention.prefill_attention


def with_weights(module: nn.Module, **weights) -> nn.Module:
    for name, value in weights.items():
        parent, _, attribute = name.replace("__", ".").rpartition(".")
        owner = module.get_submodule(parent)
        setattr(
            owner, attribute, value if value is None else nn.Parameter(value, requires_grad=False)
        )
    return module


def rms_norm(x, weight, eps, zero_centered=False):
    norm = ZeroCenteredRMSNorm if zero_centered else RMSNorm
    return with_weights(norm(len(weight), eps), weight=weight)(x)


def add_rms_norm(x, residual, *, weight, eps, zero_centered=False):
    residual = residual + x
    return rms_norm(residual, weight, eps, zero_centered), residual


def norm_add_norm(x, residual, *, after, weight, eps, zero_centered=False):
    residual = residual + rms_norm(x, after, eps, zero_centered)
    if weight is None:
        return residual.clone(), residual
    return rms_norm(residual, weight, eps, zero_centered), residual


def activate_and_mul(x, gelu=False):
    mlp = GatedMLP(1, 1, ParallelGroup(), activation=gelu_tanh if gelu else nn.functional.silu)
    mlp.gate_up_proj = mlp.down_proj = nn.Identity()
    return mlp(x)


def gated_linear(x, weight, bias=None, gelu=False):
    return activate_and_mul(nn.functional.linear(x, weight, bias), gelu)


def moe(
    x,
    logits,
    *,
    gate_up,
    down,
    gate_up_bias=None,
    down_bias=None,
    top_k,
    renormalize,
    clamped=None,
):
    experts, width, hidden = gate_up.shape
    layer = MixtureOfExperts(
        hidden,
        width // 2,
        experts,
        top_k,
        ParallelGroup(),
        renormalize=renormalize,
        gating=clamped or swiglu,
    )
    weights = dict(gate_up_proj=gate_up, down_proj=down)
    weights |= dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
    with_weights(layer.experts, **weights)
    layer.gate.forward = lambda _: logits
    return layer(x)


def qk_norm_rope_store(
    qkv,
    *,
    head_dim,
    num_kv_heads,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    positions,
    slot_mapping,
    cache,
    zero_centered=False,
    interleaved=False,
):
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None:
        q, k = (
            rms_norm(x, weight, eps, zero_centered) for x, weight in ((q, q_weight), (k, k_weight))
        )
    kind = InterleavedRotaryEmbedding if interleaved else PartialRotaryEmbedding
    rotary = kind(torch.zeros(0), 1) if cos_sin.shape[1] else NoRotaryEmbedding()
    rotary.cos_sin = cos_sin
    q, k = rotary(q, positions), rotary(k, positions)
    k, v = attention.store_kv(k, v, cache, slot_mapping)
    return q, k, v


def decode_inputs(slots, state):
    return state.advance(slots)
