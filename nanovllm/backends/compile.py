"""Let torch.compile make the kernels, of the plain layers, without any written by hand.

Attention and the KV cache stay as they are: how long the contexts are is known on the device alone,
and what torch.compile makes does not read block tables. So a layer becomes what comes before
attention and what comes after it.
"""

import torch
from torch import Tensor, nn

from nanovllm.layers.attention import SelfAttention
from nanovllm.models.transformer import Decoder

# One for all alike, in this model and the next: each other class would be compiled anew.
_kinds: dict[type, type] = {}


class _Uncompiled(SelfAttention):
    @torch.compiler.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v)


def compile_layers(model: nn.Module) -> None:
    """Compile the layers at their first call: once for all, and for any number of tokens."""
    for module in list(model.modules()):
        if isinstance(module, SelfAttention):
            kind = type(module)
            if kind not in _kinds:
                _kinds[kind] = type(f"Uncompiled{kind.__name__}", (_Uncompiled, kind), {})
            module.__class__ = _kinds[kind]
        if isinstance(module, Decoder):
            for layer in module.layers:
                layer.compile(dynamic=True)
