"""How one request's tokens are drawn and when it ends."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature: 0 is greedy. max_tokens: the most tokens to draw. ignore_eos: go on past end-of-sequence."""

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, (int, float)) or isinstance(self.temperature, bool):
            raise TypeError(f"temperature is {self.temperature!r}: use a number, 0 for greedy")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: use 0 (greedy) or a positive number")
        if not isinstance(self.max_tokens, int) or isinstance(self.max_tokens, bool):
            raise TypeError(f"max_tokens is {self.max_tokens!r}: use an integer")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: use 1 or more")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos is {self.ignore_eos!r}: use True or False")
