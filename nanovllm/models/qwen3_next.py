"""Qwen3-Next: a Qwen3.5 with experts, whose Gated DeltaNet's projections are stored by key head.

config.json may keep some layers dense.
"""

from nanovllm.layers.moe import SharedExpertMixture
from nanovllm.models.qwen3_5 import Qwen3_5ForCausalLM
from nanovllm.models.qwen3_moe import is_sparse
from nanovllm.models.transformer import build_mlp


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    left_out = ("mtp",)
    grouped_projections = True

    def build_layer_mlp(self, config, index, group):
        if not is_sparse(config, index):
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
