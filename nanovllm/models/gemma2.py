"""Gemma 2: a Gemma 3 that does not norm q and k, and turns them by one base. It caps the scores of
attention and the logits.
"""

from nanovllm.models.gemma3 import Gemma3ForCausalLM


class Gemma2ForCausalLM(Gemma3ForCausalLM):
    qk_norm = None
