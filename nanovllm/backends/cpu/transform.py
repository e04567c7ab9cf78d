"""The transform that makes a loaded model fast on a CPU."""

from torch import nn

from nanovllm.backends.cpu.decoder import CppDecoder
from nanovllm.backends.cpu.layers import can_pack, has_cpp, pack_weights, use_cpp
from nanovllm.backends.cpu.quantised import use_cpp_weights


def use_cpu_layers(model: nn.Module, *, plain_attention: bool = False) -> None:
    """Replace the layers of a loaded model by faster ones, in place. The model may be of any dtype.

    In a dtype that oneDNN does not compute in on this CPU, the layers stay as they are.

    plain_attention: whether attention layers stay as they are in any case.
    """
    dtype = next(model.parameters()).dtype
    if has_cpp(dtype) or can_pack(dtype):
        pack_weights(model)
    use_cpp_weights(model)
    if has_cpp(dtype):
        use_cpp(model, plain_attention)
        for module in model.modules():
            if CppDecoder.suits(module):
                module.__class__ = CppDecoder
