"""The memory of the blocks, and a forward pass over chunks of many sequences at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.apps.course.solution.model import Model
from nanovllm.apps.course.solution.one_token import causal_attention


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, which a step computes."""

    token_ids: list[int]
    start: int  # the position of the first token
    block_table: list[int]  # the sequence's blocks, for this chunk and all tokens before it


def slot_of(position: int, block_table: list[int], block_size: int) -> int:
    """Compute the slot of the token at `position`: block * block_size + offset."""
    # <piece 3>
    return block_table[position // block_size] * block_size + position % block_size
    # </piece>


class PagedCache:
    """The keys and values of all sequences, in blocks: tensors [layers, slots, G, D]."""

    def __init__(self, model: Model, num_blocks: int, block_size: int) -> None:
        shape = (model.num_layers, num_blocks * block_size, model.num_kv_heads, model.head_dim)
        self.model = model
        self.block_size = block_size
        self.k = torch.zeros(shape)
        self.v = torch.zeros(shape)

    def run(self, chunks: list[Chunk]) -> Tensor:
        """Compute chunks in one forward pass. Returns logits [chunks, V] after each chunk."""
        # <piece 3>
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        positions = [chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))]
        # For each chunk: the slots of all its sequence's tokens so far, the chunk's own included.
        slots = [
            torch.tensor([slot_of(i, chunk.block_table, self.block_size) for i in range(end)])
            for chunk in chunks
            for end in [chunk.start + len(chunk.token_ids)]
        ]
        sizes = [len(chunk.token_ids) for chunk in chunks]
        own_slots = torch.cat([of_all[chunk.start :] for of_all, chunk in zip(slots, chunks)])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.k[layer, own_slots], self.v[layer, own_slots] = k, v
            parts = [
                causal_attention(part, self.k[layer, of_all], self.v[layer, of_all])
                for part, of_all in zip(q.split(sizes), slots)
            ]
            return torch.cat(parts)

        hidden = self.model.forward(torch.tensor(token_ids), torch.tensor(positions), attend)
        last = torch.tensor(sizes).cumsum(0) - 1
        return self.model.logits(hidden[last])
        # </piece>
