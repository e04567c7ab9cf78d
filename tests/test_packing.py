"""A step's prompt chunks as arrays."""

from nanovllm.engine.batch import PrefillChunk
from nanovllm.engine.packing import pack_chunks, sampled_places


def chunk(token_ids, start, write_from, blocks, is_last):
    return PrefillChunk(0, token_ids, start, write_from, blocks, is_last, 1.0, 0)


CHUNKS = [
    chunk([10, 11, 12], 3, 4, [7, 2], True),  # tokens 3 to 5, the first of them cached
    chunk([20, 21], 0, 0, [3], False),
    chunk([12], 5, 4, [7, 1], True),
]


def test_chunks_lie_one_after_the_other():
    packed = pack_chunks(CHUNKS, block_size=4, width=3)
    assert packed.token_ids.tolist() == [10, 11, 12, 20, 21, 12]
    assert packed.positions.tolist() == [3, 4, 5, 0, 1, 5]
    assert packed.slot_mapping.tolist() == [-1, 8, 9, 12, 13, 5]
    assert packed.block_tables.tolist() == [[7, 2, 0], [3, 0, 0], [7, 1, 0]]
    assert packed.cu_seqlens_q.tolist() == [0, 3, 5, 6]
    assert packed.cu_seqlens_k.tolist() == [0, 6, 8, 14]
    assert packed.context_lens.tolist() == [6, 2, 6]


def test_tokens_are_sampled_after_prompts_that_end():
    places = sampled_places(2, CHUNKS)
    assert places.tokens.tolist() == [0, 1, 4, 7], "two decode, then two of three chunks"
    assert places.chunks.tolist() == [0, 2]
    places = sampled_places(0, CHUNKS[1:2])
    assert places.tokens.tolist() == places.chunks.tolist() == []
