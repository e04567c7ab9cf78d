"""The step's metadata: what attention must know about the tokens of one forward pass.

It is ambient: the runner opens it around the forward pass and the attention layers read it, so a model's code
passes only hidden states and positions from layer to layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """N chunks of prompts, packed one after the other: P tokens in all."""

    cu_seqlens_q: Tensor  # [N + 1] int32, where each chunk starts among the P tokens
    cu_seqlens_k: Tensor  # [N + 1] int32, the same with the tokens each sequence already has in the cache counted in
    max_seqlen_q: int
    max_seqlen_k: int
    block_tables: Tensor | None  # [N, W] int32; None: nothing is cached, the chunks' own K and V are all there is


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """T = B + P tokens: first B decoding sequences with one token each, then the P tokens of prompt chunks."""

    slots: Tensor  # [T] int64, where each token's K and V go: block * block_size + offset; -1 writes nothing
    num_decodes: int  # B
    decode_lens: Tensor | None = None  # [B] int32, tokens to attend to, this step's own included
    decode_tables: Tensor | None = None  # [B, W] int32
    shared_len: Tensor | None = None  # [1] int32, tokens in whole blocks with which all B tables begin; None: unknown
    prefill: PrefillMetadata | None = None
    wanted: Tensor | None = None  # [R] int64, the tokens whose hidden states are asked for; None: all


_current: ContextVar[StepMetadata | None] = ContextVar("step_metadata", default=None)


@contextmanager
def forward_context(metadata: StepMetadata) -> Iterator[None]:
    """Make `metadata` the one that `current_metadata` answers inside the block."""
    token = _current.set(metadata)
    try:
        yield
    finally:
        _current.reset(token)


def current_metadata() -> StepMetadata:
    metadata = _current.get()
    assert metadata is not None, "a model's forward pass runs inside forward_context"
    return metadata
