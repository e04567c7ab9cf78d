"""Qwen2 and Qwen2.5: q, k and v have biases, the other projections none."""

from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.transformer import CausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.layers.parallel import ParallelGroup


class Qwen2Layer(DecoderLayer):
    def __init__(self, config, index: int, rotary: RotaryEmbedding, group: ParallelGroup):
        attention = SelfAttention(config, rotary, group, qkv_bias=True)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, group)
        super().__init__(config, attention, mlp)


class Qwen2ForCausalLM(CausalLM):
    layer_class = Qwen2Layer
