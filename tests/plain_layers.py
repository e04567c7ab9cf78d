"""What the kernels compute, by the plain layers that they take the place of, in the kernels'
signatures.
"""

import torch
from torch import nn

from nanovllm.engine.batch_state import BatchState
from nanovllm.layers import attention
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.moe import MixtureOfExperts
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.rotary import RotaryEmbedding


def with_weights(module: nn.Module, **weights) -> nn.Module:
    for name, value in weights.items():
        parent, _, attribute = name.replace("__", ".").rpartition(".")
        owner = module.get_submodule(parent)
        setattr(
            owner, attribute, value if value is None else nn.Parameter(value, requires_grad=False)
        )
    return module


def rms_norm(x, weight, eps):
    return with_weights(RMSNorm(len(weight), eps), weight=weight)(x)


def add_rms_norm(x, residual, weight, eps):
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(x):
    mlp = GatedMLP(1, 1, ParallelGroup())
    mlp.gate_up_proj = mlp.down_proj = nn.Identity()
    return mlp(x)


def gated_linear(x, weight, bias=None):
    return silu_and_mul(nn.functional.linear(x, weight, bias))


def moe(x, logits, gate_up, down, top_k, renormalize):
    experts, width, hidden = gate_up.shape
    layer = MixtureOfExperts(
        hidden, width // 2, experts, top_k, ParallelGroup(), renormalize=renormalize
    )
    with_weights(layer, experts__gate_up_proj=gate_up, experts__down_proj=down)
    layer.gate.forward = lambda _: logits
    return layer(x)


def qk_norm_rope_store(
    qkv,
    head_dim,
    num_kv_heads,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    positions,
    slot_mapping,
    k_cache,
    v_cache,
):
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    rotary = RotaryEmbedding(torch.zeros(head_dim // 2), 1)
    rotary.cos_sin = cos_sin
    q, k = rotary(q, positions), rotary(k, positions)
    attention.store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q, k, v


def decode_inputs(slots, last_tokens, context_lens, block_tables, block_size):
    state = BatchState(len(context_lens) - 1, block_tables.shape[1], block_size, slots.device)
    state.last_tokens = last_tokens
    state.context_lens = context_lens
    state.block_tables = block_tables
    return state.advance(slots)


def decode_attention(q, k_cache, v_cache, lens, tables, scale, shared=None):
    return attention.decode_attention(q, k_cache, v_cache, lens, tables, scale)


def prefill_attention(q, k, v, k_cache, v_cache, metadata, scale):
    return attention.prefill_attention(q, k, v, k_cache, v_cache, metadata, scale)
