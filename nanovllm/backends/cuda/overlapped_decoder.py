"""The decoder that overlaps the all-reduces of a long prefill with matrix products.

Between one layer's attention and the next layer's, rows are computed in micro-batches: while the
ranks sum one micro-batch, the next is computed. Attention itself needs all rows at once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.backends.cuda.fused_layers import FusedDecoder, FusedRMSNorm, add_summed_and_norm
from nanovllm.layers.context import current_metadata

MIN_ROWS = 4096  # with fewer, an all-reduce is short
MICRO_BATCH_ROWS = 6144  # the host takes longer to launch more micro-batches of fewer rows


def overlap_all_reduces(model: nn.Module) -> None:
    """Let a fused model's decoder overlap its all-reduces."""
    for module in model.modules():
        if type(module) is FusedDecoder:
            module.__class__ = OverlappedDecoder


class OverlappedDecoder(FusedDecoder):
    """A FusedDecoder that runs steps of MIN_ROWS tokens and more in micro-batches."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        if len(input_ids) < MIN_ROWS:
            return super().forward(input_ids, positions)
        count = max(2, round(len(input_ids) / MICRO_BATCH_ROWS))
        indices = current_metadata().logits_indices
        layers = self.fused_layers
        residuals = list(self.embed_tokens(input_ids).tensor_split(count))
        micro_batches: Iterator[Tensor] = map(self.first_norm(layers), residuals)
        for layer, next_norm in zip(layers, self.following_norms(layers)):
            mixer = layer.mixer
            parts = zip(*[mixer.project(x) for x in micro_batches])
            mixed = mixer.mix(tuple([torch.cat(part) for part in parts]), positions)
            if layer is layers[-1] and indices is not None:
                residual = torch.cat(residuals)[indices]
                return self.finish_layer(layer, mixed[indices], residual, next_norm)[0]
            _, after_attention, before_mlp, after_mlp = layer.norms
            output_proj = mixer.output_proj
            sums = [self.begin_sum(output_proj.partial(x)) for x in mixed.tensor_split(count)]
            micro_batches = self.finish_sums(sums, residuals, after_attention, before_mlp)
            sums = [self.begin_sum(layer.mlp.partial(x)) for x in micro_batches]
            micro_batches = self.finish_sums(sums, residuals, after_mlp, next_norm)
        return torch.cat(list(micro_batches))

    def begin_sum(self, x: Tensor):
        """Begin an all-reduce of x in place. Returns x and the work to wait for."""
        group: Any = self.embed_tokens.group
        return x, group.begin_all_reduce(x)

    def finish_sums(
        self,
        sums,
        residuals: list[Tensor],
        after: FusedRMSNorm | None,
        norm: FusedRMSNorm | None,
    ) -> Iterator[Tensor]:
        """Wait for each sum in turn, add it to its residual, and yield the total's norm.

        `after` norms the sum before it is added, `norm` the total. None: there is no such norm.
        """
        for i, (x, work) in enumerate(sums):
            work.wait()
            normed, residuals[i] = add_summed_and_norm(x, residuals[i], after, norm)
            yield normed
