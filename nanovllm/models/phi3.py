"""Phi-3, 3.5 and 4, mini to medium: a Llama whose checkpoints stack q, k and v, and gate and up.

A part of each head may stay unrotated. Long contexts use LongRoPE (layers/rope_scaling.py).
"""

from nanovllm.layers.partial_rotary import PartialRotaryEmbedding
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


class Phi3ForCausalLM(CausalLM):
    rotary = PartialRotaryEmbedding
    has_windows = True

    def build_layer(self, config, index, rotary, group):
        attention = build_attention(config, index, rotary, group, stacked=True)
        return DecoderLayer(config, attention, build_mlp(config, group, stacked=True))
