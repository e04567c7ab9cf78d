"""The product of a mixture's router for the rows of a decode step.

A router has few outputs, so the product's time is not that of reading its weights: it is that of
starting, of waiting for the first bytes, and of adding up what programs computed that share the
columns. Here, each program has its weights before the inputs are ready. It writes its sums as they
are, and the kernel that picks experts adds them up: see moe.py.

Shapes: T tokens, E experts, N width of a token, S programs that share the columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.backends.cuda.triton.dispatch import (
    MAX_ROWS,
    can_overlap,
    cdiv,
    next_power_of_2,
    overlap,
    wait_for_inputs,
)

# Of a program. For 2 to 256 rows of the routers of gpt-oss-20b and Qwen3-30B-A3B on an H200.
TOKENS, EXPERTS, COLUMNS = 32, 64, 256


class PartialLogits(NamedTuple):
    """The logits of a router whose parts are not added up yet."""

    parts: Tensor  # [S, T, E] float32
    bias: Tensor | None  # [E]

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits: [T, E]."""
        return self.parts.shape[1:]


def suits(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `partial_logits` serves a router. One token has a kernel of its own: gemv.py."""
    return (
        1 < len(x) <= MAX_ROWS
        and x.dtype == weight.dtype
        and x.is_contiguous()
        and weight.is_contiguous()
        and can_overlap(x.device)
    )


def partial_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> PartialLogits:
    """Compute x @ weight.T in parts: x [T, N], weight [E, N], bias [E].

    No running kernel may write to the weights: the kernel reads them before others have ended.
    """
    (tokens, width), experts = x.shape, len(weight)
    splits = cdiv(width, COLUMNS)
    block_t, block_e = (
        max(16, min(most, next_power_of_2(size)))
        for most, size in ((TOKENS, tokens), (EXPERTS, experts))
    )
    parts = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
    _router_kernel[(cdiv(tokens, block_t), cdiv(experts, block_e), splits)](
        *(x, weight, parts, tokens, experts, width, block_t, block_e, COLUMNS), **overlap(x)
    )
    return PartialLogits(parts, bias)


@triton.jit(do_not_specialize=["T"])
def _router_kernel(
    x,
    weight,
    parts,
    T,
    E: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(2)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    column = split * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token, is_expert, is_column = (token < T)[:, None], expert < E, (column < N)[None, :]
    weights = tl.load(
        weight + expert[:, None] * N + column[None, :],
        mask=is_expert[:, None] & is_column,
        other=0.0,
    )
    wait_for_inputs(PDL)
    rows = tl.load(x + token[:, None] * N + column[None, :], mask=is_token & is_column, other=0.0)
    sums = tl.dot(rows, weights.T, input_precision="ieee")
    at = parts + (split * T + token[:, None]) * E + expert[None, :]
    tl.store(at, sums, mask=is_token & is_expert[None, :])
