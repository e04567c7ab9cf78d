"""Choose how attention is computed: the fastest of what the device, the options and the installed
packages allow.

Knows the order of preference. A backend that is asked for by name and cannot serve is the user's
mistake, and raises.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.layers import attention as plain

# flash-attn 4 took a process 8 s to import, on an H200's host, and 3 to 4 s to compile for each
# kind of prompt. With fewer pairs of query and key than these, 16,384 tokens of prompts of 2,048,
# it would save 1 to 4 % of a prefill, by the times of the kernels alone.
MANY_PAIRS = 1 << 25


@dataclass(frozen=True)
class AttentionBackend:
    """How attention is computed: one function for prompt chunks, one for decoding (see
    layers/attention.py for both).

    Each takes `out` by name, where the result is to be written, and returns it. `decode` takes
    the metadata's shared_prefix_len last.
    """

    name: str
    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]
    takes_tiles: bool = False  # `prefill` serves TiledPrefill of kernels/triton/attention.py too


def written(result: Tensor, out: Tensor | None) -> Tensor:
    """`result`, in the place that was asked for."""
    return result if out is None else out.copy_(result)


def _plain_prefill(*args, out=None):
    return written(plain.prefill_attention(*args), out)


def _plain_decode(q, k_cache, v_cache, lens, tables, options, shared=None, out=None):
    return written(plain.decode_attention(q, k_cache, v_cache, lens, tables, options), out)


PLAIN_BACKEND = AttentionBackend("plain", _plain_prefill, _plain_decode)


def select_attention_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    *,
    sinks: bool = False,
) -> AttentionBackend:
    """`name`: auto, flash-attn, triton or torch. `sinks`: whether the model has any.

    Prompt chunks and decoding may be served by different packages.
    """
    device = torch.device(device)
    if name == "torch" or name == "auto" and device.type != "cuda":
        return PLAIN_BACKEND

    from nanovllm.backends.cuda import flash_attention

    asked = (device, dtype, head_dim, block_size, sinks)
    if name == "flash-attn":
        if reason := flash_attention.why_not_v2(*asked):
            raise ValueError(f"attention_backend is 'flash-attn', but {reason}")
        backend = _flash_attn_2_backend()
    else:
        backend = _triton_backend()
    # Measured on an H200, prefill: flash-attn 4 takes 0.77 to 0.95 of the Triton kernel's time,
    # flash-attn 2 more (it was written for the generation before). Decode: Triton is as fast as
    # flash-attn 2 at worst, three times at one sequence.
    if name != "triton" and flash_attention.suits_v4(device, dtype, head_dim):
        prefill = _large_by_v4(backend.prefill)
        name = f"flash-attn 4 for long prefills, else {backend.name}"
        return AttentionBackend(name, prefill, backend.decode, backend.takes_tiles)
    if (
        name == "auto"
        and torch.cuda.get_device_capability(device)[0] < 9
        and not flash_attention.why_not_v2(*asked)
    ):
        prefill = _flash_attn_2_backend().prefill
        return AttentionBackend("flash-attn 2 prefill, Triton decode", prefill, backend.decode)
    return backend


def _large_by_v4(small: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Prefill by `small`, but by flash-attn 4 what that is faster at.

    It is imported when such a prefill comes.
    """
    from nanovllm.backends.cuda import flash_attention

    def prefill(q, k, v, k_cache, v_cache, meta, options, out=None):
        # Its windows, caps and sinks were not tried here.
        is_plain = options.window is options.softcap is options.sinks is None
        is_large = is_plain and q.shape[0] * meta.max_seqlen_k >= MANY_PAIRS
        if is_large and flash_attention.find_v4():
            large = flash_attention.prefill_attention_v4
            return written(large(q, k, v, k_cache, v_cache, meta, options.scale), out)
        return small(q, k, v, k_cache, v_cache, meta, options, out=out)

    return prefill


def _flash_attn_2_backend() -> AttentionBackend:
    from nanovllm.backends.cuda import flash_attention

    def prefill(*args, out=None):
        return written(flash_attention.prefill_attention_v2(*args), out)

    def decode(q, k_cache, v_cache, lens, tables, options, shared=None, out=None):
        decode_v2 = flash_attention.decode_attention_v2
        return written(decode_v2(q, k_cache, v_cache, lens, tables, options), out)

    return AttentionBackend("flash-attn 2", prefill, decode)


def _triton_backend() -> AttentionBackend:
    try:
        from nanovllm.backends.cuda.triton import attention as triton_attention
    except ImportError as error:
        raise ValueError(
            f"attention on a GPU needs Triton ({error}): pip install triton"
        ) from error
    return AttentionBackend(
        "Triton",
        triton_attention.prefill_attention,
        triton_attention.decode_attention,
        takes_tiles=True,
    )
