"""The KV cache in FP8: K and V as codes of e4m3, with a scale each in every layer.

layers/attention.py says what is computed. This file gives the attention layers their scales.
"""

import torch

from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.linear import empty_parameter
from nanovllm.layers.shared_kv import SharedKVAttention
from nanovllm.models.transformer import CausalLM


def use_fp8_kv_cache(model: CausalLM, has_scales: bool) -> None:
    """Give the attention layers of a model scales for an FP8 KV cache, before weights are read.

    `has_scales`: whether config.json says that the checkpoint has scales. Those it lacks are 1.
    """
    model.kv_format = "in FP8 with the checkpoint's scales" if has_scales else "in FP8"
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    own = [layer for layer in layers if not isinstance(layer, SharedKVAttention)]
    for layer in own:
        layer.kv_scales = empty_parameter(2, dtype=torch.float32)
    if own == layers:
        # The loader must not pass over scales with other names: the layers' would be 1 then.
        model.unread_suffixes = ()
