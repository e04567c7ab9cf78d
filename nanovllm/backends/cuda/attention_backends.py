"""The choice of an attention backend: the fastest that device, options and packages allow.

This file knows the order of preference. If the user names a backend that cannot serve, it raises
ValueError.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers import attention as plain

# The least number of pairs of query and key for which flash-attn 4 is used: 16,384 tokens of
# prompts of 2,048. On an H200's host, a process took 8 s to import flash-attn 4, and 3 to 4 s to
# compile it for each kind of prompt. With fewer pairs it would save 1 to 4 % of a prefill, by the
# times of the kernels alone.
MANY_PAIRS = 1 << 25


@dataclass(frozen=True)
class AttentionBackend:
    """Two functions that compute attention: one for prompt chunks, one for decoding.

    Both take the arguments of their namesakes in layers/attention.py, and a keyword `out`: the
    tensor that receives the result. They return the result. `decode` also takes the metadata's
    shared_prefix_len by keyword.

    A backend may have `decode_qkv`, which decodes from rows of qkv. Its arguments are those of
    decode_attention_of_qkv in triton/decode_attention.py.
    """

    name: str
    prefill: Callable[..., Tensor]
    decode: Callable[..., Any]
    takes_tiles: bool = False  # whether `prefill` also takes a TiledPrefill
    decode_qkv: Callable[..., Any] | None = None
    quantises: bool = False  # whether decoding also takes an `out` of Rows in FP8


def written(result: Tensor, out: Tensor | None) -> Tensor:
    """Copy `result` to `out`, if there is one, and return the tensor that holds it."""
    return result if out is None else out.copy_(result)


def _plain_prefill(q, kv, metadata, options, *, out=None):
    return written(plain.prefill_attention(q, kv, metadata, options), out)


def _plain_decode(q, kv, options, *, shared_prefix_len=None, out=None):
    return written(plain.decode_attention(q, kv, options), out)


PLAIN_BACKEND = AttentionBackend("plain", _plain_prefill, _plain_decode)


def select_attention_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    *,
    sinks: bool = False,
    fp8_kv: bool = False,
) -> AttentionBackend:
    """Choose the backend for a model. Prompt chunks and decoding may use different packages.

    Args:
        name: auto, flash-attn, triton or torch.
        sinks: whether the model has attention sinks.
        fp8_kv: whether the KV cache is in FP8, which only the Triton kernels read.
    Raises:
        ValueError: if the backend of that name cannot serve.
    """
    device = torch.device(device)
    if name == "torch" or name == "auto" and device.type != "cuda":
        return PLAIN_BACKEND

    from nanovllm.backends.cuda import flash_attention

    if fp8_kv and (name == "flash-attn" or head_dim % 4):
        raise ValueError(
            f"kv_cache_dtype is 'fp8', attention_backend {name!r} and head_dim {head_dim}: such a "
            "KV cache needs attention_backend='auto' or 'triton', and a multiple of 4; else use "
            "kv_cache_dtype='auto'"
        )
    asked = (device, dtype, head_dim, block_size, sinks)
    if name == "flash-attn":
        if reason := flash_attention.why_not_v2(*asked):
            raise ValueError(f"attention_backend is 'flash-attn', but {reason}")
        backend = _flash_attn_2_backend()
    else:
        backend = _triton_backend()
    # Measured on an H200. In prefill, flash-attn 4 takes 0.77 to 0.95 of the Triton kernel's time;
    # flash-attn 2, which was written for the generation before, takes more than the Triton kernel.
    # In decoding, Triton is at worst as fast as flash-attn 2, and three times as fast at one
    # sequence.
    if name != "triton" and flash_attention.suits_v4(device, dtype, head_dim):
        prefill = _large_by_v4(backend.prefill, fp8_kv)
        name = f"flash-attn 4 for long prefills, else {backend.name}"
        return replace(backend, name=name, prefill=prefill)
    if (
        name == "auto"
        and torch.cuda.get_device_capability(device)[0] < 9
        and not flash_attention.why_not_v2(*asked)
    ):
        prefill = _flash_attn_2_backend().prefill
        if fp8_kv:
            prefill = _packed_by(prefill, backend.prefill)
        name = "flash-attn 2 prefill, Triton decode"
        return replace(backend, name=name, prefill=prefill, takes_tiles=False)
    return backend


def _packed_by(
    packed: Callable[..., Tensor], paged: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a prefill function that uses `paged` where any prompt has cached tokens."""

    def prefill(q, kv, metadata, options, *, out=None):
        chosen = packed if isinstance(kv, plain.PackedKV) else paged
        return chosen(q, kv, metadata, options, out=out)

    return prefill


def _large_by_v4(small: Callable[..., Tensor], only_packed: bool) -> Callable[..., Tensor]:
    """Return a prefill function that uses flash-attn 4 for many pairs, and `small` otherwise.

    flash-attn 4 is imported when the first prefill that uses it comes. `only_packed`: it cannot
    read the KV cache.
    """
    from nanovllm.backends.cuda import flash_attention

    def prefill(q, kv, metadata, options, *, out=None):
        # flash-attn 4 was not tried with windows, caps and sinks: `small` serves them.
        is_plain = options.window is options.softcap is options.sinks is None
        is_large = is_plain and q.shape[0] * metadata.max_seqlen_k >= MANY_PAIRS
        is_large &= not only_packed or isinstance(kv, plain.PackedKV)
        if is_large and flash_attention.find_v4():
            large = flash_attention.prefill_attention_v4
            return written(large(q, kv, metadata, options.scale), out)
        return small(q, kv, metadata, options, out=out)

    return prefill


def _flash_attn_2_backend() -> AttentionBackend:
    from nanovllm.backends.cuda import flash_attention

    def prefill(q, kv, metadata, options, *, out=None):
        return written(flash_attention.prefill_attention_v2(q, kv, metadata, options), out)

    def decode(q, kv, options, *, shared_prefix_len=None, out=None):
        return written(flash_attention.decode_attention_v2(q, kv, options), out)

    return AttentionBackend("flash-attn 2", prefill, decode)


def _triton_backend() -> AttentionBackend:
    try:
        from nanovllm.backends.cuda.triton.decode_attention import (
            decode_attention,
            decode_attention_of_qkv,
        )
        from nanovllm.backends.cuda.triton.prefill_attention import prefill_attention
    except ImportError as error:
        raise ValueError(
            f"attention on a GPU needs Triton ({error}): pip install triton"
        ) from error
    return AttentionBackend(
        "Triton",
        prefill_attention,
        decode_attention,
        takes_tiles=True,
        decode_qkv=decode_attention_of_qkv,
        quantises=True,
    )
