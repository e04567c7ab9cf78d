"""A decoder whose steps without prompts are one C++ call.

A step of one token takes little time for its products. Python would need a good part of it to call
the kernels of each layer. The C++ code calls the same kernels in the same order, so results are
equal to the last bit, whichever steps a sequence takes part in.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.backends.cpu import cpp_ops, quantised
from nanovllm.backends.cpu.layers import CppGatedMLP, CppRMSNorm, CppSelfAttention, has_panels
from nanovllm.backends.cpu.quantised import CppInt8Weight, CppIntegerWeight
from nanovllm.layers.context import AttentionMetadata, current_metadata
from nanovllm.models.transformer import Decoder, DecoderLayer

# The kinds of weights after those of cpp_ops.PANEL_DTYPES: int8, and integers in groups.
INT8, GROUPED = 3, 4


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Declare fields of one kind for a ctypes structure."""
    return [(name, kind) for name in names.split()]


class Linear(ctypes.Structure):
    """A linear layer, as cpp_ops.cpp has it. What its kind does not need is 0."""

    _fields_ = [
        *fields(ctypes.c_void_p, "weights scales zeros bias"),
        *fields(ctypes.c_int64, "kind bits group"),
    ]


class Layer(ctypes.Structure):
    """A layer of the decoder and its part of the KV cache, as cpp_ops.cpp has them."""

    _fields_ = [
        *fields(Linear, "qkv o gate_up down"),
        *fields(
            ctypes.c_void_p, "input_norm post_norm q_norm k_norm cos_sin sinks k_cache v_cache"
        ),
        *fields(ctypes.c_int64, "hidden heads kv_heads head_dim intermediate window"),
        *fields(ctypes.c_float, "input_eps post_eps qk_eps scale softcap"),
    ]


class CppDecoder(Decoder):
    """A decoder whose steps without prompts run all layers in one C++ call."""

    # The description of the layers. It holds as long as the KV cache lies where it did, and until
    # the layers take other weights.
    described: Any = None
    described_for: list[int] | None = None

    @staticmethod
    def suits(plain: nn.Module) -> bool:
        """Return whether the C++ code computes what the layers of a decoder compute."""
        return type(plain) is Decoder and all(map(is_known, plain.layers))

    def take_weights(self, plain: nn.Module) -> None:
        """Forget the description, because the layers' weights may lie elsewhere afterwards."""
        self.described_for = None

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        metadata = current_metadata()
        first: Any = self.layers[0]
        kv = first.self_attn.kv_cache
        if metadata.prefill is not None or kv.scales is not None or not kv.k.numel():
            return super().forward(input_ids, positions)
        x = self.embed_tokens(input_ids).contiguous()  # [B] -> [B, hidden]
        self.decode(x, positions, metadata, kv.k.shape[1])
        indices = metadata.logits_indices
        return self.norm(x if indices is None else x[indices])

    def decode(
        self, x: Tensor, positions: Tensor, metadata: AttentionMetadata, block_size: int
    ) -> None:
        """Run the layers on one token of each sequence, in place: x [B, hidden]."""
        layers: Any = self.layers
        caches = [layer.self_attn.kv_cache for layer in layers]
        where = [part.data_ptr() for kv in caches for part in (kv.k, kv.v)]
        if self.described_for != where:
            self.described = (Layer * len(layers))(*map(describe, layers))
            self.described_for = where
            self.quantised_kernels = addresses_of_quantised_kernels()
        tables = metadata.block_tables
        assert tables is not None
        cpp_ops.call(
            cpp_ops.kernels_of(x.dtype),
            "decode",
            ctypes.addressof(self.quantised_kernels),
            ctypes.addressof(self.described),
            len(layers),
            x,
            positions,
            metadata.slot_mapping,
            metadata.context_lens,
            tables,
            *tables.shape,
            block_size,
        )


def addresses_of_quantised_kernels() -> Any:
    """Return the addresses of quantised.ARGUMENTS, null if no layer has loaded these kernels."""
    library: Any = quantised.load() if quantised.load.cache_info().currsize else None
    addresses = [
        library and ctypes.cast(library[name], ctypes.c_void_p).value
        for name in quantised.ARGUMENTS
    ]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def is_known(layer: Any) -> bool:
    """Return whether a layer is one that the C++ code computes."""
    if type(layer) is not DecoderLayer:
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    kinds = type(layer.input_layernorm), type(layer.post_attention_layernorm), type(attention)
    if (*kinds, type(mlp)) != (CppRMSNorm, CppRMSNorm, CppSelfAttention, CppGatedMLP):
        return False
    linears: list[Any] = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    # A product in several ranks is summed over the ranks before it goes on.
    is_whole: bool = attention.o_proj.group.size == 1
    in_float32: bool = layer.input_layernorm.weight.dtype == torch.float32
    return is_whole and all(is_known_linear(linear, in_float32) for linear in linears)


def is_known_linear(linear: Any, in_float32: bool) -> bool:
    """Return whether a linear layer has a weight that the C++ code multiplies by."""
    if not hasattr(linear, "packed"):
        return has_panels(linear)
    weight = linear.packed["weight"]
    kinds = (CppInt8Weight, CppIntegerWeight)
    return in_float32 and type(weight) in kinds and not weight.is_split


def describe(layer: Any) -> Layer:
    """Describe a layer to the C++ code. Its tensors must live as long as the description."""
    attention, mlp, options = layer.self_attn, layer.mlp, layer.self_attn.options
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    q_norm, k_norm, qk_eps = None, None, 0.0
    if isinstance(attention.q_norm, CppRMSNorm):
        q_norm, k_norm = pointer(attention.q_norm.weight), pointer(attention.k_norm.weight)
        qk_eps = attention.q_norm.eps
    return Layer(
        qkv=describe_linear(attention.qkv_proj),
        o=describe_linear(attention.o_proj),
        gate_up=describe_linear(mlp.gate_up_proj),
        down=describe_linear(mlp.down_proj),
        input_norm=pointer(first.weight),
        post_norm=pointer(second.weight),
        q_norm=q_norm,
        k_norm=k_norm,
        cos_sin=pointer(attention.rotary.cos_sin),
        sinks=pointer(options.sinks),
        k_cache=pointer(attention.kv_cache.k),
        v_cache=pointer(attention.kv_cache.v),
        hidden=len(first.weight),
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        intermediate=mlp.down_proj.in_features,
        window=options.window or 2**62,
        input_eps=first.eps,
        post_eps=second.eps,
        qk_eps=qk_eps,
        scale=options.scale,
        softcap=options.softcap or 0.0,
    )


def describe_linear(layer: Any) -> Linear:
    """Describe a linear layer, whose weight may be quantised, to the C++ code."""
    bias = pointer(layer.bias)
    if not hasattr(layer, "packed"):
        kind = cpp_ops.PANEL_DTYPES.index(layer.weight.dtype)
        return Linear(weights=pointer(layer.weight), bias=bias, kind=kind)
    weight = layer.packed["weight"]
    codes, scales = pointer(weight.codes), pointer(weight.scales)
    if isinstance(weight, CppInt8Weight):
        return Linear(weights=codes, scales=scales, bias=bias, kind=INT8)
    return Linear(
        weights=codes,
        scales=scales,
        zeros=pointer(weight.zeros) if weight.scheme.has_zeros else None,
        bias=bias,
        kind=GROUPED,
        bits=weight.scheme.bits,
        group=weight.words_of_group,
    )


def pointer(x: Tensor | None) -> int | None:
    """Return the address of a dense tensor's values; None: null."""
    if x is None:
        return None
    assert x.is_contiguous()
    return x.data_ptr()
