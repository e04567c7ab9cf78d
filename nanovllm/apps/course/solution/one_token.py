"""One token at a time, without a cache: every token computes the whole sequence again."""

import torch
from torch import Tensor

from nanovllm.apps.course.solution.model import Model


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to all tokens up to each token's own: q [Tq, H, D] -> [Tq, H, D].

    k and v are [Tk, G, D]. The queries belong to the last Tq of the Tk tokens. H / G query heads
    in a row share a key-value head. A score is divided by the square root of D.
    """
    # <piece 1>
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
    # </piece>


def next_token(model: Model, token_ids: list[int]) -> int:
    """Compute the likeliest token after `token_ids`."""
    # <piece 1>
    tokens, positions = torch.tensor(token_ids), torch.arange(len(token_ids))
    hidden = model.forward(tokens, positions, lambda layer, q, k, v: causal_attention(q, k, v))
    return int(model.logits(hidden[-1:]).argmax())
    # </piece>


def generate(model: Model, prompt: list[int], max_tokens: int) -> list[int]:
    """Generate up to `max_tokens` tokens. The last one is `model.end_token` if the text ends."""
    # <piece 1>
    output: list[int] = []
    while len(output) < max_tokens and model.end_token not in output[-1:]:
        output.append(next_token(model, prompt + output))
    return output
    # </piece>
