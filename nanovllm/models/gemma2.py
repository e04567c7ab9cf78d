"""Gemma 2: a Gemma 3 without norms of q and k and with one base of rotation for all layers.

It caps attention scores and logits.
"""

from nanovllm.models.gemma3 import Gemma3ForCausalLM


class Gemma2ForCausalLM(Gemma3ForCausalLM):
    qk_norm = None
