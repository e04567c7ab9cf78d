"""Rotary frequencies: the angle by which a position turns each pair of a head's elements.

This file computes the frequencies from the base and the scaling of a configuration, as transformers
does. layers/rotary.py makes the table of cosines and sines.
"""

import math
from typing import Any

import torch
from torch import Tensor

LARGEST = 3e38  # of a setting: frequencies are float32
# Settings of the scalings. Each is a number above 0; null, or 0 where it says so, means that it is
# not given.
NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor")
NUMBERS_OR_ZERO = (
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "llama_4_scaling_beta",
)


def rope_frequencies(
    rope: dict[str, Any], head_dim: int, max_positions: int | None = None
) -> tuple[Tensor, float]:
    """Compute the angle that a position adds to each pair, and a factor on cosines and sines.

    R elements of a head are rotated: all head_dim, or the part that the settings say.

    Args:
        rope: the settings, in the form of ModelConfig.rope_settings.
        max_positions: positions that will be asked for; None: all that the model supports.
    Returns:
        The angles, [R / 2] float32 on the CPU, and the factor.
    Raises:
        ValueError: no scaling here implements the settings, or they describe none.
    """
    rope = rope | {"max_positions": max_positions or rope["max_position_embeddings"]}
    scale = SCALINGS.get(rope["rope_type"]) if isinstance(rope["rope_type"], str) else None
    if scale is None:
        names = ", ".join(SCALINGS)
        raise ValueError(
            f"rope_type is {rope['rope_type']!r}, not implemented: choose a model with one of "
            f"{names}"
        )
    check_settings(rope)
    whole = rope["rope_type"] == "proportional"  # which keeps still what does not turn
    size = head_dim if whole else rotary_size(rope, head_dim)
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
    try:
        return scale(1.0 / float(rope["rope_theta"]) ** exponents, rope)
    except KeyError as error:
        raise ValueError(
            f"rope_type is {rope['rope_type']!r}, which needs {error}: add it to config.json"
        ) from error


def rotary_size(rope: dict, head_dim: int) -> int:
    """Return how many elements of a head are rotated."""
    factor = rope["partial_rotary_factor"]
    size = int(head_dim * factor) if type(factor) in (int, float) and 0 < factor <= 1 else 0
    if size < 2 or size % 2:
        raise ValueError(
            f"config.json: partial_rotary_factor is {factor!r} of a head_dim of {head_dim}: an "
            "even number of elements must turn, 2 or more"
        )
    return size


def check_settings(rope: dict) -> None:
    """Raise ValueError for settings that are not usable numbers."""

    def refuse(name: str, must: str) -> None:
        raise ValueError(
            f"config.json: {name} of its rope settings is {rope[name]!r}: it must be {must}"
        )

    for name in NUMBERS:
        if name in rope and not (type(rope[name]) in (int, float) and 0 < rope[name] < LARGEST):
            refuse(name, "a finite number above 0")
    for name in NUMBERS_OR_ZERO:
        if name in rope and not (type(rope[name]) in (int, float) and 0 <= rope[name] < LARGEST):
            refuse(name, "a finite number, 0 or more")
    for name in ("short_factor", "long_factor"):
        if name in rope and not (
            isinstance(rope[name], list)
            and all(type(x) in (int, float) and 0 < x < LARGEST for x in rope[name])
        ):
            refuse(name, "a list of finite numbers above 0")
    if rope["rope_theta"] <= 1:
        refuse("rope_theta", "above 1")
    original = rope["original_max_position_embeddings"]
    if type(original) is not int or not 0 < original < LARGEST:
        refuse("original_max_position_embeddings", "an integer, 1 or more")
    if rope.get("high_freq_factor", math.inf) <= rope.get("low_freq_factor", 0):
        refuse("high_freq_factor", f"above low_freq_factor, {rope['low_freq_factor']}")


# Each scaling takes the unscaled frequencies and the settings. It returns the scaled frequencies
# and the factor on cosines and sines. It raises KeyError for a setting that it needs and lacks.


def _default(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    """Divide every angle by `factor` (position interpolation; Chen et al. 2023)."""
    return frequencies / rope["factor"], 1.0


def _llama3(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    """Keep fast pairs, interpolate slow ones, and blend those between (Llama 3.1).

    A fast pair turns often within the original context.
    """
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope["factor"], 1.0


def _yarn(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    """Interpolate slow pairs and keep fast ones (YaRN; Peng et al. 2023).

    A factor on q and k sharpens attention.
    """
    pairs, original = len(frequencies), rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / original

    def pair_that_turns(times: float) -> float:
        """Return the (fractional) pair that turns `times` times within the original context."""
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(rope["rope_theta"])

    low: float = pair_that_turns(rope.get("beta_fast") or 32)
    high: float = pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = torch.arange(pairs, dtype=torch.float32, device="cpu")
    kept = 1 - ((ramp - low) / (high - low or 0.001)).clamp(0, 1)
    blended = kept * frequencies + (1 - kept) * frequencies / factor
    return blended, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: dict, factor: float) -> float:
    def sharpening(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in rope:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return sharpening(rope["mscale"]) / sharpening(rope["mscale_all_dim"])
    return sharpening(1.0)


def _longrope(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    """Divide each pair's angle by a factor of its own (LongRoPE; Ding et al. 2024).

    There is one list of factors for contexts up to the original one, and one for longer contexts.
    Keys are cached once and shared, so a model takes one list for all positions: that of longer
    contexts, if more positions are asked for than the original context has.
    """
    original = rope["original_max_position_embeddings"]
    name = "long_factor" if rope["max_positions"] > original else "short_factor"
    if len(rope[name]) != len(frequencies):
        raise ValueError(
            f"config.json: {name} of its rope settings has {len(rope[name])} numbers: it must have "
            f"one for each of {len(frequencies)} pairs"
        )
    factor = rope.get("factor") or rope["max_position_embeddings"] / original
    sharpening = 1.0
    if factor > 1 and original > 1:
        sharpening = math.sqrt(1 + math.log(factor) / math.log(original))
    factors = torch.tensor(rope[name], dtype=torch.float32, device="cpu")
    return frequencies / factors, rope.get("attention_factor", sharpening)


def _proportional(frequencies: Tensor, rope: dict) -> tuple[Tensor, float]:
    """Turn the fastest pairs, as many as partial_rotary_factor says, and keep the others still.

    A pair turns as fast as it would if all turned (Gemma 4).
    """
    turning = rotary_size(rope, 2 * len(frequencies)) // 2
    turns = torch.arange(len(frequencies), device="cpu") < turning
    return frequencies * turns / rope.get("factor", 1.0), 1.0


SCALINGS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
