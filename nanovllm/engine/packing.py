"""Lay a step's prompt chunks out as arrays, one sequence after the other, without padding.

Plain NumPy, all int64: the runner brings the arrays to the device.

Shapes: N chunks of P tokens in all; S sequences that start with them: the chunks' own, then their
forks; W blocks in a row of block tables.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from nanovllm.engine.batch import Fork, PrefillChunk


class PackedChunks(NamedTuple):
    token_ids: np.ndarray  # [P]
    positions: np.ndarray  # [P]
    slot_mapping: np.ndarray  # [P], the KV slots to write; -1: none
    block_tables: np.ndarray  # [S, W]
    cu_seqlens_q: np.ndarray  # [N + 1], where each chunk's tokens begin; at last, where all end
    cu_seqlens_k: np.ndarray  # [N + 1], the same of the tokens that chunks attend to
    context_lens: np.ndarray  # [S], after this step


class SampledPlaces(NamedTuple):
    """From which of a step's tokens it samples, and for which starting sequences."""

    tokens: np.ndarray  # indices: those of decoding sequences first, then one for each below
    sequences: np.ndarray  # indices among the S


def pack_chunks(
    chunks: Sequence[PrefillChunk],
    sequences: Sequence[PrefillChunk | Fork],
    block_size: int,
    width: int,
) -> PackedChunks:
    """`sequences`: the chunks, then their forks. `width`: W."""
    num_chunks = len(chunks)
    token_ids, starts_q = concatenate([chunk.token_ids for chunk in chunks])
    blocks, starts = concatenate([seq.block_table for seq in sequences])
    tables = np.zeros((len(sequences), width), dtype=np.int64)
    tables[np.arange(width) < np.diff(starts)[:, None]] = blocks
    ends = np.array([seq.end for seq in sequences])
    starts_k = np.concatenate(([0], np.cumsum(ends[:num_chunks])))

    # Of each token: its chunk, and where it stands in its sequence.
    chunk_of = np.repeat(np.arange(num_chunks), np.diff(starts_q))
    positions = np.arange(len(token_ids)) + (ends[:num_chunks] - starts_q[1:])[chunk_of]
    block, offset = np.divmod(positions, block_size)
    slot_mapping = tables[chunk_of, block] * block_size + offset
    slot_mapping[positions < np.array([chunk.write_from for chunk in chunks])[chunk_of]] = -1
    return PackedChunks(token_ids, positions, slot_mapping, tables, starts_q, starts_k, ends)


def sampled_places(num_decodes: int, chunks: Sequence[PrefillChunk]) -> SampledPlaces:
    """A token is sampled for each decoding sequence, for each chunk that ends its prompt, from its
    last token, and for each fork, from the same.
    """
    ending = [i for i, chunk in enumerate(chunks) if chunk.is_last]
    forking = [i for i, chunk in enumerate(chunks) for _ in chunk.forks]
    ends = num_decodes + np.cumsum([len(chunk.token_ids) for chunk in chunks])
    tokens = np.concatenate((np.arange(num_decodes), ends[ending + forking] - 1))
    sequences = [*ending, *range(len(chunks), len(chunks) + len(forking))]
    return SampledPlaces(tokens.astype(np.int64), np.array(sequences, dtype=np.int64))


def concatenate(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows one after the other, and where each starts; the last start is the end of all."""
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=starts[-1]), starts
