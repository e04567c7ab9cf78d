"""Attention with rotary positions over a paged KV cache.

This file knows the mathematics, and how a block table leads to a sequence's K and V. It knows
nothing of how blocks are shared out: engine/block_manager.py does.

Shapes: T tokens (B decoding sequences, then P tokens of N prompt chunks), H query heads, G
key-value heads, D head size, W block-table width. H / G query heads share a key-value head.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.context import AttentionMetadata, PrefillMetadata, current_metadata
from nanovllm.layers.e4m3 import E4M3, to_e4m3
from nanovllm.layers.linear import QKVParallelLinear, RowParallelLinear, empty_parameter
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.weights.weight_slice import WeightSlice


@dataclass(frozen=True)
class AttentionOptions:
    """How a layer turns products of queries and keys into attention scores."""

    scale: float  # score = scale * (q . k)
    window: int | None = None  # tokens that a token sees, itself included; None: all up to itself
    softcap: float | None = None  # a score s becomes softcap * tanh(s / softcap); None: unchanged
    # [H]: the score of an extra key without a value. It takes part in the softmax and adds nothing
    # to the output (attention sinks of gpt-oss; Xiao et al. 2024).
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVCache:
    """A layer's part of the KV cache. Slot block * block_size + offset holds one token."""

    k: Tensor  # [blocks, block_size, G, D]
    v: Tensor  # [blocks, block_size, G, D]
    # [2] float32, of k and of v. With scales, the cache is in FP8: k and v are uint8 codes of e4m3,
    # and code * scale is what attention sees. None: the cache holds the numbers themselves.
    scales: Tensor | None = None

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v as the cache holds them. In FP8, a number beyond 448 becomes 448.

        The largest number of e4m3 is 448. A NaN stays NaN.
        """
        if self.scales is None:
            return k, v
        k, v = (to_e4m3(x.float() * (1 / scale)) for x, scale in zip((k, v), self.scales))
        return k.view(torch.uint8), v.view(torch.uint8)

    def decode(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the numbers, in a dtype, that parts of the cache's k and v stand for."""
        if self.scales is None:
            return k, v
        k, v = (x.view(E4M3).float() * scale for x, scale in zip((k, v), self.scales))
        return k.to(dtype), v.to(dtype)


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The keys and values of B sequences in a layer's cache.

    Token i of sequence b lies in block block_tables[b, i // block_size].
    """

    cache: KVCache
    block_tables: Tensor  # [B, W] int32
    # [B] int32, tokens to attend to, this step's own included. None for prompt chunks, whose
    # lengths PrefillMetadata has.
    context_lens: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedKV:
    """The keys and values of prompt chunks themselves, one chunk after the other."""

    k: Tensor  # [P, G, D]
    v: Tensor  # [P, G, D]


class SelfAttention(nn.Module):
    """Self-attention: [T, hidden] -> [T, hidden].

    The model runner sets `kv_cache`. While that has no blocks, nothing is stored.
    """

    attention_name = "plain"  # of the attention backend, for users
    # The projections that qkv_proj computes. A subclass with fewer of them overrides split_heads.
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    has_gate = False  # whether qkv_proj computes a gate, too: see layers/gated_attention.py

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        group: ParallelGroup,
        *,
        # Norms of q [T, H, D] and k [T, G, D], applied before they are rotated.
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        stacked: bool = False,  # the checkpoint has q, k and v as one tensor, qkv_proj
        scale: float | None = None,  # None: head_dim**-0.5
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ):
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            group=group,
            bias=qkv_bias,
            stacked=stacked,
            projections=self.projections,
            gated=self.has_gate,
        )
        self.q_norm = q_norm or nn.Identity()
        self.k_norm = k_norm or nn.Identity()
        self.rotary = rotary
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, group, bias=output_bias)
        # The heads of this rank.
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.head_dim = head_dim
        self.sinks = empty_parameter(self.num_heads) if sinks else None
        scale = head_dim**-0.5 if scale is None else scale
        self.options = AttentionOptions(scale, window, softcap, self.sinks)
        self.kv_cache = KVCache(torch.empty(0), torch.empty(0))
        self.kv_scales: nn.Parameter | None = None  # those of the KVCache, if it is in FP8

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.split_heads(self.qkv_proj(x))  # [T, H, D], [T, G, D], [T, G, D]
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        q = self.rotary.scale_queries(q, positions)
        out = self.attend(q, k, v)  # [T, H, D]
        return self.o_proj(out.flatten(1))

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        heads = qkv.view(len(qkv), -1, self.head_dim)
        return heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v in the cache, then attend to all tokens up to each token's own."""
        metadata = current_metadata()
        k, v = store_kv(k, v, self.kv_cache, metadata.slot_mapping)
        return self.attend_stored(q, k, v, metadata)

    def attend_stored(self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attend to keys and values that are already in the cache."""
        decodes, prefill = metadata.num_decodes, metadata.prefill
        parts = []
        if decodes:
            parts.append(self.decode(q[:decodes], self.decode_kv(metadata)))
        if prefill is not None:
            kv = self.prefill_kv(k[decodes:], v[decodes:], prefill)
            parts.append(self.prefill(q[decodes:], kv, prefill))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def decode(self, q: Tensor, kv: PagedKV) -> Tensor:
        return decode_attention(q, kv, self.options)

    def prefill(self, q: Tensor, kv: PagedKV | PackedKV, metadata: PrefillMetadata) -> Tensor:
        return prefill_attention(q, kv, metadata, self.options)

    def decode_kv(self, metadata: AttentionMetadata) -> PagedKV:
        """Return the keys and values that decoding sequences attend to."""
        assert metadata.block_tables is not None and metadata.context_lens is not None
        return PagedKV(self.kv_cache, metadata.block_tables, metadata.context_lens)

    def prefill_kv(self, k: Tensor, v: Tensor, metadata: PrefillMetadata) -> PagedKV | PackedKV:
        """Return the keys and values that prompt chunks attend to: k and v are the chunks' own.

        If any chunk has cached tokens before it, all chunks read K and V from the cache, which
        already holds their own.
        """
        if metadata.block_tables is None:
            return PackedKV(k, v)
        return PagedKV(self.kv_cache, metadata.block_tables)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        if self.sinks is not None:
            group, count = self.o_proj.group, self.num_heads
            ours = slice(group.rank * count, (group.rank + 1) * count)
            yield WeightSlice(f"{path}.sinks", self.sinks, (ours,), (group.size * count,))
        if self.kv_scales is not None:
            for name, scale in zip(("k_scale", "v_scale"), self.kv_scales.split(1)):
                yield WeightSlice(f"{path}.{name}", scale, (), (), convert=one_scale, default=1.0)


def one_scale(values: Tensor) -> Tensor:
    """Return the one scale that a tensor holds."""
    scale = values.reshape(1).float()
    if not 0 < scale < torch.inf:
        raise ValueError(f"is {scale.item()}, which is no scale")
    return scale


def store_kv(k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Write k and v [T, G, D] to their KV slots. A slot of -1 is not written.

    Returns k and v as the cache holds them. Attention sees these values in every step, also in the
    step that stores them. So a token's result does not depend on the step that computes it.
    """
    dtype = k.dtype
    k, v = cache.encode(k, v)
    seen = cache.decode(k, v, dtype)
    if cache.k.numel() == 0:
        return seen
    written = slot_mapping >= 0
    if not written.all():
        slot_mapping, k, v = slot_mapping[written], k[written], v[written]
    cache.k.view(-1, *k.shape[1:])[slot_mapping] = k
    cache.v.view(-1, *v.shape[1:])[slot_mapping] = v
    return seen


def decode_attention(q: Tensor, kv: PagedKV, options: AttentionOptions) -> Tensor:
    """Attend with one query a sequence to its cached tokens: q [B, H, D] -> [B, H, D]."""
    assert kv.context_lens is not None
    longest = int(kv.context_lens.max())
    k, v = gather_kv(kv, longest, q.dtype)
    index, ends = torch.arange(longest, device=q.device), kv.context_lens.view(-1, 1, 1, 1)
    seen = index < ends  # [B, 1, 1, L]
    if options.window is not None:
        seen &= index >= ends - options.window
    # Values that are not seen may be another sequence's NaN: a weight of 0 would not hide it.
    k, v = (x.masked_fill(~seen.view(len(q), longest, 1, 1), 0) for x in (k, v))
    return scaled_dot_product(q.unsqueeze(1), k, v, seen, options).squeeze(1)


def prefill_attention(
    q: Tensor, kv: PagedKV | PackedKV, metadata: PrefillMetadata, options: AttentionOptions
) -> Tensor:
    """Attend within prompt chunks, causally: q [P, H, D] -> [P, H, D]."""
    out, window = torch.empty_like(q), options.window
    starts_q, starts_k = metadata.cu_seqlens_q.tolist(), metadata.cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        begin, end = starts_q[i], starts_q[i + 1]
        len_q, len_k = end - begin, starts_k[i + 1] - starts_k[i]
        if isinstance(kv, PackedKV):
            k_i, v_i = kv.k[None, begin:end], kv.v[None, begin:end]
        else:
            k_i, v_i = gather_kv(kv, len_k, q.dtype, slice(i, i + 1))
        if window is not None:
            # Blocks that no query sees may belong to another sequence by now.
            len_k = min(len_k, len_q - 1 + window)
            k_i, v_i = k_i[:, -len_k:], v_i[:, -len_k:]
        seen = None
        if len_q < len_k or window is not None:
            # Query j stands at place len_k - len_q + j among these keys, and sees the keys up to
            # there.
            seen = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).tril(len_k - len_q)
            if window is not None:
                seen = seen.triu(len_k - len_q - window + 1)
        out[begin:end] = scaled_dot_product(q[None, begin:end], k_i, v_i, seen, options)[0]
    return out


def gather_kv(
    kv: PagedKV, length: int, dtype: torch.dtype, sequences: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Gather k and v of the first `length` cached tokens of some sequences: [B, length, G, D]."""
    k, v = kv.cache.k, kv.cache.v
    blocks = kv.block_tables[sequences, : -(-length // k.shape[1])]
    k, v = (x[blocks].flatten(1, 2)[:, :length] for x in (k, v))
    return kv.cache.decode(k, v, dtype)


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Compute softmax(scale q k^T) v for each head: q [B, Lq, H, D] -> [B, Lq, H, D].

    k and v are [B, Lk, G, D]. `mask` is True where a query sees a key; None: query i sees keys 0
    to i.
    """
    scale, softcap, sinks = options.scale, options.softcap, options.sinks
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # heads first
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale  # [B, H, Lq, Lk]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : k.shape[2]]
    return (weights.to(v.dtype) @ v).transpose(1, 2)
