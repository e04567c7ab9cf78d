"""OLMo 3: an OLMo 2 with a sliding window in most layers, and rope settings by kind of layer."""

from dataclasses import dataclass
from typing import ClassVar

from nanovllm.models.olmo2 import Olmo2Config, Olmo2ForCausalLM


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    has_windows: ClassVar = True

    sliding_window: int | None = 4096
    full_attention_interval: int | None = 4
    rope_theta: float = 500_000.0
    rope_local_base_freq: float | None = 500_000.0


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    config_class = Olmo3Config
