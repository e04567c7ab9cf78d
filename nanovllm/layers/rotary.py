"""The table that rotary position embedding reads: how far each pair of a head's elements turns at each position.

How far that is, layers/rope_scaling.py knows. The rotation itself is fused with its neighbours in kernels.
"""

import torch
from torch import Tensor, nn

from nanovllm.layers.rope_scaling import rope_frequencies


class RotaryEmbedding(nn.Module):
    """`cos_sin` [max_position, D] float32: the cosines of D / 2 angles, then their sines."""

    def __init__(self, frequencies: Tensor, max_position: int, scale: float = 1.0):
        super().__init__()
        frequencies = frequencies.to(torch.get_default_device())
        # float32 whatever the model's dtype: bfloat16 cannot count positions past 256.
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def keep_positions(self, count: int) -> None:
        """Forget the angles of later ones."""
        self.cos_sin = self.cos_sin[:count].clone()

    @classmethod
    def from_config(cls, config, head_dim: int) -> "RotaryEmbedding":
        frequencies, scale = rope_frequencies(config, head_dim)
        return cls(frequencies, config.max_position_embeddings, scale)
