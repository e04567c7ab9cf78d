"""The registry of models: the name of an architecture in config.json -> the class that runs it."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.control_groups import control_groups
from nanovllm.layers.linear import give_memory, parameters_without_memory
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models.gemma2 import Gemma2ForCausalLM
from nanovllm.models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from nanovllm.models.gemma4 import Gemma4ForCausalLM, Gemma4ForConditionalGeneration
from nanovllm.models.glm4 import Glm4ForCausalLM, GlmForCausalLM
from nanovllm.models.gpt_oss import GptOssForCausalLM
from nanovllm.models.granite import GraniteForCausalLM
from nanovllm.models.lfm2 import Lfm2ForCausalLM
from nanovllm.models.llama import LlamaForCausalLM, MistralForCausalLM
from nanovllm.models.ministral3 import Ministral3ForCausalLM, Mistral3ForConditionalGeneration
from nanovllm.models.model_config import ModelConfig, language_model_of
from nanovllm.models.olmo2 import Olmo2ForCausalLM
from nanovllm.models.olmo3 import Olmo3ForCausalLM
from nanovllm.models.phi3 import Phi3ForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
from nanovllm.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.models.qwen3_next import Qwen3NextForCausalLM
from nanovllm.models.seed_oss import SeedOssForCausalLM
from nanovllm.models.smollm3 import SmolLM3ForCausalLM
from nanovllm.models.transformer import CausalLM
from nanovllm.weights.model_files import read_config_json

# The fields that decide how much memory a model takes.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)

MODELS: dict[str, type[CausalLM]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForConditionalGeneration,
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeForConditionalGeneration,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Lfm2ForCausalLM": Lfm2ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Ministral3ForCausalLM": Ministral3ForCausalLM,
    "Mistral3ForConditionalGeneration": Mistral3ForConditionalGeneration,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Olmo3ForCausalLM": Olmo3ForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Gemma4ForConditionalGeneration": Gemma4ForConditionalGeneration,
    "GptOssForCausalLM": GptOssForCausalLM,
    "GlmForCausalLM": GlmForCausalLM,
    "Glm4ForCausalLM": Glm4ForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
    "SeedOssForCausalLM": SeedOssForCausalLM,
}


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read the configuration of the model in a folder. Raises ValueError if it cannot be run."""
    return read_model_config(read_config_json(folder))


def read_model_config(json: dict[str, Any]) -> ModelConfig:
    """Read the content of a config.json.

    Raises ValueError for anything that it asks for and the class of its model does not do.
    """
    json = language_model_of(json)
    names = json.get("architectures") or []
    names_here = [name for name in MODELS if isinstance(names, list) and name in names]
    if not names_here:
        raise ValueError(
            f"config.json: architectures is {names!r}: this library runs {', '.join(MODELS)}"
        )
    model_class = MODELS[names_here[0]]
    config = model_class.config_class.from_json(json | {"architecture": names_here[0]})
    check_quantization(config, model_class)
    check_attention(config)
    return config


def check_quantization(config: ModelConfig, model_class: type[CausalLM]) -> None:
    """Raise ValueError for MXFP4 of gpt-oss in a model that stores experts in another way."""
    method = (config.quantization_config or {}).get("quant_method")
    if method == "mxfp4" and not model_class.stacks_experts:
        raise ValueError(
            f"config.json: quantization_config is set, with quant_method {method!r}, which "
            f"{config.architecture} does not do: choose another checkpoint of the model"
        )


def check_attention(config: ModelConfig) -> None:
    """Raise ValueError if no layer has attention, because nothing would fill KV blocks."""
    kinds = config.layer_types[: config.num_hidden_layers]
    if not {"full_attention", "sliding_attention"}.intersection(kinds):
        raise ValueError(
            f"config.json: layer_types is {list(kinds)}: no layer has attention, and models "
            "without any do not run here; choose another one"
        )


def find_model(config: ModelConfig) -> type[CausalLM]:
    """Return the class that runs the model of a configuration."""
    return MODELS[config.architecture]


def build_model(
    config: ModelConfig,
    group: ParallelGroup,
    max_model_len: int | None = None,
    exchange_layers: Callable[[CausalLM], None] | None = None,
) -> CausalLM:
    """Build this rank's part of the model that `config` describes, without its weights.

    Its parameters are on the default device, in the default dtype. `max_model_len`: positions that
    will be asked for; None: all that the model supports. `exchange_layers` is called with the model
    before its parameters have memory, and may replace layers.
    Raises ValueError if there is no memory for the model.
    """
    try:
        with parameters_without_memory():
            model = find_model(config)(config, group, max_model_len)
            model.num_parameters = sum(parameter.numel() for parameter in model.parameters())
            if exchange_layers is not None:
                exchange_layers(model)
        check_ram(model, group.size)
        give_memory(model)
        return model
    except RuntimeError as error:  # from an allocator: making layers does nothing but allocate
        sizes = ", ".join(f"{name} {getattr(config, name)}" for name in SIZES)
        raise ValueError(
            f"there is no memory for the model that config.json describes ({sizes}): choose a "
            f"smaller one, or a device with more memory ({error})"
        ) from error


def check_ram(model: nn.Module, ranks: int) -> None:
    """Raise RuntimeError if the weights of `ranks` ranks on a CPU are larger than its memory.

    Linux grants such memory, and kills the process that uses it.
    """
    if torch.get_default_device().type != "cpu":
        return
    needed = ranks * sum(parameter.nbytes for parameter in model.parameters())
    there_is, limit = usable_ram()
    if needed > there_is:
        raise RuntimeError(
            f"its weights take {needed / 2**30:,.1f} GiB, and {limit} "
            f"{there_is / 2**30:,.1f} GiB; the options dtype and quantization can make them smaller"
        )


def usable_ram(root: Path = Path("/")) -> tuple[int, str]:
    """Return the number of bytes of memory that this process may use, and what limits it.

    The machine's memory is the limit, or that of a control group, such as a container's.
    """
    limits = [(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine has")]
    for folder, version in control_groups("memory", root):
        path = folder / {1: "memory.limit_in_bytes", 2: "memory.max"}[version]
        with suppress(OSError, ValueError):  # the file is not there, or says "max"
            limits.append((int(path.read_text()), f"its control group's limit ({path}) is"))
    return min(limits)
