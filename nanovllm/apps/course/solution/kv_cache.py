"""A KV cache for one sequence: the keys and values of a token are computed once, then kept."""

import torch
from torch import Tensor

from nanovllm.apps.course.solution.model import Model
from nanovllm.apps.course.solution.one_token import causal_attention


class KVCache:
    """The keys and values of a sequence's tokens, in every layer."""

    def __init__(self, model: Model) -> None:
        empty = torch.empty(0, model.num_kv_heads, model.head_dim)
        self.k = [empty] * model.num_layers
        self.v = [empty] * model.num_layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k and v [T, G, D] of new tokens, and attend to all tokens so far."""
        # <piece 2>
        self.k[layer] = torch.cat((self.k[layer], k))
        self.v[layer] = torch.cat((self.v[layer], v))
        return causal_attention(q, self.k[layer], self.v[layer])
        # </piece>


def generate(model: Model, prompt: list[int], max_tokens: int) -> list[int]:
    """Generate as one_token.generate does, but give every token to the model only once."""
    # <piece 2>
    cache, output = KVCache(model), list[int]()
    new, start = prompt, 0
    while len(output) < max_tokens and model.end_token not in output[-1:]:
        positions = torch.arange(start, start + len(new))
        hidden = model.forward(torch.tensor(new), positions, cache.attend)
        start += len(new)
        new = [int(model.logits(hidden[-1:]).argmax())]
        output += new
    return output
    # </piece>
