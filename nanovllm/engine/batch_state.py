"""The state of the running sequences, which is kept on the device: one batch slot per sequence.

A decode step therefore needs from the host only the list of slots to run, and a table entry for
each sequence that grows by a block. A sequence keeps its slot until it ends or is preempted.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DecodeInputs(NamedTuple):
    """The inputs of a decode step for B slots, whose block tables are W blocks wide."""

    token_ids: Tensor  # [B] int64
    positions: Tensor  # [B] int64
    slot_mapping: Tensor  # [B] int64, the KV slot of each token
    context_lens: Tensor  # [B] int32, including this step's token
    block_tables: Tensor  # [B, W] int32


class BatchState:
    """The batch slots, and one padding slot at the end.

    The context length of the padding slot stays 0, and no step writes K and V for it.
    """

    def __init__(
        self, num_slots: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.padding_slot = num_slots
        with torch.device(device):
            self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64)
            # The number of tokens in the KV cache.
            self.context_lens = torch.zeros(num_slots + 1, dtype=torch.int32)
            self.block_tables = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32)
            self.temperatures = torch.zeros(num_slots + 1, dtype=torch.float32)
            self.seeds = torch.zeros(num_slots + 1, dtype=torch.int64)

    def start(
        self,
        slots: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
    ) -> None:
        """Start sequences in `slots` [N] int64 with block_tables [N, W]. After this step, the KV
        cache holds context_lens [N] tokens of theirs.
        """
        self.context_lens[slots] = context_lens
        self.block_tables[slots] = block_tables
        self.temperatures[slots] = temperatures
        self.seeds[slots] = seeds

    def grow(self, slots: Tensor, indices: Tensor, blocks: Tensor) -> None:
        """Write blocks [N] into the block tables of slots [N] at indices [N]."""
        self.block_tables[slots, indices] = blocks.int()

    def advance(self, slots: Tensor) -> DecodeInputs:
        """Return the inputs of a decode step of `slots` [B] int64, and count its token in the
        slots' context lengths.
        """
        block_tables = self.block_tables[slots]
        positions = self.context_lens[slots].long()
        index = (positions // self.block_size).unsqueeze(1)
        blocks = block_tables.gather(1, index).squeeze(1).long()
        kv_slots = blocks * self.block_size + positions % self.block_size
        context_lens = (positions + 1).int()
        self.context_lens[slots] = context_lens
        self.context_lens[self.padding_slot] = 0
        return DecodeInputs(
            # The last token may be INVALID_TOKEN, which is -1, until the engine ends its request.
            token_ids=self.last_tokens[slots].clamp(min=0),
            positions=positions,
            slot_mapping=kv_slots.masked_fill(slots == self.padding_slot, -1),
            context_lens=context_lens,
            block_tables=block_tables,
        )
