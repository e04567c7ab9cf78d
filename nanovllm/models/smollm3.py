"""SmolLM3: a Llama in which some layers have no positions: they do not rotate q and k."""

from dataclasses import dataclass
from typing import ClassVar

from nanovllm.layers.partial_rotary import NoRotaryEmbedding
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(ModelConfig):
    has_windows: ClassVar = True

    num_key_value_heads: int = 4
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    rope_theta: float = 2_000_000.0
    # In spite of the field's name, 1 stands for a layer that rotates.
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4

    def __post_init__(self) -> None:
        listed = self.no_rope_layers
        if listed is not None and (
            len(listed) < self.num_hidden_layers or not all(value in (0, 1) for value in listed)
        ):
            raise ValueError(
                f"config.json: no_rope_layers is {list(listed)}: it must be a list of 0 and 1, one "
                "for each layer"
            )
        super().__post_init__()

    def has_rope(self, index: int) -> bool:
        """Return whether layer `index` rotates q and k."""
        if self.no_rope_layers is None:
            return (index + 1) % self.no_rope_layer_interval != 0
        return bool(self.no_rope_layers[index])

    def default_layer_types(self) -> tuple[str, ...]:
        local = "sliding_attention" if self.window_is_on else "full_attention"
        return tuple(
            "full_attention" if self.has_rope(index) else local
            for index in range(self.num_hidden_layers)
        )


class SmolLM3ForCausalLM(CausalLM):
    config_class = SmolLM3Config

    def build_layer(self, config: SmolLM3Config, index, rotary, group):
        bias = config.attention_bias
        if not config.has_rope(index):
            rotary = NoRotaryEmbedding()
        attention = build_attention(config, index, rotary, group, bias=bias)
        return DecoderLayer(config, attention, build_mlp(config, group, bias=config.mlp_bias))
