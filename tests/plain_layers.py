"""What the kernels compute, by the plain layers that they take the place of, in the kernels'
signatures.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers import attention, gated_delta, short_conv
from nanovllm.layers.gated_delta import GatedRMSNorm
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
    added=None,
    is_invariant=False,
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
    out = layer(x)
    if added is not None:
        gates, result = added
        out += torch.sigmoid(gates) * result
    return out


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


def multiply_by_sigmoid(x, gate):
    return x * torch.sigmoid(gate)


def convolve_token(x, weight, bias, state, rows, *, out, silu=False, gated=False):
    out[:] = convolve(short_conv.convolve_token, x, silu, gated, weight, bias, state, rows)


def convolve_chunks(x, weight, bias, state, rows, blocks, *, out, silu=False, gated=False):
    tokens, starts = chunks_of(blocks)
    args = weight, bias, state, rows, starts
    out[tokens] = convolve(short_conv.convolve_chunks, x[tokens], silu, gated, *args)


def convolve(function, x, silu, gated, weight, *args):
    """A convolution, and what stands around it in Gated DeltaNet or in LFM2."""
    after = None
    if gated:
        before, after, x = x.chunk(3, dim=1)
        x = before * x
    out = function(x, weight, *args)
    if silu:
        out = F.silu(out)
    return out if after is None else after * out


def chunks_of(blocks):
    """The tokens of all chunks, and where each starts among them."""
    return slice(int(blocks.starts[0]), int(blocks.starts[-1])), blocks.starts - blocks.starts[0]


def delta_rule_token(inputs, state, rows, *, z, norm_weight, eps, out):
    rule = gated_delta.delta_rule_token
    out[:] = delta_rule(rule, inputs, z, norm_weight, eps, state, rows)


def delta_rule_chunks(inputs, state, rows, blocks, *, z, norm_weight, eps, out):
    tokens, starts = chunks_of(blocks)
    rule, inputs = gated_delta.delta_rule_chunks, inputs.rows(tokens)
    out[tokens] = delta_rule(rule, inputs, z[tokens], norm_weight, eps, state, rows, starts)


def delta_rule(rule, inputs, z, norm_weight, eps, state, *args):
    """Gated DeltaNet from its convolution to its norm."""
    heads, key_dim, value_dim = state.shape[1:]
    keys = inputs.num_key_heads * key_dim
    q, k, v = inputs.qkv.split([keys, keys, heads * value_dim], dim=1)
    q, k = (x.unflatten(1, (-1, key_dim)) for x in (q, k))
    b, a = inputs.ba.chunk(2, dim=1)
    wide = torch.promote_types(a.dtype, torch.float32)
    g = -inputs.A_log.to(wide).exp() * F.softplus(a.to(wide) + inputs.dt_bias)
    v, z = (x.unflatten(1, (-1, value_dim)) for x in (v, z))
    out = rule(q, k, v, g, b.sigmoid(), state, *args)
    return with_weights(GatedRMSNorm(value_dim, eps), weight=norm_weight)(out, z).flatten(1)
