"""Phi-3, 3.5 and 4, mini to medium: a Llama whose checkpoints stack q, k and v, and gate and up.

A part of each head may stay unrotated. Long contexts use LongRoPE (layers/rope_scaling.py).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from nanovllm.layers.partial_rotary import PartialRotaryEmbedding
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention, build_mlp


@dataclass(frozen=True, kw_only=True)
class Phi3Config(ModelConfig):
    has_windows: ClassVar = True

    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: int | None = 4096

    def rope_settings(self, kind: str = "full_attention") -> dict[str, Any]:
        rope = super().rope_settings(kind)
        # Names that older checkpoints give to LongRoPE.
        return rope | {"rope_type": "longrope"} if rope["rope_type"] in ("su", "yarn") else rope


class Phi3ForCausalLM(CausalLM):
    rotary = PartialRotaryEmbedding
    config_class = Phi3Config

    def build_layer(self, config: Phi3Config, index, rotary, group):
        attention = build_attention(config, index, rotary, group, stacked=True)
        return DecoderLayer(config, attention, build_mlp(config, group, stacked=True))
