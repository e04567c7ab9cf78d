"""Qwen3.

    x = embedding(token)
    in each layer:
        x = x + o_proj(attention(rope(norm(q)), rope(norm(k)), v))    q, k, v projected from norm(x)
        x = x + down_proj(silu(gate) * up)                            gate, up projected from norm(x)
    logits = head(norm(x))

Every norm is RMSNorm; those of q and k, of one head each, are what Qwen3 adds to its predecessors. Several query heads
share a key-value head. No projection has a bias unless the config asks for it. decoder.py says the rest.
"""

from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.transformer import CausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.layers.parallel import ParallelGroup


class Qwen3Layer(DecoderLayer):
    def __init__(self, config, index: int, rotary: RotaryEmbedding, group: ParallelGroup):
        bias = config.attention_bias
        attention = SelfAttention(config, rotary, group, qk_norm=True, qkv_bias=bias, output_bias=bias)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, group)
        super().__init__(config, attention, mlp)


class Qwen3ForCausalLM(CausalLM):
    layer_class = Qwen3Layer
