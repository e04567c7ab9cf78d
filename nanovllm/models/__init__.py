"""Which class runs which architecture, by the name a checkpoint's config.json gives it."""

from torch import nn

from nanovllm.models.transformer import head_size
from nanovllm.models.llama import LlamaForCausalLM, MistralForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.weights.loader import SIZES
from nanovllm.layers.parallel import ParallelGroup

MODELS: dict[str, type[nn.Module]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
}


def build_model(hf_config, group: ParallelGroup, max_model_len: int | None = None) -> nn.Module:
    """This rank's part of the model that `hf_config` describes, on the default device in the default dtype, not filled.

    `max_model_len`: positions that will be asked for; None: all that the model supports.
    """
    return find_model(hf_config)(hf_config, group, max_model_len)


def find_model(hf_config) -> type[nn.Module]:
    """The class that runs `hf_config`. What a configuration asks for and no model here does is refused, never ignored."""
    names = getattr(hf_config, "architectures", None) or []
    architecture = next((name for name in names if name in MODELS), None) if isinstance(names, list) else None
    if architecture is None:
        raise ValueError(f"architectures is {names!r}: this library runs {', '.join(MODELS)}")
    check_sizes(hf_config)
    check_supported(hf_config)
    return MODELS[architecture]


def check_sizes(hf_config) -> None:
    """Refuse a configuration that describes no model."""
    for name in SIZES:
        value = getattr(hf_config, name, None)
        if type(value) is not int or value < 1:
            raise ValueError(f"config.json: {name} is {value!r}: it must be an integer, 1 or more")
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"config.json: num_attention_heads is {heads}, num_key_value_heads is {kv_heads}: it must divide that")
    if (head_dim := head_size(hf_config)) < 2 or head_dim % 2:
        raise ValueError(f"config.json: head_dim is {head_dim} (or hidden_size / num_attention_heads): it must be even")
    eps = hf_config.rms_norm_eps
    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise ValueError(f"config.json: rms_norm_eps is {eps!r}: it must be a number from 0 to 1")


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
