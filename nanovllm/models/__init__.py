"""Which class runs which architecture, by the name a checkpoint's config.json gives it."""

from torch import nn

from nanovllm.models.llama import LlamaForCausalLM, MistralForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.utils.parallel import ParallelGroup

MODELS: dict[str, type[nn.Module]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
}


def build_model(hf_config, group: ParallelGroup) -> nn.Module:
    """This rank's part of the model that `hf_config` describes, on the default device in the default dtype, not filled."""
    return find_model(hf_config)(hf_config, group)


def find_model(hf_config) -> type[nn.Module]:
    """The class that runs `hf_config`. What a configuration asks for and no model here does is refused, never ignored."""
    names = getattr(hf_config, "architectures", None) or []
    architecture = next((name for name in names if name in MODELS), None)
    if architecture is None:
        raise ValueError(f"architectures is {names}: this library runs {', '.join(MODELS)}")
    check_supported(hf_config)
    return MODELS[architecture]


def check_supported(hf_config) -> None:
    """Refuse the options that no model here implements."""
    activation = getattr(hf_config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {activation!r}: only 'silu' is implemented")
    if getattr(hf_config, "quantization_config", None):
        raise ValueError("quantization_config is set: choose the model's unquantized checkpoint")
    # Qwen's configurations keep a window's size next to a switch that turns it off; others have the size alone.
    window = getattr(hf_config, "sliding_window", None)
    if window and window < hf_config.max_position_embeddings and getattr(hf_config, "use_sliding_window", True):
        raise ValueError(f"sliding_window is {window}: sliding windows are not implemented, choose a model without one")
