"""The filters that keep the likeliest tokens: min_p, top_k and top_p.

Shapes: R rows of a step, V vocabulary entries.
"""

import torch
from torch import Tensor

from nanovllm.sampling_params import SamplingParams


def keep_likeliest(
    logits: Tensor,
    *,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    margin: Tensor,
    width: int,
) -> Tensor:
    """Find the tokens that pass min_p, top_k and top_p: logits [R, V] float32 -> [R, V] bool.

    Args:
        temperatures: [R, 1] float32, above 0.
        top_k: [R, 1] integers; V: no bound.
        top_p: [R, 1] float32; 1: no bound.
        margin: [R, 1] float32, a bound of logit - greatest logit: temperature * log(min_p).
        width: number of likeliest tokens to sort. V if a row has top_p without top_k, else the
            largest top_k of the rows; 0 if no row has either.

    A token as likely as the last one kept is kept too, so that the set is a function of the logits
    alone. top_p is a share of the probability that min_p and top_k keep, such ties included.
    """
    threshold = logits.amax(dim=-1, keepdim=True) + margin
    if width:
        best = logits.topk(width).values  # likeliest first
        kth = best.gather(1, top_k.clamp(max=width) - 1)
        bound = torch.where(top_k > width, threshold, torch.maximum(threshold, kth))
        kept = best >= bound
        # In float64: the sum of many small probabilities decides which token crosses the bound.
        probs = (best / temperatures).masked_fill(~kept, -torch.inf).double().softmax(dim=-1)
        # Tokens that tie with the last sorted one may lie beyond `width`. Include their
        # probability.
        count, num_beyond = kept.sum(dim=-1, keepdim=True), (logits >= bound).sum(-1, keepdim=True)
        probs = probs / (1 + (num_beyond - count) * probs[:, -1:])
        # Keep the token that crosses the bound: the tokens before it do not reach top_p.
        kept &= (probs.cumsum(dim=-1) - probs < top_p) | (top_p >= 1)
        # If logits are NaN, no token is kept: clamp keeps the index valid.
        last = best.gather(1, kept.sum(dim=-1, keepdim=True).sub(1).clamp(min=0))
        # `best` is too short for rows without top_k and top_p: they use the min_p threshold alone.
        threshold = torch.where(top_k > width, threshold, last)
    return logits >= threshold


def num_top_k(params: SamplingParams, vocab_size: int) -> int:
    """Return top_k as a number of tokens: vocab_size if it sets no bound."""
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def num_to_sort(params: SamplingParams, vocab_size: int) -> int:
    """Return how many of the likeliest tokens must be sorted for top_k and top_p."""
    k = num_top_k(params, vocab_size)
    return k if k < vocab_size or params.top_p < 1 else 0
