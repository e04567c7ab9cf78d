"""Gemma 3, the text model.

It differs from a Llama in these points:

- It norms the inputs and the outputs of attention and MLP, and each head of q and k. A norm
  multiplies by 1 + weight.
- It scales embeddings, and its MLP is gated by GELU.
- Layers with a window rotate q and k by another base than layers without one.
"""

import torch

from nanovllm.layers.embedding import ScaledEmbedding
from nanovllm.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from nanovllm.models.checks import check_number, refuse_later_tokens
from nanovllm.models.post_norm import SandwichNormLayer
from nanovllm.models.transformer import CausalLM, build_attention, build_mlp


class Gemma3ForCausalLM(CausalLM):
    norm = ZeroCenteredRMSNorm
    qk_norm: type[RMSNorm] | None = ZeroCenteredRMSNorm
    activations = ("gelu_pytorch_tanh",)
    has_windows = True
    checkpoint_names = {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    @classmethod
    def check(cls, config):
        check_number(config, "query_pre_attn_scalar")
        check_number(config, "attn_logit_softcapping", may_be_none=True)
        check_number(config, "final_logit_softcapping", may_be_none=True)
        # transformers reads this field for Gemma alone.
        if both_ways := getattr(config, "use_bidirectional_attention", None):
            refuse_later_tokens("use_bidirectional_attention", both_ways)

    def build_embedding(self, config, group):
        dtype = torch.get_default_dtype()  # the weights', to which the scale is rounded
        scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()
        return ScaledEmbedding(config.vocab_size, config.hidden_size, group, scale=scale)

    def build_layer(self, config, index, rotary, group):
        attention = build_attention(
            config,
            index,
            rotary,
            group,
            bias=config.attention_bias,
            qk_norm=self.qk_norm,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )
        return SandwichNormLayer(config, attention, build_mlp(config, group), self.norm)

    def compute_logits(self, hidden):
        logits, cap = super().compute_logits(hidden), self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model within a checkpoint that also has a vision tower."""

    checkpoint_names = {
        **Gemma3ForCausalLM.checkpoint_names,
        "model": "language_model.model",
        "lm_head": "language_model.lm_head",
    }
    left_out = ("vision_tower", "multi_modal_projector")
