"""Qwen3: a Llama that norms each head of q and k before it is rotated.

    x = embedding(token)
    in each layer:
        x = x + o_proj(attention(rope(norm(q)), rope(norm(k)), v))  q, k, v projected from norm(x)
        x = x + down_proj(silu(gate) * up)                          gate, up projected from norm(x)
    logits = head(norm(x))

Every norm is RMSNorm. Several query heads share a key-value head. A projection has a bias only if
config.json says so. transformer.py has the rest.
"""

from dataclasses import dataclass

from nanovllm.layers.norm import RMSNorm
from nanovllm.models.qwen2 import Qwen2Config
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    head_dim: int = 128


class Qwen3ForCausalLM(CausalLM):
    config_class = Qwen3Config

    def build_layer(self, config: Qwen3Config, index, rotary, group):
        bias = config.attention_bias
        attention = build_attention(config, index, rotary, group, bias=bias, qk_norm=RMSNorm)
        return DecoderLayer(config, attention, build_mlp(config, group))
