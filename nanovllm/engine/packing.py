"""The packing of a step's prompt chunks into arrays, one sequence after the other without padding.

The arrays are NumPy's and all int64. The runner uploads them to the device.

Shapes: N chunks with P tokens in all; S sequences that start with the chunks: the N sequences of
the chunks, then their forks; W blocks in a row of the block tables.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from nanovllm.engine.batch import Fork, PrefillChunk


class PackedChunks(NamedTuple):
    """The arrays of a step's prompt chunks."""

    token_ids: np.ndarray  # [P]
    positions: np.ndarray  # [P]
    slot_mapping: np.ndarray  # [P], the KV slots to write; -1: write none
    block_tables: np.ndarray  # [S, W]
    cu_seqlens_q: np.ndarray  # [N + 1], where the tokens of each chunk begin, and the end of all
    cu_seqlens_k: np.ndarray  # [N + 1], the same for the tokens that the chunks attend to
    context_lens: np.ndarray  # [S], after this step


class SampledPlaces(NamedTuple):
    """The tokens of a step after which a token is sampled, and the starting sequences that get one.

    tokens: Indices among the step's tokens: first those of the decoding sequences, then one for
        each of `sequences`.
    sequences: Indices among the S sequences.
    """

    tokens: np.ndarray
    sequences: np.ndarray


def pack_chunks(
    chunks: Sequence[PrefillChunk],
    sequences: Sequence[PrefillChunk | Fork],
    block_size: int,
    width: int,
) -> PackedChunks:
    """Pack chunks into arrays. `sequences` are the chunks, then their forks; `width` is W."""
    num_chunks = len(chunks)
    token_ids, starts_q = concatenate([chunk.token_ids for chunk in chunks])
    blocks, starts = concatenate([seq.block_table for seq in sequences])
    tables = np.zeros((len(sequences), width), dtype=np.int64)
    tables[np.arange(width) < np.diff(starts)[:, None]] = blocks
    ends = np.array([seq.end for seq in sequences])
    starts_k = np.concatenate(([0], np.cumsum(ends[:num_chunks])))

    # For each token: the index of its chunk, and its position in the sequence.
    chunk_of = np.repeat(np.arange(num_chunks), np.diff(starts_q))
    positions = np.arange(len(token_ids)) + (ends[:num_chunks] - starts_q[1:])[chunk_of]
    block, offset = np.divmod(positions, block_size)
    slot_mapping = tables[chunk_of, block] * block_size + offset
    slot_mapping[positions < np.array([chunk.write_from for chunk in chunks])[chunk_of]] = -1
    return PackedChunks(token_ids, positions, slot_mapping, tables, starts_q, starts_k, ends)


def sampled_places(num_decodes: int, chunks: Sequence[PrefillChunk]) -> SampledPlaces:
    """Find the tokens after which a token is sampled: the token of each decoding sequence, then the
    last token of each chunk that ends its prompt, then for each fork the last token of its chunk.
    """
    ending = [i for i, chunk in enumerate(chunks) if chunk.is_last]
    forking = [i for i, chunk in enumerate(chunks) for _ in chunk.forks]
    ends = num_decodes + np.cumsum([len(chunk.token_ids) for chunk in chunks])
    tokens = np.concatenate((np.arange(num_decodes), ends[ending + forking] - 1))
    sequences = [*ending, *range(len(chunks), len(chunks) + len(forking))]
    return SampledPlaces(tokens.astype(np.int64), np.array(sequences, dtype=np.int64))


def concatenate(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate rows. Returns the array, and the start of each row followed by the end of all."""
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=starts[-1]), starts
