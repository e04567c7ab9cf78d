"""Qwen3.5 and 3.6, the text model: in three of four layers, Gated DeltaNet takes attention's place.

It differs from a Qwen3 in these points:

- Layers whose kind is linear_attention have a Gated DeltaNet, which keeps a state of fixed size.
- Attention multiplies its output by a gate, and rotates a quarter of each head. mrope, in which
  pictures have positions in three directions, is plain RoPE on text.
- Norms multiply by 1 + weight, but the norm within Gated DeltaNet by its weight.
"""

from torch import nn

from nanovllm.layers.gated_attention import GatedSelfAttention
from nanovllm.layers.gated_delta import GatedDeltaNet
from nanovllm.layers.norm import ZeroCenteredRMSNorm
from nanovllm.layers.partial_rotary import PartialRotaryEmbedding
from nanovllm.models.transformer import (
    CausalLM,
    DecoderLayer,
    LinearAttentionLayer,
    build_attention,
    build_mlp,
)


class Qwen3_5ForCausalLM(CausalLM):
    norm = ZeroCenteredRMSNorm
    rotary = PartialRotaryEmbedding
    left_out = ("model.visual", "mtp")
    grouped_projections = False  # whether Gated DeltaNet's projections are stored by key head

    def build_layer(self, config, index, rotary, group):
        mlp = self.build_layer_mlp(config, index, group)
        if config.layer_types[index] == "linear_attention":
            linear = GatedDeltaNet(
                config.hidden_size,
                config.linear_num_key_heads,
                config.linear_num_value_heads,
                config.linear_key_head_dim,
                config.linear_value_head_dim,
                group,
                conv_width=config.linear_conv_kernel_dim,
                eps=config.rms_norm_eps,
                grouped=self.grouped_projections,
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

    def build_layer_mlp(self, config, index, group) -> nn.Module:
        return build_mlp(config, group)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The text model within a checkpoint that also has a vision tower."""

    checkpoint_names = {"model": "model.language_model"}
