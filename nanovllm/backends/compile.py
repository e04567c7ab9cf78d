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
        for uncompiled in (_UncompiledAttention, _UncompiledState):
            kind = type(module)
            if isinstance(module, uncompiled.__base__):
                if kind not in _kinds:
                    _kinds[kind] = type(f"Uncompiled{kind.__name__}", (uncompiled, kind), {})
                module.__class__ = _kinds[kind]
        if isinstance(module, Decoder):
            for layer in module.layers:
                layer.compile(dynamic=True)
