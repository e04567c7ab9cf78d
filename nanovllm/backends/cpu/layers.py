"""Layers for a CPU that replace the plain layers, and compute the same faster.

In float32, and in bfloat16 on a processor with AVX512_BF16, all layers but attention to prompts go
to C++ (cpp_ops.py) where there is a compiler. The weights are packed for that at the start. Other
products go to oneDNN, for which the weights are packed, too: PyTorch itself gives products in
float32 to MKL, which is slower. Two cores of an AMD EPYC with AVX2, PyTorch 2.13, float32,
[rows, 576] x [576, 3072]: C++ 149 and oneDNN 118 GFLOP/s for 40 rows, 153 and 144 for 256;
[rows, 576] x [576, 576]: 18 and 9 for one row.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.backends.cpu import cpp_ops
from nanovllm.layers.attention import PackedKV, PagedKV, SelfAttention, store_kv
from nanovllm.layers.context import PrefillMetadata, current_metadata
from nanovllm.layers.embedding import ParallelLMHead
from nanovllm.layers.linear import RowParallelLinear, StackedLinear
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding

# Rows that an MLP computes at once, so that what lies between its products fits the CPU's cache.
ROWS = 1024


def has_cpp(dtype: torch.dtype) -> bool:
    """Return whether there are C++ kernels for this dtype."""
    return cpp_ops.kernels_of(dtype) is not None


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN is there and computes in this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def float32_is_faster(dtype: str) -> bool:
    """Return whether a model in float32 is faster on this CPU than in the dtype of this name.

    It is faster than bfloat16 where neither C++ nor AMX multiplies bfloat16.
    """
    if dtype == "bfloat16":
        return not has_amx() and not has_cpp(torch.bfloat16)
    return dtype != "float32"


def has_amx() -> bool:
    """Return whether the processor multiplies tiles of bfloat16, as oneDNN lets it."""
    # PyTorch 2.5 cannot tell.
    return getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


def pack_weights(model: nn.Module) -> None:
    """Bring the weights of linear layers into the order in which C++ or oneDNN reads them.

    A tied head gets a packed copy of its own, because the embedding looks up rows, which a packed
    weight does not have.
    """
    for module in model.modules():
        if type(module).forward is StackedLinear.forward:
            module.__class__ = PackedLinear
        elif type(module) is RowParallelLinear:
            module.__class__ = PackedRowParallelLinear
        elif type(module) is ParallelLMHead:
            module.__class__ = PackedLMHead
        else:
            continue
        module.weight = packed(module.get_parameter("weight"))


def packed(weight: Tensor) -> nn.Parameter:
    """Copy a weight into the order in which C++ or oneDNN reads it; keep it if there is neither."""
    dtype = weight.dtype
    # The C++ code does not use AMX, which was not measured.
    leaves_amx = dtype == torch.bfloat16 and has_amx() and can_pack(dtype)
    reordered = cpp_ops.pack(weight.data) if has_cpp(dtype) and not leaves_amx else None
    if reordered is None and can_pack(dtype):
        # oneDNN chooses the order for a number of rows. The order for one row is slow for any other
        # number; the order for 64 is fast for all.
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.data, 64)
    return nn.Parameter(weight.data if reordered is None else reordered, requires_grad=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + bias with a weight that `packed` returned."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return cpp_ops.linear(x, weight, bias) if weight.dim() == 3 else F.linear(x, weight, bias)


def has_panels(module: nn.Module) -> bool:
    """Return whether a layer's weight is packed for C++."""
    return isinstance(module, (PackedLinear, PackedRowParallelLinear)) and module.weight.dim() == 3


class Packed(nn.Module):
    """A mixin that stands before the class of a layer and keeps the layer's weight packed."""

    def take_weights(self, plain: nn.Module) -> None:
        """Copy the weights of the same layer in its plain form, which is not packed."""
        for name, parameter in plain.named_parameters(recurse=False):
            if name == "weight":
                self.weight = packed(parameter)
            else:
                self.get_parameter(name).copy_(parameter)


