"""Qwen3-Next: a Qwen3.5 with experts, whose Gated DeltaNet's projections are stored by key head.

config.json may keep some layers dense.
"""

from dataclasses import dataclass

from nanovllm.layers.moe import SharedExpertMixture
from nanovllm.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForCausalLM
from nanovllm.models.qwen3_moe import Qwen3MoeConfig
from nanovllm.models.transformer import build_mlp


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Qwen3MoeConfig, Qwen3_5Config):
    shared_expert_intermediate_size: int
    sliding_window: int | None = None
    norm_topk_prob: bool = True


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    config_class = Qwen3NextConfig
    left_out = ("mtp",)
    grouped_projections = True

    def build_layer_mlp(self, config: Qwen3NextConfig, index, group):
        if not config.is_sparse(index):
            return build_mlp(config, group)
        return SharedExpertMixture(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.num_experts_per_tok,
            group,
            shared_size=config.shared_expert_intermediate_size,
            renormalize=config.norm_topk_prob,
        )
