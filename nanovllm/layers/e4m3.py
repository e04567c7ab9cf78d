"""Numbers in FP8, in the format e4m3: a sign, four bits of exponent and three of mantissa."""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # that e4m3 holds


def to_e4m3(x: Tensor) -> Tensor:
    """Round numbers to e4m3. Those beyond 448 become 448; NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)
