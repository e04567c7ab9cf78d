"""Attention over the paged KV cache in plain PyTorch: the CPU path, and the oracle of the other back ends.

Shapes: B decoding sequences, P tokens of N prompt chunks, H query heads, G KV heads, D head size, W block-table width.
A cache is [blocks, block_size, G, D].
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.utils.context import PrefillMetadata


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, meta: PrefillMetadata, scale: float
) -> Tensor:
    """Causal attention of prompt chunks: q [P, H, D], k and v [P, G, D] -> [P, H, D].

    With block tables, K and V are read from the cache, where the chunks' own are already written; without, from k and v.
    """
    out = torch.empty_like(q)
    starts_q, starts_k = meta.cu_seqlens_q.tolist(), meta.cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        begin, end = starts_q[i], starts_q[i + 1]
        len_q, len_k = end - begin, starts_k[i + 1] - starts_k[i]
        if meta.block_tables is None:
            k_i, v_i = k[begin:end], v[begin:end]
        else:
            k_i, v_i = (_gather(cache, meta.block_tables[i : i + 1], len_k)[0] for cache in (k_cache, v_cache))
        mask = None
        if len_q < len_k:  # query j is token len_k - len_q + j of its sequence
            mask = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).tril_(len_k - len_q)
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q[begin:end], k_i, v_i))
        o = F.scaled_dot_product_attention(*heads_first, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        out[begin:end] = o[0].transpose(0, 1)
    return out


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, lens: Tensor, tables: Tensor, scale: float) -> Tensor:
    """One query a sequence over its cached tokens: q [B, H, D], lens [B] int32, tables [B, W] int32 -> [B, H, D]."""
    batch, num_heads, head_dim = q.shape
    max_len = int(lens.max())
    k, v = (_gather(cache, tables, max_len).transpose(1, 2) for cache in (k_cache, v_cache))  # [B, G, L, D]
    mask = torch.arange(max_len, device=q.device) < lens.view(-1, 1, 1, 1)  # [B, 1, 1, L]
    # The query heads of a group share their K and V: let them be the rows of one small attention problem.
    q = q.view(batch, k.shape[1], -1, head_dim)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).view(batch, num_heads, head_dim)


def _gather(cache: Tensor, tables: Tensor, length: int) -> Tensor:
    """The first `length` cached tokens of each sequence: tables [B, W] -> [B, length, G, D]."""
    block_size = cache.shape[1]
    tables = tables[:, : -(-length // block_size)]
    return cache[tables].flatten(1, 2)[:, :length]
