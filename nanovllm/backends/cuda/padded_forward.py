"""The forward pass of a step with prompts, in a form that a CUDA graph can hold.

Such a step's kernels take the host some 10 ms to launch, and the device less where tokens are few
or the model is small. So the tokens are padded to one of a few numbers and copied to a fixed place,
and all that differs from step to step is read there: which tokens are of which chunk, which
sequences decode, which results are wanted. Knows the inputs; knows nothing of graphs.

Attention writes no rows of padding, so that from the first layer on they hold whatever lay in
memory, NaN too. Each kernel after it must keep them from changing other rows.
"""

import torch
from torch import Tensor, nn

from nanovllm.backends.cuda.cuda_graph import size_for
from nanovllm.backends.cuda.triton.attention import BLOCK_M, TiledPrefill, tile_queries
from nanovllm.engine.batch_state import BatchState
from nanovllm.layers.context import AttentionMetadata

SIZES = (32, 64, 128, 256, 384, 512, 768, *range(1024, 8193, 256))
# Up to so many sequences, the contexts of each are read by several programs.
FEW_DECODES = 32
TOKENS_OF_A_CHUNK = 16  # a padded step has room for one chunk for so many of its tokens
# Tokens times a layer's parameters, where the device takes as long as the host. Launched and as a
# graph, on an H200 (torch 2.11, triton 3.6), the forward pass of Qwen3-0.6B took 9.0 and 4.5 ms at
# 2,304 tokens, 9.5 and 8.7 at 4,608; that of Qwen3-8B 10.7 and 6.3 at 256, 12.4 and 11.3 at 512.
BALANCE = 8e10
MAX_PAIRS = 1 << 24  # of query and key: with more, attention alone keeps the device busy


def sizes_for(layer: nn.Module, max_tokens: int) -> list[int]:
    """The numbers of tokens to pad to, of a model of such layers and steps of up to max_tokens."""
    balance = BALANCE / sum(parameter.numel() for parameter in layer.parameters())
    return [size for size in SIZES if size <= min(balance, max_tokens)]


class PaddedInputs:
    """Where the inputs of a padded forward pass lie.

    `slots` [S]: the batch slots that decode, then padding, as the runner keeps them. `sizes`:
    numbers of tokens, ascending.
    """

    def __init__(self, state: BatchState, slots: Tensor, sizes: list[int]) -> None:
        self.state, self.slots, self.sizes = state, slots, sizes
        self.max_num_seqs = len(slots)
        with slots.device:
            self.token_ids = torch.zeros(sizes[-1], dtype=torch.int64)
            self.positions = torch.zeros(sizes[-1], dtype=torch.int64)
            self.slot_mapping = torch.full((sizes[-1],), -1)
            # Of all tokens, then those to attend to; the batch slot of each chunk.
            self.cu_seqlens_q = torch.zeros(self.max_num_seqs + 1, dtype=torch.int32)
            self.cu_seqlens_k = torch.zeros(self.max_num_seqs + 1, dtype=torch.int32)
            self.chunk_slots = torch.full((self.max_num_seqs,), state.padding_slot)
            self.indices = torch.zeros(self.max_num_seqs, dtype=torch.int64)

    def shape_for(self, metadata: AttentionMetadata) -> tuple[int, int] | None:
        """Tokens and decoding sequences to pad a step to. None: it is better launched as it is."""
        prefill, indices = metadata.prefill, metadata.logits_indices
        assert prefill is not None and indices is not None
        tokens = len(metadata.slot_mapping)
        if tokens * prefill.max_seqlen_k > MAX_PAIRS:
            return None
        chunks = len(prefill.cu_seqlens_q) - 1
        size = size_for(max(tokens, chunks * TOKENS_OF_A_CHUNK, len(indices)), self.sizes)
        if size is None:
            return None
        decodes, most = metadata.num_decodes, min(size, self.max_num_seqs)
        return size, 0 if not decodes else FEW_DECODES if decodes <= FEW_DECODES < most else most

    def fill(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        chunk_slots: Tensor,
        size: int,
    ) -> None:
        """Copy a step's inputs. `chunk_slots` [N int64]: the chunks' batch slots."""
        prefill, indices = metadata.prefill, metadata.logits_indices
        assert prefill is not None and indices is not None
        tokens, chunks = len(token_ids), len(chunk_slots)
        self.token_ids[:tokens] = token_ids
        self.positions[:tokens] = positions
        self.slot_mapping[:tokens] = metadata.slot_mapping
        self.slot_mapping[tokens:size] = -1
        self.cu_seqlens_q[: chunks + 1] = prefill.cu_seqlens_q + metadata.num_decodes
        self.cu_seqlens_q[chunks + 1 :] = tokens
        self.cu_seqlens_k[: chunks + 1] = prefill.cu_seqlens_k
        self.chunk_slots[:chunks] = chunk_slots
        self.indices[: len(indices)] = indices
        self.indices[len(indices) :] = 0

    def metadata(self, size: int, decodes: int) -> AttentionMetadata:
        """What was filled in, as a step of `size` tokens, `decodes` of them decoding."""
        state, slots = self.state, self.slots[:decodes]
        count = size // BLOCK_M + size // TOKENS_OF_A_CHUNK
        prefill = TiledPrefill(
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            max_seqlen_q=0,
            max_seqlen_k=0,
            block_tables=state.block_tables[self.chunk_slots],
            query_tiles=tile_queries(self.cu_seqlens_q, count),
        )
        return AttentionMetadata(
            self.slot_mapping[:size],
            decodes,
            state.context_lens[slots],  # those of padding are 0
            state.block_tables[slots],
            prefill=prefill,
            logits_indices=self.indices[: min(size, self.max_num_seqs)],
        )
