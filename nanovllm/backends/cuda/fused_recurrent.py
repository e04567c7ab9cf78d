"""Fused layers with a state: Gated DeltaNet, and the short convolutions of LFM2.

Each computes by a few kernels what its plain layer does, up to its output projection.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.backends.cuda.triton import gated_delta, short_conv
from nanovllm.backends.cuda.triton.dispatch import num_processors
from nanovllm.backends.cuda.triton.gated_delta import DeltaInputs
from nanovllm.backends.cuda.triton.prefill_attention import TiledPrefill, tile_queries
from nanovllm.backends.cuda.triton.short_conv import ChunkBlocks
from nanovllm.layers.context import (
    AttentionMetadata,
    PrefillMetadata,
    current_metadata,
    forward_context,
)
from nanovllm.layers.gated_delta import GatedDeltaNet
from nanovllm.layers.short_conv import ShortConvolution
from nanovllm.models.lfm2 import GatedConvolution


class FusedGatedDeltaNet(GatedDeltaNet):
    """A Gated DeltaNet of two kernels for tokens that decode, and four for prompts."""

    @staticmethod
    def suits(plain: GatedDeltaNet) -> bool:
        """Tell whether the kernels know heads of these sizes."""
        heads = plain.heads
        return {heads.key_dim, heads.value_dim} <= {*gated_delta.SIZES}

    @property
    def output_proj(self) -> Any:
        return self.out_proj

    @property
    def convolution(self) -> ShortConvolution:
        return self.conv1d

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the tensors that `project` returns."""
        *_, values = sizes = self.heads.sizes
        return sum(sizes) + values, 2 * self.heads.num_value_heads

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.out_proj(self.mix(self.project(x), positions))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.in_proj_qkvz(x), self.in_proj_ba(x)

    def mix(self, projected: tuple[Tensor, ...], positions: Tensor) -> Tensor:
        """Compute the heads' results from q, k, v and z, and from b and a: [T, H Dv]."""
        qkvz, ba = projected
        raw, z = qkvz.tensor_split([sum(self.heads.sizes)], dim=-1)
        qkv = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
        out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        inputs = DeltaInputs(
            qkv, ba, self.A_log, self.dt_bias, self.heads.num_key_heads, self.heads.key_dim
        )
        norm: dict[str, Any] = dict(norm_weight=self.norm.weight, eps=self.norm.eps)
        conv = self.conv1d
        decodes, prefill, rows = step_of(current_metadata())
        if decodes:
            part = slice(decodes)
            convolve(conv, raw[part], rows[part], None, qkv[part], silu=True)
            gated_delta.delta_rule_token(
                inputs.rows(part), self.state, rows[part], z=z[part], out=out[part], **norm
            )
        if prefill is not None:
            part, rows, blocks = (
                tokens_of(prefill, decodes),
                rows[decodes:],
                ChunkBlocks.of(prefill),
            )
            convolve(conv, raw[part], rows, blocks, qkv[part], silu=True)
            gated_delta.delta_rule_chunks(
                inputs.rows(part), self.state, rows, blocks, z=z[part], out=out[part], **norm
            )
        return out


class FusedGatedConvolution(GatedConvolution):
    """A gated convolution of one kernel for tokens that decode, and one for prompts."""

    @property
    def output_proj(self) -> Any:
        return self.out_proj

    @property
    def convolution(self) -> ShortConvolution:
        return self.conv

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the tensors that `project` returns."""
        return (3 * len(self.conv.weight),)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.mix(self.project(x), x))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.in_proj(x),)

    def mix(self, projected: tuple[Tensor, ...], positions: Tensor) -> Tensor:
        """Convolve values between two gates: [T, 3 C] -> [T, C]."""
        (x,) = projected
        out = torch.empty(len(x), x.shape[1] // 3, dtype=x.dtype, device=x.device)
        decodes, prefill, rows = step_of(current_metadata())
        if decodes:
            part = slice(decodes)
            convolve(self.conv, x[part], rows[part], None, out[part], gated=True)
        if prefill is not None:
            part, rows, blocks = (
                tokens_of(prefill, decodes),
                rows[decodes:],
                ChunkBlocks.of(prefill),
            )
            convolve(self.conv, x[part], rows, blocks, out[part], gated=True)
        return out


FUSED_RECURRENT = (FusedGatedDeltaNet, FusedGatedConvolution)


def step_of(metadata: AttentionMetadata) -> tuple[int, PrefillMetadata | None, Tensor]:
    """Return a step's number of decoding sequences, its prompts, and all sequences' rows of state.

    In a padded step, the first prompts' tokens may lie among those of padding that decode. Kernels
    for prompts come second: they overwrite what was computed there.
    """
    assert metadata.state_rows is not None, "a model with recurrent layers gets rows in each step"
    return metadata.num_decodes, metadata.prefill, metadata.state_rows


def tokens_of(prefill: PrefillMetadata, decodes: int) -> slice:
    """Return the tokens of a step that `prefill.cu_seqlens_q` counts."""
    return slice(0 if isinstance(prefill, TiledPrefill) else decodes, None)


def convolve(
    layer: ShortConvolution,
    x: Tensor,
    rows: Tensor,
    blocks: ChunkBlocks | None,
    out: Tensor,
    **options: Any,
) -> None:
    """Run a convolution's kernel for prompts, cut into blocks; None: for one token a sequence."""
    tensors = x, layer.weight, layer.bias, layer.state, rows
    if blocks is None:
        short_conv.convolve_token(*tensors, out=out, **options)
    else:
        short_conv.convolve_chunks(*tensors, blocks, out=out, **options)


def warmup_recurrent(layer: FusedGatedDeltaNet | FusedGatedConvolution) -> None:
    """Launch the kernels that only steps with prompts launch, those of graphs and the others.

    A kernel of the delta rule has one variant for few chunks, and one for many.
    """
    weight = layer.convolution.weight
    for count in (1, num_processors(weight.device) + 1):
        # The first chunk has one token, and the others none.
        ends = torch.arange(count + 1, dtype=torch.int32, device=weight.device).clamp(max=1)
        rows = torch.zeros(count, dtype=torch.int64, device=weight.device)
        chunk = PrefillMetadata(ends, ends, 1, 1, None)
        tiled = TiledPrefill(ends, ends, 0, 0, None, tile_queries(ends, count))
        for prefill in (chunk, tiled):
            projected = tuple([weight.new_zeros(1, width) for width in layer.widths])
            with forward_context(AttentionMetadata(rows, 0, prefill=prefill, state_rows=rows)):
                layer.mix(projected, rows)
