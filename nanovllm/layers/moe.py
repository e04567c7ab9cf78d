"""A mixture of experts in the place of an MLP: a router picks for each token a few small SwiGLU MLPs out of many.

Every rank has a share of each expert's width, as with a dense MLP, so no token moves between ranks.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.layers.linear import ColumnParallelLinear, empty_parameter
from nanovllm.distributed.collectives import RowParts, UnfinishedSum, whole
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice


class MixtureOfExperts(nn.Module):
    """[T, hidden] -> [T, hidden]: the sum of each token's `top_k` experts, weighted by the router's probabilities."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        group: ParallelGroup,
        *,
        renormalize: bool,  # let the weights of the experts that were picked sum to 1
    ):
        super().__init__()
        self.gate = ColumnParallelLinear(hidden_size, num_experts, ParallelGroup())  # whole on every rank
        self.experts = Experts(hidden_size, intermediate_size, num_experts, group)
        self.top_k = top_k
        self.renormalize = renormalize

    def forward(self, x: Tensor | RowParts) -> Tensor | UnfinishedSum:
        x = whole(x)  # rows may come in parts, and experts sort all tokens at once
        return self.experts(x, self.gate(x), self.top_k, self.renormalize)


class Experts(nn.Module):
    """The experts' weights, stacked; a checkpoint has a tensor for each expert and projection."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, group: ParallelGroup):
        super().__init__()
        self.intermediate_size = intermediate_size
        self.group = group
        share = group.shard(intermediate_size, "moe_intermediate_size")
        self.gate_up_proj = empty_parameter(num_experts, 2 * share, hidden_size)
        self.down_proj = empty_parameter(num_experts, hidden_size, share)

    def forward(self, x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> Tensor | UnfinishedSum:
        out = kernels.moe(x, logits, self.gate_up_proj, self.down_proj, top_k, renormalize)
        return self.group.sum_in_norm(out)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        num_experts, hidden, share = self.down_proj.shape
        part, all_of_it = slice(self.group.rank * share, (self.group.rank + 1) * share), slice(None)
        for expert in range(num_experts):
            gate, up = self.gate_up_proj[expert].split(share)
            for name, destination in (("gate_proj", gate), ("up_proj", up)):
                shape = (self.intermediate_size, hidden)
                yield WeightSlice(f"{path}.{expert}.{name}.weight", destination, (part, all_of_it), shape)
            shape = (hidden, self.intermediate_size)
            yield WeightSlice(f"{path}.{expert}.down_proj.weight", self.down_proj[expert], (all_of_it, part), shape)
