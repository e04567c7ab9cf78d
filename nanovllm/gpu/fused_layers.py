"""Replace a model's plain layers by ones that compute the same with fewer and faster kernels.

Two things are done differently from the plain model. A layer's small operations are fused into
Triton kernels. And what attention or an MLP adds to the residual stream is not added there: the
next norm sums it over the ranks, adds it and norms the result, in one kernel. Whatever a family
does in its own way stays as it is, and the rest is fused around it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.gpu.cuda_graph import SIZES, size_for
from nanovllm.kernels.attention_backends import AttentionBackend
from nanovllm.kernels.triton import moe
from nanovllm.kernels.triton.allreduce_norm import sum_add_rms_norm
from nanovllm.kernels.triton.attention import TiledPrefill
from nanovllm.kernels.triton.elementwise import add_rms_norm, qk_norm_rope_store, rms_norm
from nanovllm.kernels.triton.linear import gated_linear, linear
from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.context import current_metadata
from nanovllm.layers.embedding import ParallelLMHead
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    StackedLinear,
)
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.moe import MixtureOfExperts
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.transformer import Decoder, DecoderLayer


def fuse(model: nn.Module, backend: AttentionBackend) -> None:
    """Let the model's layers run fused where they are of a plain class and of no unusual kind."""
    for module in reversed(list(model.modules())):  # children before their parents
        fused = FUSED.get(type(module))
        if fused is not None and (not hasattr(fused, "suits") or fused.suits(module)):
            module.__class__ = fused
            if isinstance(module, FusedSelfAttention):
                module.backend = backend


class FusedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FusedLinear(StackedLinear):
    """Before any class of column-parallel linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FusedColumnParallelLinear(FusedLinear, ColumnParallelLinear):
    pass


class FusedMergedColumnParallelLinear(FusedLinear, MergedColumnParallelLinear):
    pass


class FusedQKVParallelLinear(FusedLinear, QKVParallelLinear):
    pass


class FusedRowParallelLinear(RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor, spare: Tensor | None = None) -> Tensor:
        """This rank's part of the sum. The result may take the memory of `spare`."""
        return linear(x, self.weight, self.bias_of_this_rank, spare)


class FusedLMHead(ParallelLMHead):
    def forward(self, hidden: Tensor) -> Tensor:
        # Each few numbers of rows are a kernel of cuBLAS to load, which took 20 to 40 ms, on an
        # H200. Those of a decode step are there already.
        rows = len(hidden)
        padding = (size_for(rows, SIZES) or rows) - rows
        if padding:
            hidden = F.pad(hidden, (0, 0, 0, padding))
        return linear(hidden, self.weight, None)[:rows]


class FusedSelfAttention(SelfAttention):
    backend: AttentionBackend
    o_proj: FusedRowParallelLinear

    @staticmethod
    def suits(plain: SelfAttention) -> bool:
        norms = {type(plain.q_norm), type(plain.k_norm)}
        return type(plain.rotary) is RotaryEmbedding and norms in ({FusedRMSNorm}, {nn.Identity})

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.o_proj(self.heads(self.qkv_proj(x), positions))

    def heads(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """qkv [T, (H + 2G) D], which is overwritten -> what the heads attend to [T, H D]."""
        metadata = current_metadata()
        norms: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0)
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q, k, v = qk_norm_rope_store(
            qkv,
            self.head_dim,
            self.num_kv_heads,
            *norms,
            self.rotary.cos_sin,
            positions,
            metadata.slot_mapping,
            self.k_cache,
            self.v_cache,
        )
        decodes = metadata.num_decodes
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes:
            lens, tables = metadata.decode_inputs
            self.backend.decode(
                q[:decodes],
                self.k_cache,
                self.v_cache,
                lens,
                tables,
                self.scale,
                metadata.shared_prefix_len,
                out[:decodes],
            )
        if metadata.prefill is not None:
            # Tiles count from the step's first token.
            of_chunks = slice(0 if isinstance(metadata.prefill, TiledPrefill) else decodes, None)
            self.backend.prefill(
                q[of_chunks],
                k[of_chunks],
                v[of_chunks],
                self.k_cache,
                self.v_cache,
                metadata.prefill,
                self.scale,
                out[of_chunks],
            )
        return out.flatten(1)  # [T, H, D] -> [T, H D]


