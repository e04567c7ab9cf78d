"""The packing of a step's prompt chunks into arrays, one sequence after the other without padding.

The arrays are NumPy's and all int64. The runner uploads them to the device.

Shapes: N chunks with P tokens in all; W blocks in a row of the block tables.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from nanovllm.engine.batch import PrefillChunk


class PackedChunks(NamedTuple):
    """The arrays of a step's prompt chunks."""

    token_ids: np.ndarray  # [P]
    positions: np.ndarray  # [P]
    slot_mapping: np.ndarray  # [P], the KV slots to write; -1: write none
    block_tables: np.ndarray  # [N, W]
    cu_seqlens_q: np.ndarray  # [N + 1], where the tokens of each chunk begin, and the end of all
    cu_seqlens_k: np.ndarray  # [N + 1], the same for the tokens that the chunks attend to
    context_lens: np.ndarray  # [N], after this step


class SampledPlaces(NamedTuple):
    """The tokens of a step after which a token is sampled, and the chunks that end a prompt.

    tokens: Indices among the step's tokens: first those of the decoding sequences, then the last
        one of each of `chunks`.
    chunks: Indices among the N chunks.
    """

    tokens: np.ndarray
    chunks: np.ndarray


def pack_chunks(chunks: Sequence[PrefillChunk], block_size: int, width: int) -> PackedChunks:
    """Pack chunks into arrays. `width` is W."""
    token_ids, starts_q = concatenate([chunk.token_ids for chunk in chunks])
    blocks, starts = concatenate([chunk.block_table for chunk in chunks])
    tables = np.zeros((len(chunks), width), dtype=np.int64)
    tables[np.arange(width) < np.diff(starts)[:, None]] = blocks
    ends = np.array([chunk.end for chunk in chunks])
    starts_k = np.concatenate(([0], np.cumsum(ends)))

    # For each token: the index of its chunk, and its position in the sequence.
    chunk_of = np.repeat(np.arange(len(chunks)), np.diff(starts_q))
    positions = np.arange(len(token_ids)) + (ends - starts_q[1:])[chunk_of]
    block, offset = np.divmod(positions, block_size)
    slot_mapping = tables[chunk_of, block] * block_size + offset
    slot_mapping[positions < np.array([chunk.write_from for chunk in chunks])[chunk_of]] = -1
    return PackedChunks(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        block_tables=tables,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        context_lens=ends,
    )


def sampled_places(num_decodes: int, chunks: Sequence[PrefillChunk]) -> SampledPlaces:
    """Find the tokens after which a token is sampled: the token of each decoding sequence, then the
    last token of each chunk that ends its prompt.
    """
    ending = [i for i, chunk in enumerate(chunks) if chunk.is_last]
    ends = num_decodes + np.cumsum([len(chunk.token_ids) for chunk in chunks])
    tokens = np.concatenate((np.arange(num_decodes), ends[ending] - 1))
    return SampledPlaces(tokens.astype(np.int64), np.array(ending, dtype=np.int64))


def concatenate(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate rows. Returns the array, and the start of each row followed by the end of all."""
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=starts[-1]), starts
