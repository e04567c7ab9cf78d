"""The KV cache's memory: how many blocks fit, and their tensors."""

import os

import torch
from torch import Tensor


def allocate_kv_cache(layers, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[layers, 2 (K, V), blocks, block_size, G, D]. Zeroed: a masked position must not hold a NaN."""
    heads, dim = layers[0].num_kv_heads, layers[0].head_dim
    return torch.zeros(len(layers), 2, num_blocks, block_size, heads, dim, dtype=dtype, device=device)


def block_bytes(layers, block_size: int, dtype: torch.dtype) -> int:
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim for layer in layers) * dtype.itemsize


def num_blocks_that_fit(runner, config, max_model_len: int, max_num_seqs: int) -> int:
    """As many blocks as memory has room for, and on a CPU no more than `max_num_seqs` full-length sequences need."""
    needed = max_num_seqs * -(-max_model_len // runner.block_size)
    size = block_bytes(runner.attention_layers, runner.block_size, runner.dtype)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A quarter of the machine leaves room for the weights and for others; untouched pages cost nothing.
    return max(1, min(needed, physical // 4 // size))
