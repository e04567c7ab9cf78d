"""OLMo 2: a Llama that norms the outputs of attention and MLP instead of their inputs.

One norm covers all heads of q, and one all heads of k.
"""

from dataclasses import dataclass

from nanovllm.layers.norm import ShardedRMSNorm
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.post_norm import PostNormLayer
from nanovllm.models.transformer import CausalLM, build_attention, build_mlp


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(ModelConfig):
    rms_norm_eps: float = 1e-5


class Olmo2ForCausalLM(CausalLM):
    config_class = Olmo2Config
    checkpoint_names = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    def build_layer(self, config: Olmo2Config, index, rotary, group):
        bias = config.attention_bias
        attention = build_attention(config, index, rotary, group, bias=bias)
        q, k, _ = attention.qkv_proj.shards
        attention.q_norm = ShardedRMSNorm(q, config.rms_norm_eps, group)
        attention.k_norm = ShardedRMSNorm(k, config.rms_norm_eps, group)
        return PostNormLayer(config, attention, build_mlp(config, group))
