"""Overlap the all-reduces of a long prefill with its products.

Between one attention and the next, rows go in micro-batches: while the ranks sum one of them, the
next is computed. Attention itself needs all rows at once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.backends.cuda.fused_layers import FusedDecoder, FusedRMSNorm, add_summed_and_norm
from nanovllm.layers.context import current_metadata

MIN_ROWS = 4096  # with fewer, an all-reduce is short
MICRO_BATCH_ROWS = 6144  # more and smaller ones take the host longer to launch


def overlap_all_reduces(model: nn.Module) -> None:
    """Of a model that was fused."""
    for module in model.modules():
        if type(module) is FusedDecoder:
            module.__class__ = OverlappedDecoder


class OverlappedDecoder(FusedDecoder):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        if len(input_ids) < MIN_ROWS:
            return super().forward(input_ids, positions)
        count = max(2, round(len(input_ids) / MICRO_BATCH_ROWS))
        indices = current_metadata().logits_indices
        layers = self.fused_layers
        residuals = list(self.embed_tokens(input_ids).tensor_split(count))
        micro_batches: Iterator[Tensor] = map(self.first_norm(layers), residuals)
        for layer, next_norm in zip(layers, self.following_norms(layers)):
            attention = layer.self_attn
            qkv = torch.cat([attention.qkv_proj(x) for x in micro_batches])
            heads = attention.heads(qkv, positions)
            if layer is layers[-1] and indices is not None:
                residual = torch.cat(residuals)[indices]
                return self.finish_layer(layer, heads[indices], residual, next_norm)[0]
            _, after_attention, before_mlp, after_mlp = layer.norms
            sums = [self.begin_sum(attention.o_proj.partial(x)) for x in heads.tensor_split(count)]
            micro_batches = self.finish_sums(sums, residuals, after_attention, before_mlp)
            sums = [self.begin_sum(layer.mlp.partial(x)) for x in micro_batches]
            micro_batches = self.finish_sums(sums, residuals, after_mlp, next_norm)
        return torch.cat(list(micro_batches))

    def begin_sum(self, x: Tensor):
        """This rank's part of a sum -> that, and the all-reduce that is under way in its place."""
        group: Any = self.embed_tokens.group
        return x, group.begin_all_reduce(x)

    def finish_sums(
        self,
        sums,
        residuals: list[Tensor],
        after: FusedRMSNorm | None,
        norm: FusedRMSNorm | None,
    ) -> Iterator[Tensor]:
        """Wait for each sum in turn, add it to its residual, and yield the norm of that."""
        for i, (x, work) in enumerate(sums):
            work.wait()
            normed, residuals[i] = add_summed_and_norm(x, residuals[i], after, norm)
            yield normed
