"""Seed-OSS: a Llama with a setting of its own for the bias of the output projection."""

from dataclasses import dataclass

from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(ModelConfig):
    num_key_value_heads: int = 8
    head_dim: int = 128
    attention_bias: bool = True
    attention_out_bias: bool = False


class SeedOssForCausalLM(CausalLM):
    config_class = SeedOssConfig

    def build_layer(self, config: SeedOssConfig, index, rotary, group):
        bias, output_bias = config.attention_bias, config.attention_out_bias
        attention = build_attention(
            config, index, rotary, group, qkv_bias=bias, output_bias=output_bias
        )
        return DecoderLayer(config, attention, build_mlp(config, group, bias=config.mlp_bias))
