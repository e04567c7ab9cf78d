"""SmolLM3: a Llama in which some layers have no positions: they do not rotate q and k."""

from nanovllm.layers.partial_rotary import NoRotaryEmbedding
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


class SmolLM3ForCausalLM(CausalLM):
    has_windows = True

    @classmethod
    def check(cls, config):
        # In spite of the field's name, 1 stands for a layer that rotates.
        rotates = getattr(config, "no_rope_layers", None)
        if (
            not isinstance(rotates, list)
            or len(rotates) < config.num_hidden_layers
            or not all(value in (0, 1) for value in rotates)
        ):
            raise ValueError(
                f"config.json: no_rope_layers is {rotates!r}: it must be a list of 0 and 1, one "
                "for each layer"
            )

    def build_layer(self, config, index, rotary, group):
        bias = config.attention_bias
        if not config.no_rope_layers[index]:
            rotary = NoRotaryEmbedding()
        attention = build_attention(config, index, rotary, group, bias=bias)
        return DecoderLayer(config, attention, build_mlp(config, group, bias=config.mlp_bias))
