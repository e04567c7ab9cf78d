"""A mixture of experts: for each token, a router picks a few of many small gated MLPs.

Every rank holds a shard of each expert's width, as of a dense MLP's, so no token moves between
ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import ReplicatedLinear, empty_parameter
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.weight_slice import WeightSlice

Gating = Callable[[Tensor, Tensor], Tensor]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up (SwiGLU; Shazeer 2020)."""
    return F.silu(gate) * up


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The gating of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1).

    Gates are clamped to at most `limit`, ups to the range from -limit to limit.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


class MixtureOfExperts(nn.Module):
    """The sum of each token's `top_k` experts, weighted by the router.

    [T, hidden] -> [T, hidden].
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        group: ParallelGroup,
        *,
        renormalize: bool,  # scale the weights of the picked experts to a sum of 1
        bias: bool = False,  # of the router and the experts
        experts: type["Experts"] | None = None,  # how checkpoints store them; None: Experts
        gating: Gating = swiglu,  # takes an expert's gates and ups
    ):
        super().__init__()
        self.gate = ReplicatedLinear(hidden_size, num_experts, bias=bias)
        sizes = hidden_size, intermediate_size, num_experts
        self.experts = (experts or Experts)(*sizes, group, bias=bias, gating=gating)
        self.top_k = top_k
        self.renormalize = renormalize
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(dim=-1, dtype=torch.float32)  # [T, experts]
        weights, experts = probs.topk(self.top_k, dim=-1)  # [T, K] each
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.group.all_reduce(self.experts(x, weights, experts))


class SharedExpertMixture(MixtureOfExperts):
    """A mixture of experts beside a gated MLP, the shared expert, which every token passes.

    A gate of its own weighs the shared expert for each token.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        group: ParallelGroup,
        *,
        shared_size: int,  # the width of the shared expert
        renormalize: bool,
    ):
        sizes = hidden_size, intermediate_size, num_experts, top_k
        super().__init__(*sizes, group, renormalize=renormalize)
        self.shared_expert = GatedMLP(hidden_size, shared_size, group)
        self.shared_expert_gate = ReplicatedLinear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return super().forward(x) + shared


class Experts(nn.Module):
    """All experts of a layer, stacked. A checkpoint has a tensor for each expert and projection."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        group: ParallelGroup,
        *,
        bias: bool = False,
        gating: Gating = swiglu,
    ):
        super().__init__()
        self.intermediate_size = intermediate_size
        self.group = group
        shard = group.shard(intermediate_size, "moe_intermediate_size, or intermediate_size,")
        self.gate_up_proj = empty_parameter(num_experts, 2 * shard, hidden_size)
        self.down_proj = empty_parameter(num_experts, hidden_size, shard)
        self.gate_up_bias = empty_parameter(num_experts, 2 * shard) if bias else None
        self.down_bias = empty_parameter(num_experts, hidden_size) if bias else None
        self.gating = gating

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Compute this rank's part of the weighted sums: x [T, N] -> [T, N].

        weights [T, K] and experts [T, K]: each token's K experts, and how much each counts.
        """
        top_k = experts.shape[1]
        # Sort the T * K pairs of token and expert by expert.
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.down_proj)).tolist()
        results = x.new_empty(len(order), x.shape[1])
        for expert, pairs in enumerate(order.split(counts)):
            if len(pairs):
                results[pairs] = self.run(expert, x[pairs // top_k])
        # Add each token's experts in their order, so that the sum does not depend on other tokens.
        return (results.view(-1, top_k, x.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def run(self, expert: int, x: Tensor) -> Tensor:
        gate_up_bias, down_bias = (
            None if bias is None else bias[expert] for bias in self.biases_of_this_rank
        )
        gate, up = F.linear(x, self.gate_up_proj[expert], gate_up_bias).chunk(2, dim=-1)
        return F.linear(self.gating(gate, up), self.down_proj[expert], down_bias)

    @property
    def biases_of_this_rank(self) -> tuple[Tensor | None, Tensor | None]:
        """The biases of gate_up and of down; the sum over the ranks must count the latter once."""
        return self.gate_up_bias, self.down_bias if self.group.rank == 0 else None

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