class FusedGatedMLP(GatedMLP):
    down_proj: FusedRowParallelLinear

    @staticmethod
    def suits(plain: GatedMLP) -> bool:
        return plain.activation is F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum; it may take the memory of x."""
        hidden = gated_linear(x, self.gate_up_proj.weight, self.gate_up_proj.bias)
        return self.down_proj.partial(hidden, spare=x)


class FusedMixtureOfExperts(MixtureOfExperts):
    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum."""
        experts = self.experts
        return moe.moe(
            x, self.gate(x), experts.gate_up_proj, experts.down_proj, self.top_k, self.renormalize
        )


class FusedDecoderLayer(DecoderLayer):
    """One that FusedDecoder knows how to run. By itself it runs as a plain one does."""

    self_attn: FusedSelfAttention
    mlp: FusedGatedMLP | FusedMixtureOfExperts

    @staticmethod
    def suits(plain: DecoderLayer) -> bool:
        return (
            type(plain.self_attn) is FusedSelfAttention
            and type(plain.mlp) in (FusedGatedMLP, FusedMixtureOfExperts)
            and type(plain.input_layernorm) is FusedRMSNorm
            and type(plain.post_attention_layernorm) is FusedRMSNorm
        )


class FusedDecoder(Decoder):
    """Passes from block to block what the last one adds, not yet summed over ranks, and the
    residual stream before it.
    """

    norm: FusedRMSNorm
    # Run a layer of each kind alone: they launch all kernels that there are.
    outline = False

    @staticmethod
    def suits(plain: Decoder) -> bool:
        layers = {type(layer) for layer in plain.layers}
        return type(plain.norm) is FusedRMSNorm and layers == {FusedDecoderLayer}

    @property
    def fused_layers(self) -> list[FusedDecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, FusedDecoderLayer)]

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        indices = current_metadata().logits_indices
        layers = self.fused_layers
        if self.outline:
            layers = outlined(layers, with_last=indices is not None)
        residual = self.embed_tokens(input_ids)  # [T] -> [T, hidden]
        x = layers[0].input_layernorm(residual)
        for layer, next_norm in zip(layers, self.following_norms(layers)):
            heads = layer.self_attn.heads(layer.self_attn.qkv_proj(x), positions)
            if layer is layers[-1] and indices is not None:
                # No token attends to the last layer's result: only what is wanted of it need be
                # computed.
                x, residual = self.finish_layer(layer, heads[indices], residual[indices], next_norm)
            else:
                x, residual = self.finish_layer(layer, heads, residual, next_norm, spare=x)
        return x

    def following_norms(self, layers: Sequence[FusedDecoderLayer]) -> list[RMSNorm]:
        """The norm that comes after each layer."""
        return [*(layer.input_layernorm for layer in layers[1:]), self.norm]

    def finish_layer(
        self,
        layer: FusedDecoderLayer,
        heads: Tensor,
        residual: Tensor,
        next_norm: RMSNorm,
        spare: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What follows attention: heads [T, H D] and residual [T, hidden] -> (normed, residual)."""
        x = layer.self_attn.o_proj.partial(heads, spare)
        x, residual = self.add_and_norm(x, residual, layer.post_attention_layernorm)
        return self.add_and_norm(layer.mlp.partial(x), residual, next_norm)

    def add_and_norm(self, x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """total = residual + the sum of the ranks' x -> (norm(total), total).

        The results may overwrite x and residual.
        """
        # A group of several ranks knows more than a ParallelGroup: see distributed/collectives.py.
        group: Any = self.embed_tokens.group
        if group.size > 1:
            if (rows := group.shared_rows(x)) is not None:
                return sum_add_rms_norm(x, residual, norm.weight, norm.eps, rows)
            x = group.all_reduce(x)
        return add_rms_norm(x, residual, norm.weight, norm.eps)


def outlined(layers: list[FusedDecoderLayer], with_last: bool) -> list[FusedDecoderLayer]:
    """The first layer of each kind, and the last of all if that does something else."""
    last = layers[-1]
    first_of_kind = {type(layer.mlp): layer for layer in reversed(layers)}
    if not with_last:
        return list(first_of_kind.values())
    return [*(layer for layer in first_of_kind.values() if layer is not last), last]


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    RMSNorm: FusedRMSNorm,
    ColumnParallelLinear: FusedColumnParallelLinear,
    MergedColumnParallelLinear: FusedMergedColumnParallelLinear,
    QKVParallelLinear: FusedQKVParallelLinear,
    RowParallelLinear: FusedRowParallelLinear,
    ParallelLMHead: FusedLMHead,
    SelfAttention: FusedSelfAttention,
    GatedMLP: FusedGatedMLP,
    MixtureOfExperts: FusedMixtureOfExperts,
    DecoderLayer: FusedDecoderLayer,
    Decoder: FusedDecoder,
}
