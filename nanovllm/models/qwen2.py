"""Qwen2 and Qwen2.5: a Llama whose q, k and v have biases."""

from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


class Qwen2ForCausalLM(CausalLM):
    has_windows = True

    def build_layer(self, config, index, rotary, group):
        attention = build_attention(config, index, rotary, group, qkv_bias=True)
        return DecoderLayer(config, attention, build_mlp(config, group))
