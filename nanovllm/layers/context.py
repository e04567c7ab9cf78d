"""The metadata of a step: what attention must know about the tokens of one forward pass.

The metadata is ambient: the model runner opens it around the forward pass, and the attention layers
read it. So a model's code passes only hidden states and positions from layer to layer. After the
last layer, the decoder reads from the metadata which tokens' logits are wanted.

A KV slot is a token's place in the paged cache: block * block_size + offset.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """N prompt chunks, packed one after the other: P tokens in all."""

    cu_seqlens_q: Tensor  # [N + 1] int32, where each chunk starts among the P tokens
    cu_seqlens_k: Tensor  # [N + 1] int32, likewise, with the tokens cached before each chunk
    max_seqlen_q: int
    max_seqlen_k: int
    # [N, W] int32; None: no chunk has cached tokens before it
    block_tables: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """T = B + P tokens: one token of each of B decoding sequences, then P tokens of prompts."""

    # [T] int64, the KV slot of each token; -1: the cache holds its K and V already
    slot_mapping: Tensor
    num_decodes: int  # B
    context_lens: Tensor | None = None  # [B] int32, tokens to attend to, this step's own included
    block_tables: Tensor | None = None  # [B, W] int32
    # [1] int32: tokens in the leading blocks that all B sequences share. Attention may read them
    # once for all. None: nobody looked.
    shared_prefix_len: Tensor | None = None
    prefill: PrefillMetadata | None = None
    logits_indices: Tensor | None = None  # [R] int64, the tokens whose logits are wanted; None: all
    # [B + N] int64: the row of each sequence in the state of recurrent layers, those that decode
    # first. None: the model has no such layers.
    state_rows: Tensor | None = None


_current: ContextVar[AttentionMetadata | None] = ContextVar("attention_metadata", default=None)


@contextmanager
def forward_context(metadata: AttentionMetadata) -> Iterator[None]:
    """Let `current_metadata` return `metadata` inside the block."""
    token = _current.set(metadata)
    try:
        yield
    finally:
        _current.reset(token)


def current_metadata() -> AttentionMetadata:
    metadata = _current.get()
    assert metadata is not None, "a model's forward pass runs inside forward_context"
    return metadata
