"""Qwen3-Next: a Qwen3.5 with experts, whose Gated DeltaNet's projections are stored by key head.

config.json may keep some layers dense.
"""

from dataclasses import dataclass

from nanovllm.models.model_config import json_field
from nanovllm.models.qwen3_5 import Qwen3_5ForCausalLM
from nanovllm.models.qwen3_5_moe import Qwen3_5MoeConfig, build_experts
from nanovllm.models.transformer import build_mlp


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Qwen3_5MoeConfig):
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = json_field(computed=lambda config: ())

    def is_sparse(self, index: int) -> bool:
        """Return whether layer `index` has experts."""
        return (index + 1) % self.decoder_sparse_step == 0 and index not in self.mlp_only_layers


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    config_class = Qwen3NextConfig
    left_out = ("mtp",)
    grouped_projections = True

    def build_layer_mlp(self, config: Qwen3NextConfig, index, group):
        if not config.is_sparse(index):
            return build_mlp(config, group)
        return build_experts(config, group, renormalize=config.norm_topk_prob)
