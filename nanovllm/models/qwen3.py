"""Qwen3: a Llama that norms each head of q and k before it is rotated.

    x = embedding(token)
    in each layer:
        x = x + o_proj(attention(rope(norm(q)), rope(norm(k)), v))  q, k, v projected from norm(x)
        x = x + down_proj(silu(gate) * up)                          gate, up projected from norm(x)
    logits = head(norm(x))

Every norm is RMSNorm. Several query heads share a key-value head. A projection has a bias only if
config.json says so. transformer.py has the rest.
"""

from nanovllm.layers.norm import RMSNorm
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


class Qwen3ForCausalLM(CausalLM):
    has_windows = True

    def build_layer(self, config, index, rotary, group):
        bias = config.attention_bias
        attention = build_attention(config, index, rotary, group, bias=bias, qk_norm=RMSNorm)
        return DecoderLayer(config, attention, build_mlp(config, group))
