"""The configuration of a model: what config.json says, under the names that transformers uses.

models/ decides which configurations make a model that runs here.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nanovllm.weights.model_files import TO_SAFETENSORS, read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The fields of a configuration that models read, by type; OF_EXPERTS for models with experts. The
# config.json of a Qwen3 holds all of them.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
COUNTS = (*SIZES, "head_dim")
FLAGS = ("tie_word_embeddings", "attention_bias", "use_sliding_window")
OTHERS = ("architectures", "rms_norm_eps", "hidden_act", "sliding_window")
OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")


def load_hf_config(folder: str | Path) -> "PretrainedConfig | SimpleNamespace":
    """Read the folder's configuration. Raises ValueError if there is none that can be read.

    Where config.json lacks fields that models read, transformers adds its defaults; its import
    takes seconds. No code of the folder is run: the configuration is an object of a class of
    transformers, or a plain namespace.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        only_gguf = any(Path(folder).glob("*.gguf"))
        hint = f". GGUF files are not read: {TO_SAFETENSORS}" if only_gguf else ""
        raise ValueError(
            f"{folder} has no config.json: give the folder of a Hugging Face model{hint}"
        )
    values = read_json(path)
    quantization = values.get("quantization_config")
    if not isinstance(quantization, dict | None):
        raise ValueError(
            f"{path}: quantization_config is {quantization!r}: it must be an object, or be left out"
        )
    if says_all(values):
        return SimpleNamespace(**values)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ValueError(f"{path}: model_type is {model_type!r}: it must be a name such as 'qwen3'")
    from transformers import CONFIG_MAPPING, PretrainedConfig

    try:
        # One that transformers does not know may still say enough: whoever builds models says which
        # ones run.
        kind = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else PretrainedConfig
        return language_config(kind.from_dict(values))
    except Exception as error:  # every release raises other ones
        raise ValueError(f"{path} cannot be read: {error}") from error


def language_config(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration of the language model within one of a model that also sees."""
    language: Any = getattr(config, "text_config", None)
    if not hasattr(language, "num_hidden_layers"):
        return config
    for name in ("architectures", "dtype", "quantization_config", "tie_word_embeddings"):
        if getattr(config, name, None) is not None:
            setattr(language, name, getattr(config, name))
    return language


def says_all(values: dict[str, Any]) -> bool:
    """Return whether a configuration's values hold every field that models read."""
    if values.get("model_type") not in ("qwen3", "qwen3_moe") or values.get("use_sliding_window"):
        return False  # other families read more, and windows need the kinds of layers
    counts: tuple[str, ...] = COUNTS
    flags: tuple[str, ...] = FLAGS
    if "moe" in f"{values.get('model_type')} {values.get('architectures')}".lower():
        # Transformers knows the number of experts under two names.
        experts = values.get("num_experts")
        if values.get("num_local_experts", experts) != experts:
            return False
        if type(values.get("mlp_only_layers")) is not list:
            return False
        counts, flags = COUNTS + OF_EXPERTS, (*FLAGS, "norm_topk_prob")
    rope = values.get("rope_parameters") or values  # newer transformers' form, or the older one
    return (
        all(type(values.get(name)) is int for name in counts)
        and all(type(values.get(name)) is bool for name in flags)
        and all(name in values for name in OTHERS)
        and isinstance(rope, dict)
        and type(rope.get("rope_theta")) in (int, float)
        and values.get("rope_scaling") is None
        and rope.get("rope_type", "default") == "default"
    )


def load_eos_ids(folder: Path) -> frozenset[int]:
    """Read the end-of-sequence tokens of a model folder.

    generation_config.json comes first; config.json counts where that file names none.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = read_json(path).get("eos_token_id") if path.exists() else None
        if eos is None:
            continue
        eos = eos if isinstance(eos, list) else [eos]
        if any(type(i) is not int or i < 0 for i in eos):
            raise ValueError(
                f"{path}: eos_token_id is {eos}: it must be a token id or a list of them"
            )
        return frozenset(eos)
    return frozenset()
