"""Llama 2 to 3.3, and Mistral, which differs in its defaults alone. Biases only where the config asks."""

from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.transformer import CausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.layers.parallel import ParallelGroup


class LlamaLayer(DecoderLayer):
    def __init__(self, config, index: int, rotary: RotaryEmbedding, group: ParallelGroup):
        bias = getattr(config, "attention_bias", False)
        attention = SelfAttention(config, rotary, group, qkv_bias=bias, output_bias=bias)
        bias = getattr(config, "mlp_bias", False)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, group, bias=bias)
        super().__init__(config, attention, mlp)


class LlamaForCausalLM(CausalLM):
    layer_class = LlamaLayer


class MistralForCausalLM(LlamaForCausalLM):
    pass
