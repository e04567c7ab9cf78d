"""OLMo 3: an OLMo 2 with a sliding window in most layers, and rope settings by kind of layer."""

from nanovllm.models.olmo2 import Olmo2ForCausalLM


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    has_windows = True