class PackedLinear(Packed, StackedLinear):
    """A linear layer with a packed weight."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class PackedRowParallelLinear(Packed, RowParallelLinear):
    """A linear layer, split over the ranks by input, with a packed weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(linear(x, self.weight, self.bias_of_this_rank))


class PackedLMHead(Packed, ParallelLMHead):
    """A head with a packed weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, None)


def use_cpp(model: nn.Module, plain_attention: bool = False) -> None:
    """Replace layers by those that call the C++ kernels, in place.

    Layers of other classes stay as they are. So do subclasses, because they compute something else.

    plain_attention: whether attention layers stay as they are, too.
    """
    for module in model.modules():
        if type(module) is SelfAttention and not plain_attention:
            suits = CppSelfAttention.suits(module)
            module.__class__ = CppSelfAttention if suits else CppDecodeAttention
        elif type(module) is GatedMLP and module.activation is F.silu:
            module.__class__ = CppGatedMLP
        elif type(module) is RMSNorm:
            module.__class__ = CppRMSNorm


class CppRMSNorm(RMSNorm):
    """RMSNorm as one C++ kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return cpp_ops.rms_norm(x.contiguous(), self.weight, self.eps)


class CppGatedMLP(GatedMLP):
    """A gated MLP with SiLU whose activation and product are one C++ kernel."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > ROWS:
            return torch.cat([self(rows) for rows in x.split(ROWS)])
        return self.down_proj(cpp_ops.silu_and_mul(self.gate_up_proj(x)))


class CppDecodeAttention(SelfAttention):
    """Self-attention whose decoding is one C++ kernel."""

    attention_name = "C++"

    def decode(self, q: Tensor, kv: PagedKV) -> Tensor:
        return cpp_ops.decode_attention(q, kv, self.options)

    def prefill(self, q: Tensor, kv: PagedKV | PackedKV, metadata: PrefillMetadata) -> Tensor:
        """Attend within prompt chunks. Chunks of one token attend as decoding sequences do."""
        lens_q, lens_k = metadata.cu_seqlens_q.diff(), metadata.cu_seqlens_k.diff()
        is_one = lens_q == 1
        if isinstance(kv, PackedKV) or not is_one.any():
            return super().prefill(q, kv, metadata)
        tables, out = kv.block_tables, torch.empty_like(q)
        rows = is_one.repeat_interleave(lens_q)
        out[rows] = self.decode(q[rows], PagedKV(kv.cache, tables[is_one], lens_k[is_one]))
        if not is_one.all():
            longer = PagedKV(kv.cache, tables[~is_one])
            others = replace(
                metadata,
                cu_seqlens_q=F.pad(lens_q[~is_one].cumsum(0), (1, 0)),
                cu_seqlens_k=F.pad(lens_k[~is_one].cumsum(0), (1, 0)),
                block_tables=longer.block_tables,
            )
            out[~rows] = super().prefill(q[~rows], longer, others)
        return out


class CppSelfAttention(CppDecodeAttention):
    """Self-attention in which another C++ kernel norms, rotates and stores q, k and v."""

    @staticmethod
    def suits(plain: SelfAttention) -> bool:
        """Return whether the kernel computes the norms and the rotation of a plain layer."""
        norms = {type(plain.q_norm), type(plain.k_norm)}
        return type(plain.rotary) is RotaryEmbedding and norms in ({RMSNorm}, {nn.Identity})

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        metadata = current_metadata()
        q_weight, k_weight, eps = None, None, 0.0
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            q_weight, k_weight, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        q, k, v = cpp_ops.qk_norm_rope_store(
            self.qkv_proj(x),
            head_dim=self.head_dim,
            num_kv_heads=self.num_kv_heads,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            cos_sin=self.rotary.cos_sin,
            positions=positions,
            slot_mapping=metadata.slot_mapping,
            cache=self.kv_cache,
        )
        if self.kv_cache.scales is not None:
            k, v = store_kv(k, v, self.kv_cache, metadata.slot_mapping)
        return self.o_proj(self.attend_stored(q, k, v, metadata).flatten(1))
