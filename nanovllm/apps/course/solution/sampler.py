"""The sampler: a token for each row of logits, by a random number generator without a state."""

import torch
from torch import Tensor

from nanovllm.layers.sampler import philox


def uniform_noise(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """Make numbers [B, size] between 0 and 1, a function of seed, position and column alone."""
    columns = torch.arange(size)
    words = philox(seeds.unsqueeze(1), columns, positions.unsqueeze(1))[0]  # 32 random bits each
    return ((words >> 9).float() + 0.5) * 2.0**-23


def keep_likeliest(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set the logits [B, V] of tokens that are filtered out to -inf.

    top_k [B] keeps the k likeliest tokens; 0 keeps all. Then top_p [B] keeps the smallest set of
    likeliest tokens whose probabilities add up to at least top_p, of what top_k kept.
    """
    # <piece 8: filter>
    logits = logits.clone()
    for row, k in zip(logits, top_k.tolist()):
        if k:
            row[row < row.topk(k).values[-1]] = -torch.inf
    probs = logits.softmax(dim=-1)
    # The threshold t is the largest for which the tokens with probs >= t reach top_p: bisect.
    low, high = torch.zeros_like(top_p), torch.ones_like(top_p)
    for _ in range(32):
        middle = (low + high) / 2
        reached = (probs * (probs >= middle.unsqueeze(1))).sum(dim=1) >= top_p
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    drop = (probs < low.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    return logits.masked_fill(drop, -torch.inf)
    # <until then>
    # return logits
    # </piece>


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> list[int]:
    """Sample a token for each row of logits [B, V]. All other arguments are [B].

    A temperature of 0 takes the likeliest token. Otherwise a token comes with the probability
    softmax(logits / temperature), which depends on nothing but the row's own arguments.
    """
    # <piece 8: divide by the temperature, filter, add Gumbel noise>
    random = (temperatures > 0).unsqueeze(1)
    if not random.any():
        return logits.argmax(dim=1).tolist()
    scores = logits / torch.where(random, temperatures.unsqueeze(1), 1.0)
    scores = keep_likeliest(scores, top_k, top_p)
    noise = -torch.log(-torch.log(uniform_noise(seeds, positions, logits.shape[1])))
    return torch.where(random, scores + noise, logits).argmax(dim=1).tolist()
    # <until then>
    # return logits.argmax(dim=1).tolist()
    # </piece>
