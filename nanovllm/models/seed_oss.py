"""Seed-OSS: a Llama with a setting of its own for the bias of the output projection."""

from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


class SeedOssForCausalLM(CausalLM):
    def build_layer(self, config, index, rotary, group):
        bias, output_bias = config.attention_bias, config.attention_out_bias
        attention = build_attention(
            config, index, rotary, group, qkv_bias=bias, output_bias=output_bias
        )
        return DecoderLayer(config, attention, build_mlp(config, group, bias=config.mlp_bias))
