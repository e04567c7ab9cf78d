"""Granite 3: a Llama with four multipliers, of embeddings, attention scores, what a layer adds, and
logits.
"""

from nanovllm.layers.embedding import ScaledEmbedding
from nanovllm.models.checks import check_number
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp

MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


class GraniteLayer(DecoderLayer):
    def __init__(self, config, self_attn, mlp):
        super().__init__(config, self_attn, mlp)
        self.multiplier = config.residual_multiplier

    def forward(self, x, positions):
        x = x + self.multiplier * self.self_attn(self.input_layernorm(x), positions)
        return x + self.multiplier * self.mlp(self.post_attention_layernorm(x))


class GraniteForCausalLM(CausalLM):
    embedding = ScaledEmbedding

    @classmethod
    def check(cls, config):
        for name in MULTIPLIERS:
            check_number(config, name)

    def __init__(self, config, group, max_model_len=None):
        super().__init__(config, group, max_model_len)
        self.model.embed_tokens.scale = config.embedding_multiplier
        self.logits_scaling = config.logits_scaling

    def build_layer(self, config, index, rotary, group):
        bias, scale = config.attention_bias, config.attention_multiplier
        attention = build_attention(
            config, index, rotary, group, qkv_bias=bias, output_bias=bias, scale=scale
        )
        return GraniteLayer(config, attention, build_mlp(config, group, bias=config.mlp_bias))

    def compute_logits(self, hidden):
        return super().compute_logits(hidden) / self.logits_scaling
