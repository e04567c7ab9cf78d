"""Gemma 2: a Gemma 3 without norms of q and k and with one base of rotation for all layers.

It caps attention scores and logits.
"""

from dataclasses import dataclass

from nanovllm.models.gemma3 import Gemma3Config, Gemma3ForCausalLM


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(Gemma3Config):
    vocab_size: int = 256_000
    max_position_embeddings: int = 8192
    full_attention_interval: int | None = 2
    rope_theta: float = 10_000.0
    rope_local_base_freq: float | None = None
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0


class Gemma2ForCausalLM(Gemma3ForCausalLM):
    config_class = Gemma2Config
    qk_norm = None
