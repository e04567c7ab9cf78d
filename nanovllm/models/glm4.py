"""GLM-4: a Llama that rotates half of each head, in pairs of neighbouring elements.

Its checkpoints stack gate and up. The models of 2025 (GLM-4-0414) also norm the outputs of
attention and MLP.
"""

from dataclasses import dataclass

from nanovllm.layers.partial_rotary import InterleavedRotaryEmbedding
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.post_norm import SandwichNormLayer
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


@dataclass(frozen=True, kw_only=True)
class GlmConfig(ModelConfig):
    num_key_value_heads: int = 2
    head_dim: int = 128
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True
    partial_rotary_factor: float = 0.5


class GlmForCausalLM(CausalLM):
    config_class = GlmConfig
    rotary = InterleavedRotaryEmbedding
    layer: type[DecoderLayer] = DecoderLayer

    def build_layer(self, config: GlmConfig, index, rotary, group):
        attention = build_attention(config, index, rotary, group, qkv_bias=config.attention_bias)
        return self.layer(config, attention, build_mlp(config, group, stacked=True))


class Glm4ForCausalLM(GlmForCausalLM):
    layer = SandwichNormLayer
    checkpoint_names = {
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    }
