"""Self-attention whose outputs are multiplied by gates, element by element (Qiu et al. 2025)."""

import torch
from torch import Tensor

from nanovllm.layers.attention import SelfAttention


class GatedSelfAttention(SelfAttention):
    """Self-attention with a gate for each element of each head's output.

    [T, hidden] -> [T, hidden]. The gates are projected from the layer's input, as the queries are.
    """

    has_gate = True

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads]
        q, k, v, gate = heads.split(counts, dim=1)  # [T, H, D], [T, G, D], [T, G, D], [T, H, D]
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        out = self.attend(q, k, v) * torch.sigmoid(gate)  # [T, H, D]
        return self.o_proj(out.flatten(1))
