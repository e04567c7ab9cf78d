"""Llama 2 to 3.3, and Mistral, whose first version has a sliding window in every layer.

Projections have biases only if config.json says so.
"""

from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


class LlamaForCausalLM(CausalLM):
    def build_layer(self, config, index, rotary, group):
        bias = getattr(config, "attention_bias", False)
        attention = build_attention(config, index, rotary, group, bias=bias)
        mlp = build_mlp(config, group, bias=getattr(config, "mlp_bias", False))
        return DecoderLayer(config, attention, mlp)


class MistralForCausalLM(LlamaForCausalLM):
    has_windows = True
