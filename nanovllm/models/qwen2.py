"""Qwen2 and Qwen2.5: a Llama whose q, k and v have biases."""

from dataclasses import dataclass
from typing import ClassVar

from nanovllm.models.model_config import ModelConfig, json_field
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(ModelConfig):
    has_windows: ClassVar = True

    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = json_field(28, ge=0)  # the number of layers before those with a window

    def default_layer_types(self) -> tuple[str, ...]:
        first = self.max_window_layers if self.window_is_on else self.num_hidden_layers
        return tuple(
            "sliding_attention" if index >= first else "full_attention"
            for index in range(self.num_hidden_layers)
        )


class Qwen2ForCausalLM(CausalLM):
    config_class = Qwen2Config

    def build_layer(self, config: Qwen2Config, index, rotary, group):
        attention = build_attention(config, index, rotary, group, qkv_bias=True)
        return DecoderLayer(config, attention, build_mlp(config, group))
