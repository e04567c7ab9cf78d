"""Qwen3.5 and 3.6 with a mixture of experts, and an expert that all tokens share, in each layer."""

from dataclasses import dataclass

from nanovllm.layers.moe import SharedExpertMixture
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models.model_config import check_experts, json_field
from nanovllm.models.qwen3_5 import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(Qwen3_5Config):
    num_experts: int = json_field()
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    # No layer has this size, and config.json does not say it.
    intermediate_size: int = json_field(computed=lambda config: config.moe_intermediate_size)

    def check(self) -> None:
        super().check()
        check_experts(self.num_experts, self.num_experts_per_tok)


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    config_class = Qwen3_5MoeConfig

    def build_layer_mlp(self, config: Qwen3_5MoeConfig, index, group):
        return build_experts(config, group, renormalize=True)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """The text model within a checkpoint that also has a vision tower."""

    checkpoint_names = Qwen3_5ForConditionalGeneration.checkpoint_names


def build_experts(
    config: Qwen3_5MoeConfig, group: ParallelGroup, *, renormalize: bool
) -> SharedExpertMixture:
    """Build the experts and the shared expert of a layer, with the sizes of `config`."""
    return SharedExpertMixture(
        config.hidden_size,
        config.moe_intermediate_size,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        group=group,
        shared_size=config.shared_expert_intermediate_size,
        renormalize=renormalize,
    )
