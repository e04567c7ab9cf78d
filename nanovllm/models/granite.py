"""Granite 3: a Llama with multipliers of embeddings, attention scores, layer outputs and logits."""

from dataclasses import dataclass

from nanovllm.layers.embedding import ScaledEmbedding
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(ModelConfig):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class GraniteLayer(DecoderLayer):
    def __init__(self, config: GraniteConfig, self_attn, mlp):
        super().__init__(config, self_attn, mlp)
        self.multiplier = config.residual_multiplier

    def forward(self, x, positions):
        x = x + self.multiplier * self.self_attn(self.input_layernorm(x), positions)
        return x + self.multiplier * self.mlp(self.post_attention_layernorm(x))


class GraniteForCausalLM(CausalLM):
    config_class = GraniteConfig

    def build_embedding(self, config: GraniteConfig, group):
        scale = config.embedding_multiplier
        return ScaledEmbedding(config.vocab_size, config.hidden_size, group, scale=scale)

    def build_layer(self, config: GraniteConfig, index, rotary, group):
        bias, scale = config.attention_bias, config.attention_multiplier
        attention = build_attention(config, index, rotary, group, bias=bias, scale=scale)
        return GraniteLayer(config, attention, build_mlp(config, group, bias=config.mlp_bias))

    def compute_logits(self, hidden):
        return super().compute_logits(hidden) / self.config.logits_scaling
