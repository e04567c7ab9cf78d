"""A mixture of experts in the place of an MLP: a router picks for each token a few small SwiGLU
MLPs out of many.

Every rank has a shard of each expert's width, as with a dense MLP, so no token moves between ranks.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import ReplicatedLinear, empty_parameter
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice


class MixtureOfExperts(nn.Module):
    """[T, hidden] -> [T, hidden]: the sum of each token's `top_k` experts, weighted by the router's
    probabilities.
    """

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
        self.gate = ReplicatedLinear(hidden_size, num_experts)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, group)
        self.top_k = top_k
        self.renormalize = renormalize
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(dim=-1, dtype=torch.float32)  # [T, experts]
        weights, experts = probs.topk(self.top_k, dim=-1)  # [T, K] each
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.group.all_reduce(self.experts(x, weights, experts))


class Experts(nn.Module):
    """The experts' weights, stacked; a checkpoint has a tensor for each expert and projection."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, group: ParallelGroup
    ):
        super().__init__()
        self.intermediate_size = intermediate_size
        self.group = group
        shard = group.shard(intermediate_size, "moe_intermediate_size")
        self.gate_up_proj = empty_parameter(num_experts, 2 * shard, hidden_size)
        self.down_proj = empty_parameter(num_experts, hidden_size, shard)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, N], weights and experts [T, K] -> [T, N]: this rank's part of the weighted sums."""
        top_k = experts.shape[1]
        # The T K pairs of token and expert, expert by expert.
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.down_proj)).tolist()
        results = x.new_empty(len(order), x.shape[1])
        for expert, pairs in enumerate(order.split(counts)):
            if len(pairs):
                gate, up = F.linear(x[pairs // top_k], self.gate_up_proj[expert]).chunk(2, dim=-1)
                results[pairs] = F.linear(F.silu(gate) * up, self.down_proj[expert])
        # The sum goes over each token's experts in their order: it does not depend on the others in
        # the batch.
        return (results.view(-1, top_k, x.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        num_experts, hidden, shard = self.down_proj.shape
        ours = slice(self.group.rank * shard, (self.group.rank + 1) * shard)
        everything = slice(None)
        for expert in range(num_experts):
            gate, up = self.gate_up_proj[expert].split(shard)
            shape = (self.intermediate_size, hidden)
            yield WeightSlice(f"{path}.{expert}.gate_proj.weight", gate, (ours, everything), shape)
            yield WeightSlice(f"{path}.{expert}.up_proj.weight", up, (ours, everything), shape)
            down, shape = self.down_proj[expert], (hidden, self.intermediate_size)
            yield WeightSlice(f"{path}.{expert}.down_proj.weight", down, (everything, ours), shape)
