"""The table that rotary position embedding reads: how far each pair of a head's elements turns at each position.

Knows how a Hugging Face configuration says it, in the older form (rope_theta, rope_scaling) and the newer one
(rope_parameters). The rotation itself is fused with its neighbours in kernels.
"""

import torch
from torch import Tensor, nn


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

    @classmethod
    def from_config(cls, config, head_dim: int) -> "RotaryEmbedding":
        frequencies, scale = rope_frequencies(config, head_dim)
        return cls(frequencies, config.max_position_embeddings, scale)


def rope_frequencies(config, head_dim: int) -> tuple[Tensor, float]:
    """The angle a position adds to each of a head's D / 2 pairs, and the factor on cosines and sines."""
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if kind not in SCALINGS:
        raise ValueError(f"rope_type is {kind!r}, which is not implemented: choose a model with one of {list(SCALINGS)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor is {rope['partial_rotary_factor']}: only whole heads (1.0) are rotated")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    return SCALINGS[kind](1.0 / rope["rope_theta"] ** exponents, rope)


def rope_parameters(config) -> dict:
    """The configuration's rope settings in one form, whichever transformers wrote it in."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    return rope


def _default(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    return frequencies, 1.0


SCALINGS = {"default": _default}
