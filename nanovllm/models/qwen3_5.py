"""Qwen3.5 and 3.6, the text model: in three of four layers, Gated DeltaNet takes attention's place.

It differs from a Qwen3 in these points:

- Layers whose kind is linear_attention have a Gated DeltaNet, which keeps a state of fixed size.
- Attention multiplies its output by a gate, and rotates a quarter of each head. mrope, in which
  pictures have positions in three directions, is plain RoPE on text.
- Norms multiply by 1 + weight, but the norm within Gated DeltaNet by its weight.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.layers.gated_attention import GatedSelfAttention
from nanovllm.layers.gated_delta import GatedDeltaNet
from nanovllm.layers.norm import ZeroCenteredRMSNorm
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.partial_rotary import PartialRotaryEmbedding
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transformer import (
    CausalLM,
    DecoderLayer,
    LinearAttentionLayer,
    build_attention,
    build_mlp,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(ModelConfig):
    layer_kinds: ClassVar = ("full_attention", "linear_attention")

    head_dim: int = 256
    full_attention_interval: int | None = 4
    partial_rotary_factor: float = 0.25
    attn_output_gate: bool = True
    output_gate_type: str | None = "swish"  # of Gated DeltaNet
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    mamba_ssm_dtype: str | None = "float32"  # of the states of Gated DeltaNet; null is float32

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.mamba_ssm_dtype == "bfloat16" else torch.float32

    def check(self) -> None:
        super().check()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise ValueError(
                f"config.json: linear_num_value_heads is {values}, linear_num_key_heads is {keys}: "
                "the second must divide the first"
            )
        if self.linear_conv_kernel_dim < 2:
            raise ValueError(
                f"config.json: linear_conv_kernel_dim is {self.linear_conv_kernel_dim}: it must be "
                "2 or more"
            )
        if self.mamba_ssm_dtype not in (None, "float32", "bfloat16"):
            raise ValueError(
                f"config.json: mamba_ssm_dtype is {self.mamba_ssm_dtype!r}: it must be 'float32' "
                "or 'bfloat16'"
            )
        if not self.attn_output_gate or self.output_gate_type not in (None, "swish", "silu"):
            raise ValueError(
                f"config.json: attn_output_gate is {self.attn_output_gate}, output_gate_type is "
                f"{self.output_gate_type!r}: {self.architecture} has a gate, and 'swish'"
            )


class Qwen3_5ForCausalLM(CausalLM):
    config_class: type[ModelConfig] = Qwen3_5Config
    norm = ZeroCenteredRMSNorm
    rotary = PartialRotaryEmbedding
    left_out: tuple[str, ...] = ("model.visual", "mtp")
    grouped_projections = False  # whether Gated DeltaNet's projections are stored by key head

    def build_layer(self, config: Qwen3_5Config, index, rotary, group):
        mlp = self.build_layer_mlp(config, index, group)
        if config.layer_types[index] == "linear_attention":
            linear = GatedDeltaNet(
                config.hidden_size,
                num_key_heads=config.linear_num_key_heads,
                num_value_heads=config.linear_num_value_heads,
                key_dim=config.linear_key_head_dim,
                value_dim=config.linear_value_head_dim,
                group=group,
                conv_width=config.linear_conv_kernel_dim,
                eps=config.rms_norm_eps,
                grouped=self.grouped_projections,
                state_dtype=config.state_dtype,
            )
            return LinearAttentionLayer(config, linear, mlp, self.norm)
        attention = build_attention(
            config,
            index,
            rotary,
            group,
            bias=config.attention_bias,
            qk_norm=self.norm,
            kind=GatedSelfAttention,
        )
        return DecoderLayer(config, attention, mlp, self.norm)

    def build_layer_mlp(self, config: Any, index: int, group: ParallelGroup) -> nn.Module:
        return build_mlp(config, group)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The text model within a checkpoint that also has a vision tower."""

    checkpoint_names = {"model": "model.language_model"}
