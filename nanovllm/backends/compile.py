"""The plain layers compiled by torch.compile, with no kernel written by hand.

Attention over the KV cache is not compiled: only the device knows how long the contexts are, and
torch.compile's kernels do not read block tables. Nor is the recurrence of layers with a state. So
each layer is compiled in two parts, the one before these and the one after them.
"""

import torch
from torch import Tensor, nn

from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.recurrent import RecurrentLayer
from nanovllm.models.transformer import Decoder

# The subclass made for each class of attention or recurrent layer. All modules and models share it,
# because torch.compile would compile a layer anew for every further class.
_kinds: dict[type, type] = {}


class _UncompiledAttention(SelfAttention):
    """Self-attention that torch.compile leaves as it is."""

    @torch.compiler.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v)


class _UncompiledState(RecurrentLayer):
    """A recurrent layer whose state torch.compile leaves alone."""

    @torch.compiler.disable
    def recur(self, *inputs: Tensor) -> Tensor:
        return super().recur(*inputs)


def compile_layers(model: nn.Module) -> None:
    """Let the decoder's layers compile themselves at their first call.

    All layers share the compiled code, which serves any number of tokens.
    """
    for module in list(model.modules()):
        if isinstance(module, SelfAttention):
            module.__class__ = _subclass(_UncompiledAttention, type(module))
        if isinstance(module, RecurrentLayer):
            module.__class__ = _subclass(_UncompiledState, type(module))
        if isinstance(module, Decoder):
            for layer in module.layers:
                layer.compile(dynamic=True)


def _subclass(uncompiled: type, kind: type) -> type:
    """Return the subclass of a layer's class that torch.compile leaves alone in part."""
    if kind not in _kinds:
        _kinds[kind] = type(f"Uncompiled{kind.__name__}", (uncompiled, kind), {})
    return _kinds[kind]
