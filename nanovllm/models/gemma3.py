"""Gemma 3, the text model.

It differs from a Llama in these points:

- It norms the inputs and the outputs of attention and MLP, and each head of q and k. A norm
  multiplies by 1 + weight.
- It scales embeddings, and its MLP is gated by GELU.
- Layers with a window rotate q and k by another base than layers without one.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nanovllm.layers.embedding import ScaledEmbedding
from nanovllm.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from nanovllm.models.model_config import ModelConfig, refuse_later_tokens
from nanovllm.models.post_norm import SandwichNormLayer
from nanovllm.models.transformer import CausalLM, build_attention, build_mlp


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(ModelConfig):
    activations: ClassVar = ("gelu_pytorch_tanh",)
    has_windows: ClassVar = True

    # The published models of 4B and more leave out the sizes that they share.
    vocab_size: int = 262_208
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 131_072
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096
    full_attention_interval: int | None = 6
    rope_theta: float = 1e6
    rope_local_base_freq: float | None = 1e4
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None

    def check(self) -> None:
        super().check()
        if self.use_bidirectional_attention:
            refuse_later_tokens("use_bidirectional_attention", True)


class Gemma3ForCausalLM(CausalLM):
    config_class: type[ModelConfig] = Gemma3Config
    norm: type[RMSNorm] = ZeroCenteredRMSNorm
    qk_norm: type[RMSNorm] | None = ZeroCenteredRMSNorm
    checkpoint_names = {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    def build_embedding(self, config: ModelConfig, group):
        dtype = torch.get_default_dtype()  # the weights', to which the scale is rounded
        scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()
        return ScaledEmbedding(config.vocab_size, config.hidden_size, group, scale=scale)

    def build_layer(self, config: Gemma3Config, index, rotary, group):
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
