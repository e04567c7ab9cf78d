"""Rotary position embedding, and how a Hugging Face configuration describes its angles."""

import math

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Turn pairs of a head's elements by angles that grow with the position (RoPE; Su et al. 2021).

    Element i of a head's first half and element i of its second half are a pair. `cos_sin` [positions, D] float32 holds
    the cosines of the D / 2 angles of a position, then their sines.
    """

    def __init__(self, frequencies: Tensor, max_positions: int, scale: float = 1.0):
        super().__init__()
        frequencies = frequencies.to(torch.get_default_device())
        # float32 whatever the model's dtype: bfloat16 cannot count positions past 256.
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    @classmethod
    def from_config(cls, config, head_dim: int, max_positions: int | None = None) -> "RotaryEmbedding":
        """`max_positions`: as many as are needed; None: all that the model supports."""
        frequencies, scale = rope_frequencies(config, head_dim)
        return cls(frequencies, max_positions or config.max_position_embeddings, scale)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, D], positions [T] int64 -> x, rotated."""
        cos, sin = self.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2] each
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def rope_frequencies(config, head_dim: int) -> tuple[Tensor, float]:
    """The angle a position adds to each of a head's D / 2 pairs, and the factor on cosines and sines."""
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if kind not in SCALINGS:
        raise ValueError(f"rope_type is {kind!r}, not implemented: choose a model with one of {', '.join(SCALINGS)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor is {rope['partial_rotary_factor']}: only 1.0 is implemented")
    numbers = {name: value for name, value in rope.items() if name == "rope_theta" or "factor" in name}
    if wrong := [name for name, value in numbers.items() if type(value) not in (int, float, type(None)) or value == 0]:
        value = rope[wrong[0]]
        raise ValueError(f"config.json: {wrong[0]} of its rope settings is {value!r}: it must be a number other than 0")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    try:
        return SCALINGS[kind](1.0 / rope["rope_theta"] ** exponents, rope)
    except KeyError as error:
        raise ValueError(f"rope_type is {kind!r}, which needs {error}: add it to config.json") from error


def rope_parameters(config) -> dict:
    """The configuration's rope settings in one form, whichever transformers wrote it in."""
    rope = {**(getattr(config, "rope_parameters", None) or {}), **(getattr(config, "rope_scaling", None) or {})}
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return rope


# Each scaling takes the unscaled frequencies and the settings, and returns the scaled ones and the factor.


def _default(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al. 2023): every angle is `factor` times smaller."""
    return frequencies / rope["factor"], 1.0


def _llama3(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    """Llama 3.1: interpolate the pairs that turn too slowly to complete a circle in the original context, and blend."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope["factor"], 1.0


def _yarn(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow pairs, keep fast ones, and sharpen attention by a factor on q and k."""
    pairs, factor = len(frequencies), rope["factor"]

    def pair_that_turns(times: float) -> float:
        """The (fractional) pair that turns so many times in the original context."""
        length = rope["original_max_position_embeddings"]
        return pairs * math.log(length / (times * 2 * math.pi)) / math.log(rope["rope_theta"])

    low, high = pair_that_turns(rope.get("beta_fast") or 32), pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = torch.arange(pairs, dtype=torch.float32, device="cpu")
    kept = 1 - ((ramp - low) / (high - low or 0.001)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: dict) -> float:
    def sharpening(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return sharpening(rope["mscale"]) / sharpening(rope["mscale_all_dim"])
    return sharpening(1.0)


SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
