"""The embedding and the head of a model, each split over the ranks by vocabulary entry.

Shards differ in size where the number of ranks does not divide the vocabulary. So nothing is
padded: every logit belongs to a real entry, and none needs a mask before sampling.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import empty_parameter
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice


class VocabParallelEmbedding(nn.Module):
    """The embedding of tokens: token ids [T] -> [T, hidden].

    Each rank looks up the entries that it holds; the sum over the ranks is the embedding.
    """

    is_never_quantised = True  # because few of its rows are read at a time

    def __init__(self, vocab_size: int, hidden_size: int, group: ParallelGroup):
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        self.vocab_start, self.vocab_end = group.vocab_starts(vocab_size)[group.rank :][:2]
        self.weight = empty_parameter(self.vocab_end - self.vocab_start, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        elsewhere = (token_ids < self.vocab_start) | (token_ids >= self.vocab_end)
        local_ids = (token_ids - self.vocab_start).masked_fill(elsewhere, 0)
        hidden = F.embedding(local_ids, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        return self.group.all_reduce(hidden)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        ours = (slice(self.vocab_start, self.vocab_end), slice(None))
        shape = (self.vocab_size, self.weight.shape[1])
        yield WeightSlice(f"{path}.weight", self.weight, ours, shape, must_be_finite=False)


class ScaledEmbedding(VocabParallelEmbedding):
    """An embedding that is multiplied by `scale`, in the weight's dtype."""

    def __init__(self, vocab_size: int, hidden_size: int, group: ParallelGroup, *, scale: float):
        super().__init__(vocab_size, hidden_size, group)
        self.scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids) * self.scale


class ParallelLMHead(VocabParallelEmbedding):
    """The head: hidden states [R, hidden] -> logits [R, vocab_end - vocab_start] of this rank.

    A head that is tied to an embedding shares its parameter and reads nothing from the checkpoint.
    """

    is_never_quantised = False

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: ParallelGroup,
        *,
        tied_to: VocabParallelEmbedding | None = None,
    ):
        super().__init__(vocab_size, hidden_size, group)
        self.tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to.weight

    def untie(self) -> None:
        """Give the head a parameter of its own, which the loader is to fill."""
        self.tied = False
        self.weight = nn.Parameter(torch.empty_like(self.weight), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        if not self.tied:
            yield from super().weight_slices(path)
