"""Gemma 3, the text model: a Llama that norms what attention and the MLP read and what they add, by
1 + weight, and each head of q and k; scales embeddings; gates by GELU; and turns q and k by one
base in its local layers and by another in its global ones.
"""

from typing import Any

import torch

from nanovllm.layers.embedding import ScaledEmbedding
from nanovllm.layers.mlp import gelu_tanh
from nanovllm.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from nanovllm.models.checks import check_number
from nanovllm.models.post_norm import SandwichNormLayer
from nanovllm.models.transformer import CausalLM, build_attention, build_mlp


class Gemma3ForCausalLM(CausalLM):
    embedding = ScaledEmbedding
    norm = ZeroCenteredRMSNorm
    qk_norm: type[RMSNorm] | None = ZeroCenteredRMSNorm
    activations = {"gelu_pytorch_tanh": gelu_tanh}
    has_windows = True
    checkpoint_names = {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    @classmethod
    def check(cls, config):
        check_number(config, "query_pre_attn_scalar")
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(config, name, None) is not None:
                check_number(config, name)
        if getattr(config, "use_bidirectional_attention", None):
            raise ValueError(
                "config.json: use_bidirectional_attention is set: no model here sees later tokens, "
                "choose one that generates text"
            )

    def __init__(self, config, group, max_model_len=None):
        super().__init__(config, group, max_model_len)
        embedding: Any = self.model.embed_tokens
        scale = torch.tensor(config.hidden_size**0.5, dtype=embedding.weight.dtype, device="cpu")
        embedding.scale = scale.item()
        self.softcap = config.final_logit_softcapping

    def build_layer(self, config, index, rotary, group):
        bias = config.attention_bias
        attention = build_attention(
            config,
            index,
            rotary,
            group,
            qk_norm=self.qk_norm,
            qkv_bias=bias,
            output_bias=bias,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )
        mlp = build_mlp(config, group, activation=gelu_tanh)
        return SandwichNormLayer(config, attention, mlp, self.norm)

    def compute_logits(self, hidden):
        logits = super().compute_logits(hidden)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of those that also see."""

    checkpoint_names = {
        **Gemma3ForCausalLM.checkpoint_names,
        "model": "language_model.model",
        "lm_head": "language_model.lm_head",
    }
    left_out = ("vision_tower", "multi_modal_projector")
