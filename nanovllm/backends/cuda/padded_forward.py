"""The inputs of a forward pass with prompts, in a form that a CUDA graph can hold.

The host takes some 10 ms to launch such a step's kernels. The device takes less to run them if
tokens are few or the model is small. So the tokens are padded to one of a few numbers and copied to
fixed buffers. Whatever differs from step to step is read from buffers, too: which tokens belong to
which chunk, which sequences decode, and which results are wanted. This file knows the inputs and
nothing of graphs.

Attention does not write rows of padding. After the first layer's attention, these rows hold
whatever lay in memory, which may be NaN. No kernel may let such a row change another row.
"""

import torch
from torch import Tensor, nn

from nanovllm.backends.cuda.cuda_graph import size_for
from nanovllm.backends.cuda.triton.prefill_attention import BLOCK_M, TiledPrefill, tile_queries
from nanovllm.backends.quantised.packed import PackedWeight
from nanovllm.engine.batch_state import BatchState
from nanovllm.engine.recurrent_state import RecurrentState
from nanovllm.layers.context import AttentionMetadata

SIZES = (32, 64, 128, 256, 384, 512, 768, *range(1024, 8193, 256))
# A step is padded to this number of decoding sequences or to the largest. With so few, several
# programs read each sequence's context.
FEW_DECODES = 32
TOKENS_OF_A_CHUNK = 16  # a padded step of n tokens has room for n / 16 chunks
# Tokens times a layer's parameters at which the device takes about as long as the host. Forward
# passes on an H200 (torch 2.11, triton 3.6), launched kernel by kernel and as a graph: Qwen3-0.6B
# took 9.0 and 4.5 ms at 2,304 tokens, 9.5 and 8.7 ms at 4,608; Qwen3-8B took 10.7 and 6.3 ms at
# 256, 12.4 and 11.3 ms at 512.
BALANCE = 8e10
MAX_PAIRS = 1 << 24  # pairs of query and key; with more, attention alone keeps the device busy


def sizes_for(layer: nn.Module, max_tokens: int) -> list[int]:
    """List the numbers of tokens to pad to, for a model of such layers.

    max_tokens: the greatest number of tokens in a step.
    """
    balance = BALANCE / num_weights(layer)
    return [size for size in SIZES if size <= min(balance, max_tokens)]


def num_weights(layer: nn.Module) -> int:
    """Count the weights of a layer, however few bits hold them: a product takes as long."""
    count = sum(parameter.numel() for parameter in layer.parameters())
    for module in layer.modules():
        if isinstance(module, PackedWeight):
            held = sum(parameter.numel() for parameter in module.parameters())
            count += module.plain.numel() - held
    return count


class PaddedInputs:
    """The fixed buffers that hold the inputs of a padded forward pass.

    The runner keeps `slots` [S]: the batch slots that decode, then padding. `sizes` are the numbers
    of tokens to pad to, ascending. `recurrent` is the state of recurrent layers; None: the model
    has no such layers.
    """

    def __init__(
        self,
        state: BatchState,
        slots: Tensor,
        sizes: list[int],
        recurrent: RecurrentState | None = None,
    ) -> None:
        self.state, self.slots, self.sizes = state, slots, sizes
        self.recurrent = recurrent
        self.max_num_seqs = len(slots)
        with slots.device:
            self.token_ids = torch.zeros(sizes[-1], dtype=torch.int64)
            self.positions = torch.zeros(sizes[-1], dtype=torch.int64)
            self.slot_mapping = torch.full((sizes[-1],), -1)
            # As in PrefillMetadata, but cu_seqlens_q counts from the step's first token, and its
            # last value repeats: chunks of padding have no tokens. Then each chunk's batch slot.
            self.cu_seqlens_q = torch.zeros(self.max_num_seqs + 1, dtype=torch.int32)
            self.cu_seqlens_k = torch.zeros(self.max_num_seqs + 1, dtype=torch.int32)
            self.chunk_slots = torch.full((self.max_num_seqs,), state.padding_slot)
            self.indices = torch.zeros(self.max_num_seqs, dtype=torch.int64)

    def shape_for(self, metadata: AttentionMetadata) -> tuple[int, int] | None:
        """Return the numbers of tokens and of decoding sequences to pad a step to.

        None: the step is faster without a graph.
        """
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
        """Copy a step's inputs to the buffers, padded to `size` tokens.

        chunk_slots [N] int64: the batch slots of the chunks.
        """
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

    def clear(self) -> None:
        """Leave no tokens and no chunks in the buffers: a step of them changes nothing."""
        self.slot_mapping.fill_(-1)
        self.cu_seqlens_q.zero_()
        self.cu_seqlens_k.zero_()
        self.chunk_slots.fill_(self.state.padding_slot)
        self.indices.zero_()  # those of a larger step may lie outside a smaller one

    def metadata(self, size: int, decodes: int) -> AttentionMetadata:
        """Describe the buffers' contents as a step of `size` tokens, `decodes` of them decoding."""
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
        state_rows = None
        if self.recurrent is not None:
            # There are no more chunks: see shape_for. Kernels have programs for each row.
            chunk_slots = self.chunk_slots[: size // TOKENS_OF_A_CHUNK]
            state_rows = self.recurrent.rows_of(torch.cat((slots, chunk_slots)))
        return AttentionMetadata(
            self.slot_mapping[:size],
            decodes,
            state.context_lens[slots],  # 0 for padding
            state.block_tables[slots],
            prefill=prefill,
            logits_indices=self.indices[: min(size, self.max_num_seqs)],
            state_rows=state_rows,
        )
