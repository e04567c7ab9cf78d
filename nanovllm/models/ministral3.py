"""Ministral 3: a Mistral whose queries are longer at positions past its original context.

Its checkpoints also have a vision tower. So do those of Mistral Small 3.1 and later, whose text
model is a plain Mistral.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from nanovllm.layers.rotary import QueryScalingRotaryEmbedding
from nanovllm.models.llama import LlamaForCausalLM, MistralConfig
from nanovllm.models.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(ModelConfig):
    has_windows: ClassVar = True
    default_rope: ClassVar = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }

    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 262_144
    rms_norm_eps: float = 1e-5


class Mistral3Config(ModelConfig):
    """The configuration of the text model within a checkpoint that also has a vision tower."""

    text_models: ClassVar[dict[str, type[ModelConfig]]] = {
        "mistral": MistralConfig,
        "ministral3": Ministral3Config,
    }

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> Any:
        """Read the configuration, as an object of the text model's own class."""
        kind = json.get("model_type", "mistral")
        if kind not in cls.text_models:
            raise ValueError(
                f"config.json: model_type of its text_config is {kind!r}: "
                f"{json['architecture']} runs here with {' or '.join(cls.text_models)}"
            )
        return cls.text_models[kind].from_json({"tie_word_embeddings": True} | json)


class Ministral3ForCausalLM(LlamaForCausalLM):
    config_class: type[ModelConfig] = Ministral3Config
    rotary = QueryScalingRotaryEmbedding


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """The text model within a checkpoint that also has a vision tower."""

    config_class = Mistral3Config
    checkpoint_names = {"model": "language_model.model", "lm_head": "language_model.lm_head"}
    left_out = ("vision_tower", "multi_modal_projector")
