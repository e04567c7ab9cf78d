"""Draw tokens from logits that are split over the ranks by vocabulary entry."""

import torch
from torch import Tensor

from nanovllm.utils.parallel import ParallelGroup

LOW_WORD = 0xFFFFFFFF


def choose_over_ranks(tokens: Tensor, values: Tensor, group: ParallelGroup) -> Tensor:
    """Each rank's best token [B] int64 and its value [B] float32 -> the best of all ranks [B], the lowest in a tie.

    Ranks exchange one integer a row instead of its logits. It orders as (value, -token) does, so its maximum decides.
    """
    if group.size == 1:
        return tokens
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, its equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # compares as an integer as the float does: negative ones run backwards
    keys = (ordered.long() << 32) | (LOW_WORD - tokens)
    return LOW_WORD - (group.maximum(keys) & LOW_WORD)
