"""Attention on a CPU that neither pads every sequence to the longest nor copies K and V that lie in
order.

Shapes are those of layers/attention.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.attention import SelfAttention, gather_kv
from nanovllm.layers.context import AttentionMetadata, PrefillMetadata

# Tokens: small enough to waste little of a sequence's last page, large enough to keep a core busy
PAGE = 64


class PagedSelfAttention(SelfAttention):
    @staticmethod
    def suits(plain: SelfAttention) -> bool:
        return plain.softcap is None

    def decode(self, q: Tensor, metadata: AttentionMetadata) -> Tensor:
        lens, tables = metadata.decode_inputs
        return decode_attention(
            q, self.k_cache, self.v_cache, lens, tables, self.scale, self.window
        )

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, metadata: PrefillMetadata) -> Tensor:
        return prefill_attention(
            q, k, v, self.k_cache, self.v_cache, metadata, self.scale, self.window
        )


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: PrefillMetadata,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of prompt chunks: q [P, H, D], k and v [P, G, D] -> [P, H, D].

    With block tables, K and V are read from the cache, where the chunks' own are already written;
    without, from k and v.
    """
    out = torch.empty_like(q)
    starts_q, starts_k = meta.cu_seqlens_q.tolist(), meta.cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        begin, end = starts_q[i], starts_q[i + 1]
        len_q, len_k = end - begin, starts_k[i + 1] - starts_k[i]
        if meta.block_tables is None or len_q == len_k:  # its own are all there is
            k_i, v_i = k[begin:end], v[begin:end]
        else:
            k_i, v_i = (
                gather_kv(cache, meta.block_tables[i : i + 1], len_k)[0]
                for cache in (k_cache, v_cache)
            )
        mask = None
        is_local = window is not None and window < len_k
        if len_q < len_k or is_local:  # query j is token len_k - len_q + j of its sequence
            mask = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).tril_(len_k - len_q)
        if mask is not None and is_local:
            mask.triu_(len_k - len_q - window + 1)
        # Heads first.
        q_i, k_i, v_i = (x.transpose(0, 1).unsqueeze(0) for x in (q[begin:end], k_i, v_i))
        o = F.scaled_dot_product_attention(
            q_i, k_i, v_i, mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        out[begin:end] = o[0].transpose(0, 1)
    return out


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lens: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None = None,
    contain_nan: bool = False,
) -> Tensor:
    """Each page of each sequence is an attention problem of its own: q [B, H, D] -> [B, H, D].

    Their results are merged by the weight that each page's log-sum-exp gives it, as split-KV
    decoding does (Dao et al. 2023).

    A weight of 0 does not hide a NaN. So where there is one, all is computed again with
    `contain_nan`, more slowly: it stays with the sequences whose tokens it came from.
    """
    groups, dim = k_cache.shape[2:]
    # The query heads of a group share their K and V: let them be the rows of one small attention
    # problem.
    grouped = q.view(q.shape[0], groups, -1, dim)  # [B, G, H / G, D]
    page = math.gcd(k_cache.shape[1], PAGE)
    # N pages in all
    owner, pages, mask, members = _split_into_pages(lens, tables, k_cache.shape[1], page, window)
    k, v = (_read_pages(cache, pages, page) for cache in (k_cache, v_cache))
    if contain_nan:
        unused = mask.view(-1, 1, page, 1) != 0
        k, v = k.masked_fill(unused, 0), v.masked_fill(unused, 0)
    # [N, G, H / G, D], [N, G, H / G]
    parts, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped.index_select(0, owner), k, v, attn_mask=mask.to(q.dtype), scale=scale
    )
    lse = lse.flatten(1)  # [N, H]
    peak = lse.new_full((q.shape[0], lse.shape[1]), float("-inf"))
    peak = peak.scatter_reduce_(0, owner.unsqueeze(1).expand_as(lse), lse, "amax")
    weights = (lse - peak.index_select(0, owner)).exp_()
    weighted = (parts.float() * weights.view(*parts.shape[:-1], 1)).flatten(1)  # [N, H D]
    if contain_nan:
        total, merged = (
            x.new_zeros(len(q), x.shape[1]).index_add_(0, owner, x) for x in (weights, weighted)
        )
    else:
        # Sums over a sequence's pages are products with the matrix of which page is whose: adding
        # up by index is slower.
        total, merged = members @ weights, members @ weighted  # [B, H], [B, H D]
    out = merged.view(*total.shape, dim) / total.unsqueeze(-1)
    if not contain_nan and out.isnan().any():
        return decode_attention(q, k_cache, v_cache, lens, tables, scale, window, True)
    return out.to(q.dtype).view(q.shape)


def _read_pages(cache: Tensor, pages: Tensor, page: int) -> Tensor:
    """[N, G, page, D] of N pages of the cache."""
    groups, dim = cache.shape[2:]
    rows = cache.view(-1, page * groups * dim).index_select(0, pages)
    return rows.view(-1, page, groups, dim).transpose(1, 2)


# Of the last step, for each window: all layers that have it ask for the same one.
_splits: tuple[Tensor, dict[int | None, tuple[Tensor, ...]]] | None = None


def _split_into_pages(
    lens: Tensor, tables: Tensor, block_size: int, page: int, window: int | None
) -> tuple[Tensor, ...]:
    """Of N pages: the sequence each belongs to, its place in the cache, its mask [N, 1, 1,
    page], and [B, N] which is whose.
    """
    global _splits
    splits = _splits  # another thread may replace it
    if splits is None or splits[0] is not lens:
        splits = _splits = lens, {}
    if window not in splits[1]:
        begins = torch.zeros_like(lens) if window is None else (lens - window).clamp_(min=0)
        firsts = begins // page
        counts = (lens + page - 1) // page - firsts
        owner = torch.repeat_interleave(torch.arange(len(lens)), counts)
        index = torch.arange(len(owner)) + (firsts - counts.cumsum(0) + counts)[owner]
        per_block = block_size // page
        pages = tables[owner, index // per_block].long() * per_block + index % per_block
        token = index.unsqueeze(1) * page + torch.arange(page)
        unused = (token >= lens[owner].unsqueeze(1)) | (token < begins[owner].unsqueeze(1))
        mask = torch.zeros(unused.shape).masked_fill_(unused, float("-inf"))[:, None, None]
        members = (torch.arange(len(lens)).unsqueeze(1) == owner).float()
        splits[1][window] = owner, pages, mask, members
    return splits[1][window]
