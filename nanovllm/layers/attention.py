"""Attention over the paged KV cache: from projected queries, keys and values to the heads' outputs.

Owns the layer's cache and nothing of its size: the engine measures what fits, allocates it and binds it here.
"""

import torch
from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.layers.context import current_metadata


class Attention(nn.Module):
    """`num_heads` and `num_kv_heads` are this rank's."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, rotary: RotaryEmbedding):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.rotary = rotary
        # Until the engine binds a cache there is none, and nothing is stored.
        self.bind_cache(torch.empty(0), torch.empty(0), kernels.TORCH_BACKEND)

    def bind_cache(self, k_cache: Tensor, v_cache: Tensor, backend: kernels.AttentionBackend) -> None:
        """From now on keep K and V in these [blocks, block_size, G, D], and attend with `backend`."""
        self.k_cache, self.v_cache, self.backend = k_cache, v_cache, backend

    def forward(
        self, qkv: Tensor, positions: Tensor, q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None
    ) -> Tensor:
        """qkv [T, (H + 2G) D], positions [T] -> [T, H D]. The norms, of a head each, come before the rotation."""
        meta = current_metadata()
        q, k, v = kernels.qk_norm_rope_store(
            qkv,
            self.head_dim,
            self.num_kv_heads,
            q_norm.weight if q_norm else None,
            k_norm.weight if k_norm else None,
            q_norm.eps if q_norm else 0.0,
            self.rotary.cos_sin,
            positions,
            meta.slots,
            self.k_cache,
            self.v_cache,
        )
        decodes = meta.num_decodes
        if meta.prefill is None:
            out = self._decode(q)
        elif decodes == 0:
            out = self._prefill(q, k, v)
        else:
            out = torch.cat((self._decode(q[:decodes]), self._prefill(q[decodes:], k[decodes:], v[decodes:])))
        return out.flatten(1)  # [T, H, D] -> [T, H D]

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prefill = current_metadata().prefill
        return self.backend.prefill(q, k, v, self.k_cache, self.v_cache, prefill, self.scale)

    def _decode(self, q: Tensor) -> Tensor:
        meta = current_metadata()
        return self.backend.decode(
            q, self.k_cache, self.v_cache, meta.decode_lens, meta.decode_tables, self.scale, meta.shared_len
        )
