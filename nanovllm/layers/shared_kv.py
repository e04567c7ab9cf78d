"""Attention layers without keys and values of their own.

Some models compute keys and values in their first layers alone. Each further layer attends with
queries of its own to the keys and values of an earlier layer, its source (Brandon et al. 2024).
So the cache holds them once, and a layer that shares them has no part of it: its `kv_cache` is the
source's. The source runs before it in each step, and has stored what the step's tokens add.
"""

from typing import Any

from torch import Tensor, nn

from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.context import current_metadata


class SharedKVAttention(SelfAttention):
    """Self-attention whose keys and values are those that `source` has stored.

    Whoever builds the model calls `share_kv_of`. Whoever sets the source's `kv_cache` sets this
    one, too.
    """

    projections = ("q_proj",)
    _source: tuple[SelfAttention]  # in a tuple, because PyTorch would list a module as a part

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.k_norm = nn.Identity()  # there are no keys to norm

    @property
    def source(self) -> SelfAttention:
        """The layer whose keys and values this layer attends to."""
        return self._source[0]

    def share_kv_of(self, source: SelfAttention) -> None:
        """Make `source` the layer whose keys and values this layer attends to."""
        self._source = (source,)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.qkv_proj(x).view(len(x), self.num_heads, self.head_dim)  # [T, H, D]
        q = self.rotary(self.q_norm(q), positions)
        # The step's own keys and values, which prompts attend to if no chunk has cached tokens
        # before it. Else attention reads all from the cache. So what stands here for a slot of -1,
        # whose chunk has cached tokens before it, is not read.
        slots = current_metadata().slot_mapping
        k, v = (part.flatten(0, 1)[slots] for part in (self.kv_cache.k, self.kv_cache.v))
        k, v = self.kv_cache.decode(k, v, q.dtype)
        return self.o_proj(self.attend(q, k, v).flatten(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to keys and values that the source has stored."""
        return self.attend_stored(q, k, v, current_metadata())
