"""Attention by the flash-attn packages, version 2 and version 4.

This file translates the arguments of layers/attention.py for each version, and tells the versions
apart. Both install into the package `flash_attn`. Wheels of version 2 carry an old
`flash_attn.cute` that is not version 4, and version 4 alone leaves `flash_attn` without functions.
So this file looks for the function that it needs: that the package can be imported proves nothing.
"""

import inspect
import os
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.attention import AttentionOptions, PackedKV, PagedKV
from nanovllm.layers.context import PrefillMetadata


def why_not_v2(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, sinks: bool
) -> str | None:
    """Explain why flash-attn 2 cannot serve, and what the user can do; None if it can serve."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return (
            f"device {device} is not an Ampere or newer NVIDIA GPU: take attention_backend='auto'"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        return (
            f"dtype {dtype} is neither float16 nor bfloat16: take one of them or "
            "attention_backend='auto'"
        )
    if head_dim % 8 or head_dim > 256:
        return (
            f"head_dim {head_dim} is not a multiple of 8 up to 256: take attention_backend='auto'"
        )
    if block_size % 256:
        return (
            f"kvcache_block_size {block_size} is not a multiple of 256: take one or "
            "attention_backend='auto'"
        )
    if sinks:
        return "the model has attention sinks, which it lacks: take attention_backend='auto'"
    if find_v2() is None:
        return (
            'flash-attn 2 is not installed: pip install -e ".[flash-attn]", or take '
            "attention_backend='auto'"
        )
    return None


def suits_v4(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Tell whether flash-attn 4 serves this device, dtype and head size, and seems installed.

    Only an import shows for certain that it is installed, and takes seconds.
    """
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] in (9, 10)
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and any(True for _ in metadata.distributions(name="flash-attn-4"))
    )


@lru_cache
def find_v2():
    """Import flash-attn 2. Returns (flash_attn_varlen_func, flash_attn_with_kvcache), or None."""
    try:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    except ImportError:
        return None
    return flash_attn_varlen_func, flash_attn_with_kvcache


@lru_cache
def find_v4():
    """Import flash-attn 4. Returns its flash_attn_varlen_func, or None."""
    # Its kernels take seconds to compile: keep them on disk for the next process, unless the user
    # has chosen otherwise.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except Exception:
        return None
    # Of the two functions of this name, only that of version 4 takes the maximum lengths.
    return (
        flash_attn_varlen_func
        if "max_seqlen_k" in inspect.signature(flash_attn_varlen_func).parameters
        else None
    )


def prefill_attention_v2(
    q: Tensor, kv: PagedKV | PackedKV, metadata: PrefillMetadata, options: AttentionOptions
) -> Tensor:
    """Compute layers/attention.py's prefill_attention by flash-attn 2."""
    varlen, _ = find_v2()
    packed, tables = (kv.cache, kv.block_tables) if isinstance(kv, PagedKV) else (kv, None)
    return varlen(
        q,
        packed.k,
        packed.v,
        metadata.cu_seqlens_q,
        metadata.cu_seqlens_k,
        metadata.max_seqlen_q,
        metadata.max_seqlen_k,
        causal=True,
        block_table=tables,
        **_by_name(options),
    )


def decode_attention_v2(q: Tensor, kv: PagedKV, options: AttentionOptions) -> Tensor:
    """Compute layers/attention.py's decode_attention by flash-attn 2."""
    _, with_kvcache = find_v2()
    return with_kvcache(
        q.unsqueeze(1),
        kv.cache.k,
        kv.cache.v,
        cache_seqlens=kv.context_lens,
        block_table=kv.block_tables,
        causal=True,
        **_by_name(options),
    ).squeeze(1)


def _by_name(options: AttentionOptions) -> dict[str, Any]:
    """Translate options to version 2's keyword arguments.

    Its window counts the tokens that a token sees before itself, and those after itself.
    """
    named: dict[str, Any] = {"softmax_scale": options.scale}
    if options.window is not None:
        named["window_size"] = (options.window - 1, 0)
    if options.softcap is not None:
        named["softcap"] = options.softcap
    return named


def prefill_attention_v4(
    q: Tensor, kv: PagedKV | PackedKV, metadata: PrefillMetadata, scale: float
) -> Tensor:
    """Compute layers/attention.py's prefill_attention by flash-attn 4, with no option but scale."""
    options = {
        "cu_seqlens_q": metadata.cu_seqlens_q,
        "max_seqlen_q": metadata.max_seqlen_q,
        "max_seqlen_k": metadata.max_seqlen_k,
        "softmax_scale": scale,
        "causal": True,
    }
    if isinstance(kv, PackedKV):
        out = find_v4()(q, kv.k, kv.v, cu_seqlens_k=metadata.cu_seqlens_k, **options)
    else:
        # With a paged cache, flash-attn takes each sequence's length instead of its first row.
        lens = metadata.cu_seqlens_k.diff()
        out = find_v4()(
            q, kv.cache.k, kv.cache.v, seqused_k=lens, page_table=kv.block_tables, **options
        )
    return out[0] if isinstance(out, tuple) else out
