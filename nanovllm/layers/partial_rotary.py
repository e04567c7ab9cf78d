"""Rotary embeddings that rotate a part of each head, or none of it, or that pair neighbours.

This file says which elements are rotated; layers/rotary.py says by which angle.
"""

import torch
from torch import Tensor

from nanovllm.layers.rotary import RotaryEmbedding


class PartialRotaryEmbedding(RotaryEmbedding):
    """A rotary embedding of the first R elements of each head; `cos_sin` is [positions, R]."""

    turns_whole_heads = False

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        turning, rest = x.tensor_split([self.cos_sin.shape[1]], dim=-1)
        return torch.cat((self.turn(turning, positions), rest), dim=-1)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [T, heads, R]."""
        return super().forward(x, positions)


class InterleavedRotaryEmbedding(PartialRotaryEmbedding):
    """A partial rotary embedding in which elements 2 i and 2 i + 1 are a pair."""

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # the evens, then the odds
        turned = super().turn(halves, positions)
        return turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class NoRotaryEmbedding(RotaryEmbedding):
    """A rotation of nothing, for layers without positions (NoPE; Kazemnejad et al. 2023)."""

    def __init__(self):
        super().__init__(torch.empty(0), 0)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x
