"""Choose how attention is computed: the fastest of what the device, the options and the installed packages allow.

Knows the order of preference. A backend that is asked for by name and cannot serve is the user's mistake, and raises.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.kernels import torch_attention


@dataclass(frozen=True)
class AttentionBackend:
    """How attention is computed: one function for prompt chunks, one for decoding (see torch_attention for both)."""

    name: str
    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]


TORCH_BACKEND = AttentionBackend("torch", torch_attention.prefill_attention, torch_attention.decode_attention)


def select_attention_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> AttentionBackend:
    """`name`: auto, flash-attn, triton or torch. Prompt chunks and decoding may be served by different packages."""
    device = torch.device(device)
    if name == "torch" or name == "auto" and device.type != "cuda":
        return TORCH_BACKEND
    if name not in ("auto", "flash-attn", "triton"):
        raise ValueError(f"attention_backend is {name!r}: choose auto, flash-attn, triton or torch")
    if block_size % 16:
        raise ValueError(f"kvcache_block_size is {block_size}: choose a multiple of 16 (256 serves every backend)")

    from nanovllm.kernels import flash_attention

    problem = (device, dtype, head_dim, block_size)
    no_v2, no_v4 = flash_attention.why_not_v2(*problem), flash_attention.why_not_v4(*problem)
    if name == "flash-attn" and no_v2:
        raise ValueError(f"attention_backend is 'flash-attn', but {no_v2}")
    triton = _triton_backend()
    if name == "triton":
        return triton
    flash = AttentionBackend("flash-attn 2", flash_attention.prefill_attention_v2, flash_attention.decode_attention_v2)
    if not no_v4:
        prefill_name, prefill = "flash-attn 4", flash_attention.prefill_attention_v4
    else:
        prefill_name, prefill = ("Triton", triton.prefill) if no_v2 else ("flash-attn 2", flash.prefill)
    decode_name, decode = ("Triton", triton.decode) if no_v2 else ("flash-attn 2", flash.decode)
    return AttentionBackend(f"{prefill_name} prefill, {decode_name} decode", prefill, decode)


def _triton_backend() -> AttentionBackend:
    try:
        from nanovllm.kernels import triton_attention
    except ImportError as error:
        raise ValueError(f"attention on a GPU needs Triton ({error}): pip install triton") from error
    return AttentionBackend("Triton", triton_attention.prefill_attention, triton_attention.decode_attention)
