"""Llama 2 to 3.3, and Mistral, whose first version has a sliding window in every layer.

Projections have biases only if config.json says so.
"""

from dataclasses import dataclass
from typing import ClassVar

from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


class LlamaForCausalLM(CausalLM):
    def build_layer(self, config: ModelConfig, index, rotary, group):
        bias = config.attention_bias
        attention = build_attention(config, index, rotary, group, bias=bias)
        mlp = build_mlp(config, group, bias=config.mlp_bias)
        return DecoderLayer(config, attention, mlp)


@dataclass(frozen=True, kw_only=True)
class MistralConfig(ModelConfig):
    has_windows: ClassVar = True

    num_key_value_heads: int = 8
    sliding_window: int | None = 4096


class MistralForCausalLM(LlamaForCausalLM):
    config_class = MistralConfig
