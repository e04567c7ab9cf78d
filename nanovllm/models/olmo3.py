"""OLMo 3: an OLMo 2 most of whose layers have a sliding window, and rope settings for each kind."""

from nanovllm.models.olmo2 import Olmo2ForCausalLM


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    has_windows = True
