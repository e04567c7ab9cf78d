from nanovllm.apps.course.solution.block_manager import BlockManager
from nanovllm.apps.course.solution.paged_cache import Chunk, PagedCache, slot_of


def test_a_slot_is_block_times_size_plus_offset():
    table = [7, 2, 5]
    assert [slot_of(i, table, 4) for i in range(12)] == [
        *[28, 29, 30, 31],
        *[8, 9, 10, 11],
        *[20, 21, 22, 23],
    ]


def test_no_block_is_given_twice():
    blocks = BlockManager(8, 4)
    first, second = blocks.allocate(3), blocks.allocate(5)
    assert sorted(first + second) == list(range(8)) and blocks.num_free == 0


def test_a_released_block_is_given_again():
    blocks = BlockManager(8, 4)
    first, second = blocks.allocate(3), blocks.allocate(5)
    blocks.release(first)
    assert blocks.num_free == 3
    assert sorted(blocks.allocate(3)) == sorted(first)
    blocks.release(second)
    assert sorted(blocks.allocate(5)) == sorted(second)


def test_a_chunk_gets_the_next_token_of_the_library(model, prompts, library):
    cache = PagedCache(model, num_blocks=16, block_size=4)
    for prompt, expected in zip(prompts, library(prompts, 1)):
        logits = cache.run([Chunk(prompt, 0, [9, 3, 12, 0, 7, 5])])
        assert logits.argmax(dim=-1).tolist() == expected


def test_sequences_in_one_pass_do_not_see_each_other(model, prompts, library):
    cache = PagedCache(model, num_blocks=16, block_size=8)
    tables = [[5, 1], [2, 8, 0], [11, 4, 3], [9, 6]]
    logits = cache.run([Chunk(prompt, 0, table) for prompt, table in zip(prompts, tables)])
    assert [[token] for token in logits.argmax(dim=-1).tolist()] == library(prompts, 1)
    # A step in which each sequence computes one token: the one that it has just got.
    outputs = [expected.copy() for expected in library(prompts, 1)]
    for _ in range(4):
        chunks = [
            Chunk(output[-1:], len(prompt) + len(output) - 1, table)
            for prompt, output, table in zip(prompts, outputs, tables)
        ]
        for output, token in zip(outputs, cache.run(chunks).argmax(dim=-1).tolist()):
            output.append(token)
    assert outputs == library(prompts, 5)
    assert model.counts == [sum(map(len, prompts)), 4, 4, 4, 4]  # one pass for all


def test_a_prompt_may_come_in_chunks_beside_other_tokens(model, prompts, library):
    cache = PagedCache(model, num_blocks=8, block_size=8)
    one, two = prompts[1], prompts[2]
    cache.run([Chunk(two[:1], 0, [6]), Chunk(one[:5], 0, [3, 1, 4])])
    logits = cache.run([Chunk(one[5:], 5, [3, 1, 4]), Chunk(two[1:], 1, [6, 0])])
    assert [[token] for token in logits.argmax(dim=-1).tolist()] == library([one, two], 1)
