"""A mixture of experts by grouped matrix products: one product for all experts, each over its own run of rows.

Same result as reference.moe, but no expert's row count comes back to the host, so a CUDA graph can hold it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm import kernels


def can_group(dtype: torch.dtype, gate_up: Tensor, down: Tensor) -> bool:
    """torch's grouped product takes bfloat16 on a GPU, with rows of a multiple of 16 bytes."""
    aligned = gate_up.shape[2] % 8 == 0 and down.shape[2] % 8 == 0
    return gate_up.is_cuda and dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


def moe(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See reference.moe."""
    num_tokens, top_k = experts.shape
    sorted_experts, order = experts.flatten().sort(stable=True)  # the T K pairs of token and expert, expert by expert
    numbers = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)  # [E], of each expert's run
    hidden = kernels.silu_and_mul(F.grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends))
    results = F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    by_token = torch.empty_like(results)
    by_token[order] = results
    return (by_token.view(num_tokens, top_k, -1) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
