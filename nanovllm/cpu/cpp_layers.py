"""Layers that compute with the C++ kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.cpu import cpp_ops
from nanovllm.cpu.layers import (
    InPlaceGatedMLP,
    JointSelfAttention,
    OnePassRMSNorm,
    replace,
    speed_up,
)
from nanovllm.cpu.paged_attention import PagedSelfAttention
from nanovllm.layers.context import AttentionMetadata, current_metadata
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding


def speed_up_by_cpp(model: nn.Module) -> None:
    """For a CPU and float32, by C++ kernels that are compiled now.

    ValueError: they cannot be, or another dtype.
    """
    if (dtype := next(model.parameters()).dtype) != torch.float32:
        raise ValueError(f"kernels is 'cpp', but dtype is {dtype}: use float32, or kernels='auto'")
    cpp_ops.load()
    speed_up(model)
    replace(model, {OnePassRMSNorm: CppRMSNorm, JointSelfAttention: CppSelfAttention})
    for module in model.modules():
        if isinstance(module, InPlaceGatedMLP) and module.activation is F.silu:
            replace(module, {InPlaceGatedMLP: CppGatedMLP})
        if type(module) is PagedSelfAttention and type(module.rotary) is RotaryEmbedding:
            if type(module.q_norm) is type(module.k_norm) is nn.Identity:
                module.__class__ = CppSelfAttention


class CppRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return cpp_ops.rms_norm(x.contiguous(), self.weight, self.eps)


class CppGatedMLP(InPlaceGatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(cpp_ops.silu_and_mul(self.gate_up_proj(x)))


class CppSelfAttention(PagedSelfAttention):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        metadata = current_metadata()
        norms: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0)
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q, k, v = cpp_ops.qk_norm_rope_store(
            self.qkv_proj(x),
            self.head_dim,
            self.num_kv_heads,
            *norms,
            self.rotary.cos_sin,
            positions,
            metadata.slot_mapping,
            self.k_cache,
            self.v_cache,
        )
        return self.o_proj(self.attend_stored(q, k, v, metadata).flatten(1))

    def decode(self, q: Tensor, metadata: AttentionMetadata) -> Tensor:
        if self.window is not None:
            return super().decode(q, metadata)
        lens, tables = metadata.decode_inputs
        return cpp_ops.decode_attention(q, self.k_cache, self.v_cache, lens, tables, self.scale)
