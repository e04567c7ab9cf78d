"""Qwen3-MoE: Qwen3 with a mixture of experts in the place of MLPs.

config.json may keep some layers dense.
"""

from torch import nn

from nanovllm.layers.moe import MixtureOfExperts
from nanovllm.layers.norm import RMSNorm
from nanovllm.models.checks import check_experts
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


class Qwen3MoeForCausalLM(CausalLM):
    @classmethod
    def check(cls, config):
        check_experts(config)

    def build_layer(self, config, index, rotary, group):
        bias = config.attention_bias
        attention = build_attention(config, index, rotary, group, bias=bias, qk_norm=RMSNorm)
        if is_sparse(config, index):
            mlp: nn.Module = MixtureOfExperts(
                config.hidden_size,
                config.moe_intermediate_size,
                config.num_experts,
                config.num_experts_per_tok,
                group,
                renormalize=config.norm_topk_prob,
            )
        else:
            mlp = build_mlp(config, group)
        return DecoderLayer(config, attention, mlp)


def is_sparse(config, index: int) -> bool:
    return (
        index not in (config.mlp_only_layers or ())
        and (index + 1) % config.decoder_sparse_step == 0
    )
