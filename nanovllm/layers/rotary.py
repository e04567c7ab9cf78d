"""Rotary position embedding. layers/rope_scaling.py computes its frequencies."""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.rope_scaling import rope_frequencies


class RotaryEmbedding(nn.Module):
    """The rotation of pairs of a head's elements by angles that grow with the position.

    (RoPE; Su et al. 2021.) Element i of a head's first half and element i of its second half are a
    pair. `cos_sin` [positions, D] float32 holds the cosines of a position's D / 2 angles, then
    their sines.
    """

    cos_sin: Tensor
    turns_whole_heads = True

    def __init__(self, frequencies: Tensor, max_positions: int, scale: float = 1.0):
        super().__init__()
        frequencies = frequencies.to(torch.get_default_device())
        # float32 whatever the model's dtype: bfloat16 cannot count positions past 256.
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    @classmethod
    def from_settings(
        cls, rope: dict[str, Any], head_dim: int, max_positions: int | None = None
    ) -> "RotaryEmbedding":
        """Make the rotary embedding that a configuration describes.

        Args:
            rope: the settings, in the form of ModelConfig.rope_settings.
            max_positions: positions that will be asked for; None: all that the model supports.
        """
        max_positions = max_positions or rope["max_position_embeddings"]
        frequencies, scale = rope_frequencies(rope, head_dim, max_positions)
        if cls.turns_whole_heads and 2 * len(frequencies) != head_dim:
            raise ValueError(
                f"config.json: by its partial_rotary_factor, {2 * len(frequencies)} of a head's "
                f"{head_dim} elements turn: only 1.0 is implemented for this family, choose "
                "another model"
            )
        return cls(frequencies, max_positions, scale)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [T, heads, D] by the angles of positions [T] int64."""
        cos, sin = self.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2] each
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)

    def scale_queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """Multiply queries [T, H, D] by the factors of their positions, which are 1 here."""
        return q


class QueryScalingRotaryEmbedding(RotaryEmbedding):
    """A rotary embedding that scales queries up at late positions.

    A query at position p is multiplied by 1 + beta ln(1 + floor(p / original)), where `original` is
    the context that the model was first trained on (Llama 4, Ministral 3). So attention stays
    sharp in longer contexts. `query_scales` [positions] float32 holds the factors.
    """

    query_scales: Tensor

    @classmethod
    def from_settings(
        cls, rope: dict[str, Any], head_dim: int, max_positions: int | None = None
    ) -> RotaryEmbedding:
        """Make the rotary embedding. It is a plain one if all its factors would be 1."""
        count = max_positions or rope["max_position_embeddings"]
        rotary = super().from_settings(rope, head_dim, count)  # checks the settings
        beta, original = rope.get("llama_4_scaling_beta"), rope["original_max_position_embeddings"]
        if not beta or count <= original:
            return RotaryEmbedding.from_settings(rope, head_dim, count)
        # float32 whatever the model's dtype, as the angles are.
        scales = 1 + beta * torch.log(1 + (torch.arange(count) // original).float())
        rotary.register_buffer("query_scales", scales, persistent=False)
        return rotary

    def scale_queries(self, q: Tensor, positions: Tensor) -> Tensor:
        return q * self.query_scales[positions].to(q.dtype).view(-1, 1, 1)
