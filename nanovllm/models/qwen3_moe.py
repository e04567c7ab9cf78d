"""Qwen3-MoE: Qwen3 with a mixture of experts in the place of MLPs.

config.json may keep some layers dense.
"""

from dataclasses import dataclass

from torch import nn

from nanovllm.layers.moe import MixtureOfExperts
from nanovllm.layers.norm import RMSNorm
from nanovllm.models.model_config import ExpertsConfig, json_field
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(ExpertsConfig):
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = json_field(computed=lambda config: ())

    def is_sparse(self, index: int) -> bool:
        """Return whether layer `index` has experts."""
        return (index + 1) % self.decoder_sparse_step == 0 and index not in self.mlp_only_layers


class Qwen3MoeForCausalLM(CausalLM):
    config_class = Qwen3MoeConfig

    def build_layer(self, config: Qwen3MoeConfig, index, rotary, group):
        bias = config.attention_bias
        attention = build_attention(config, index, rotary, group, bias=bias, qk_norm=RMSNorm)
        if config.is_sparse(index):
            mlp: nn.Module = MixtureOfExperts(
                config.hidden_size,
                config.moe_intermediate_size,
                num_experts=config.num_experts,
                top_k=config.num_experts_per_tok,
                group=group,
                renormalize=config.norm_topk_prob,
            )
        else:
            mlp = build_mlp(config, group)
        return DecoderLayer(config, attention, mlp)
