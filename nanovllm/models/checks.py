"""Checks of a configuration: each refuses a field whose value makes no model that runs here."""

from typing import Any, NoReturn

from nanovllm.models.config_fields import activation_name, head_size
from nanovllm.models.transformer import CausalLM
from nanovllm.weights.hf_config import OF_EXPERTS, SIZES

# Far above what any model has. With more layers Python is busy for minutes, and the product of two
# larger sizes does not fit into 64 bits.
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
LAYER_KINDS = ("full_attention", "sliding_attention")
LARGEST = 3e38  # of a number that is no count: models compute in float32


def check_sizes(hf_config) -> None:
    """Raise ValueError for sizes that describe no model."""
    for name in SIZES:
        check_count(hf_config, name, MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE)
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads is {heads}, num_key_value_heads is {kv_heads}: it "
            "must divide that"
        )
    if getattr(hf_config, "head_dim", None) is not None:
        check_count(hf_config, "head_dim", MAX_SIZE)
    if (head_dim := head_size(hf_config)) < 2 or head_dim % 2:
        raise ValueError(
            f"config.json: head_dim is {head_dim} (or hidden_size / num_attention_heads): it must "
            "be even"
        )
    eps: Any = getattr(hf_config, "rms_norm_eps", None)
    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise ValueError(f"config.json: rms_norm_eps is {eps!r}: it must be a number from 0 to 1")
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        check_flag(hf_config, name)


def check_experts(hf_config, sizes: tuple[str, ...] = OF_EXPERTS) -> None:
    """Raise ValueError for fields `sizes` that describe no mixture of experts.

    The first field of `sizes` counts the experts.
    """
    for name in sizes:
        check_count(hf_config, name, MAX_SIZE)
    if hf_config.num_experts_per_tok > (count := getattr(hf_config, sizes[0])):
        raise ValueError(
            f"config.json: num_experts_per_tok is {hf_config.num_experts_per_tok}, more than "
            f"{sizes[0]}, which is {count}: check both"
        )
    check_flag(hf_config, "norm_topk_prob")
    dense = getattr(hf_config, "mlp_only_layers", None)
    if dense is not None and not (
        isinstance(dense, list) and all(type(index) is int for index in dense)
    ):
        raise ValueError(
            f"config.json: mlp_only_layers is {dense!r}: it must be a list of layers' numbers"
        )


def check_count(hf_config, name: str, most: int) -> None:
    value = getattr(hf_config, name, None)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(
            f"config.json: {name} is {value!r}: it must be an integer from 1 to {most}"
        )


def check_flag(hf_config, name: str) -> None:
    """Raise ValueError for a value that is not true or false: the text "false" would be true."""
    value = getattr(hf_config, name, None)
    if value is not None and type(value) is not bool:
        raise ValueError(f"config.json: {name} is {value!r}: it must be true or false")


def check_number(hf_config, name: str, *, may_be_none: bool = False) -> None:
    value: Any = getattr(hf_config, name, None)
    if value is None and may_be_none:
        return
    if type(value) not in (int, float) or not 0 < value < LARGEST:
        raise ValueError(f"config.json: {name} is {value!r}: it must be a finite number above 0")


def check_supported(hf_config, model_class: type[CausalLM]) -> None:
    """Raise ValueError for options that the model does not implement."""
    activation = activation_name(hf_config)
    if not isinstance(activation, str) or activation not in model_class.activations:
        known = ", ".join(map(repr, model_class.activations))
        raise ValueError(
            f"config.json: hidden_act is {activation!r}: {model_class.__name__} has {known}"
        )
    # transformers reads is_causal for every family, and takes null for false.
    if not getattr(hf_config, "is_causal", True):
        refuse_later_tokens("is_causal", hf_config.is_causal)
    check_windows(hf_config, model_class)


def refuse_later_tokens(name: str, value: Any) -> NoReturn:
    """Raise ValueError for a field that lets tokens attend to later ones."""
    raise ValueError(
        f"config.json: {name} is {value!r}: no model here sees later tokens, choose one that "
        "generates text"
    )


def check_windows(hf_config, model_class: type[CausalLM]) -> None:
    """Raise ValueError for windows that the model lacks, and for unknown kinds of layers."""
    layers, kinds = hf_config.num_hidden_layers, getattr(hf_config, "layer_types", None)
    if kinds is not None and (
        not isinstance(kinds, list)
        or len(kinds) < layers
        or not all(kind in LAYER_KINDS for kind in kinds)
    ):
        raise ValueError(
            f"config.json: layer_types is {kinds!r}: it must say for each of {layers} layers "
            f"which one of {', '.join(LAYER_KINDS)} it is; choose another model if it has others"
        )
    window = getattr(hf_config, "sliding_window", None)
    if not window or not getattr(hf_config, "use_sliding_window", True):
        if "sliding_attention" in (kinds or ()):
            raise ValueError(
                "config.json: layer_types has sliding_attention, but sliding_window is "
                f"{window!r}, or use_sliding_window false: give the window's size"
            )
        return
    if type(window) is not int or window < 1:
        raise ValueError(
            f"config.json: sliding_window is {window!r}: it must be an integer, 1 or more"
        )
    if window < hf_config.max_position_embeddings and not model_class.has_windows:
        raise ValueError(
            f"sliding_window is {window!r}: {model_class.__name__} has no windows here, choose a "
            "model without one"
        )
