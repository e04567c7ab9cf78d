"""The registry of models: the name of an architecture in config.json -> the class that runs it."""

from collections.abc import Callable

from nanovllm.layers.linear import give_memory, parameters_without_memory
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models.checks import check_sizes, check_supported
from nanovllm.models.gemma2 import Gemma2ForCausalLM
from nanovllm.models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from nanovllm.models.glm4 import Glm4ForCausalLM, GlmForCausalLM
from nanovllm.models.gpt_oss import GptOssForCausalLM
from nanovllm.models.granite import GraniteForCausalLM
from nanovllm.models.llama import LlamaForCausalLM, MistralForCausalLM
from nanovllm.models.olmo2 import Olmo2ForCausalLM
from nanovllm.models.olmo3 import Olmo3ForCausalLM
from nanovllm.models.phi3 import Phi3ForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.models.seed_oss import SeedOssForCausalLM
from nanovllm.models.smollm3 import SmolLM3ForCausalLM
from nanovllm.models.transformer import CausalLM
from nanovllm.weights.hf_config import SIZES

MODELS: dict[str, type[CausalLM]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Olmo3ForCausalLM": Olmo3ForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
    "GptOssForCausalLM": GptOssForCausalLM,
    "GlmForCausalLM": GlmForCausalLM,
    "Glm4ForCausalLM": Glm4ForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
    "SeedOssForCausalLM": SeedOssForCausalLM,
}


def build_model(
    hf_config,
    group: ParallelGroup,
    max_model_len: int | None = None,
    exchange_layers: Callable[[CausalLM], None] | None = None,
) -> CausalLM:
    """Build this rank's part of the model that `hf_config` describes, without its weights.

    Its parameters are on the default device, in the default dtype. `max_model_len`: positions that
    will be asked for; None: all that the model supports. `exchange_layers` is called with the model
    before its parameters have memory, and may replace layers.
    Raises ValueError if no class here runs the model, or if there is no memory for it.
    """
    model_class = find_model(hf_config)
    try:
        with parameters_without_memory():
            model = model_class(hf_config, group, max_model_len)
            model.num_parameters = sum(parameter.numel() for parameter in model.parameters())
            if exchange_layers is not None:
                exchange_layers(model)
        give_memory(model)
        return model
    except AttributeError as error:
        if error.obj is not hf_config:
            raise
        raise ValueError(
            f"config.json has no {error.name}, which {model_class.__name__} needs: check its "
            "architectures and model_type"
        ) from error
    except RuntimeError as error:  # from an allocator: making layers does nothing but allocate
        sizes = ", ".join(f"{name} {getattr(hf_config, name)}" for name in SIZES)
        raise ValueError(
            f"there is no memory for the model that config.json describes ({sizes}): choose a "
            f"smaller one, or a device with more memory ({error})"
        ) from error


def find_model(hf_config) -> type[CausalLM]:
    """Find the class that runs `hf_config`.

    Raises ValueError for anything that the configuration asks for and the class does not do.
    """
    names = getattr(hf_config, "architectures", None) or []
    names_here = [name for name in MODELS if isinstance(names, list) and name in names]
    if not names_here:
        raise ValueError(f"architectures is {names!r}: this library runs {', '.join(MODELS)}")
    model_class = MODELS[names_here[0]]
    check_sizes(hf_config)
    check_supported(hf_config, model_class)
    model_class.check(hf_config)
    return model_class
