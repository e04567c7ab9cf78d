"""A step's prompt chunks as arrays."""

from nanovllm.engine.batch import Fork, PrefillChunk
from nanovllm.engine.packing import pack_chunks, sampled_places


def chunk(token_ids, start, write_from, blocks, is_last, forks=()):
    return PrefillChunk(0, token_ids, start, write_from, blocks, is_last, 1.0, 0, forks=forks)


FORK = Fork(5, 6, [7, 1], 1.0, 0)
CHUNKS = [
    chunk([10, 11, 12], 3, 4, [7, 2], True, (FORK,)),  # tokens 3 to 5, the first of them cached
    chunk([20, 21], 0, 0, [3], False),
]


def test_chunks_lie_one_after_the_other_and_then_come_their_forks():
    packed = pack_chunks(CHUNKS, [*CHUNKS, FORK], block_size=4, width=3)
    assert packed.token_ids.tolist() == [10, 11, 12, 20, 21]
    assert packed.positions.tolist() == [3, 4, 5, 0, 1]
    assert packed.slot_mapping.tolist() == [-1, 8, 9, 12, 13]
    assert packed.block_tables.tolist() == [[7, 2, 0], [3, 0, 0], [7, 1, 0]]
    assert packed.cu_seqlens_q.tolist() == [0, 3, 5]
    assert packed.cu_seqlens_k.tolist() == [0, 6, 8]
    assert packed.context_lens.tolist() == [6, 2, 6]


def test_tokens_are_sampled_after_prompts_that_end_and_for_their_forks():
    places = sampled_places(2, CHUNKS)
    assert places.tokens.tolist() == [0, 1, 4, 4], "two decode; the chunk and its fork"
    assert places.sequences.tolist() == [0, 2]
    places = sampled_places(0, CHUNKS[1:])
    assert places.tokens.tolist() == places.sequences.tolist() == []
