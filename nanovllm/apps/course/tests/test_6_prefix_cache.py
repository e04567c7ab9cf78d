import pytest
from nanovllm.apps.course.solution.block_manager import BlockManager
from nanovllm.apps.course.solution.engine import Engine

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.fixture
def blocks():
    return BlockManager(num_blocks=8, block_size=4)


def test_registered_blocks_are_found(blocks):
    table = blocks.allocate(3)
    assert blocks.match(TOKENS) == []
    blocks.register(TOKENS, table)
    assert blocks.match(TOKENS) == table
    assert blocks.match(TOKENS + [7]) == table
    assert blocks.match(TOKENS[:11]) == table[:2]
    assert blocks.match(TOKENS[:8] + [0] * 4) == table[:2]


def test_only_full_blocks_are_registered(blocks):
    table = blocks.allocate(3)
    blocks.register(TOKENS[:10], table)
    assert blocks.match(TOKENS) == table[:2]
    blocks.register(TOKENS, table)
    assert blocks.match(TOKENS) == table


def test_a_block_is_found_only_after_its_own_prefix(blocks):
    blocks.register(TOKENS, blocks.allocate(3))
    assert blocks.match(TOKENS[4:]) == []
    assert blocks.match([0, 0, 0, 0, *TOKENS[4:]]) == []


def test_a_shared_block_is_free_when_all_have_released_it(blocks):
    table = blocks.allocate(3)
    blocks.register(TOKENS, table)
    blocks.share(table)
    blocks.release(table)
    assert blocks.num_free == 5 and not {*blocks.allocate(5)} & {*table}
    blocks.release(table)
    assert blocks.num_free == 3


def test_a_free_block_is_found_and_shared(blocks):
    table = blocks.allocate(3)
    blocks.register(TOKENS, table)
    blocks.release(table)
    assert blocks.num_free == 8 and blocks.match(TOKENS) == table
    blocks.share(table)
    assert blocks.num_free == 5 and not {*blocks.allocate(5)} & {*table}


def test_a_block_that_is_given_away_is_not_found(blocks):
    table = blocks.allocate(3)
    blocks.register(TOKENS, table)
    blocks.release(table)
    others = blocks.allocate(8)
    assert blocks.match(TOKENS) == []
    blocks.register(TOKENS[::-1], others[:3])
    assert blocks.match(TOKENS[::-1]) == others[:3] and blocks.match(TOKENS) == []


def test_the_same_content_in_two_blocks_is_no_error(blocks):
    one, two = blocks.allocate(3), blocks.allocate(3)
    blocks.register(TOKENS, one)
    blocks.register(TOKENS, two)
    assert blocks.match(TOKENS) in (one, two)
    blocks.release(one)
    blocks.release(two)
    blocks.allocate(8)
    assert blocks.match(TOKENS) == []


def test_a_cached_prefix_is_not_computed_again(model, long_prompt, library):
    engine = Engine(model, block_size=16)
    first, second = [*long_prompt, 17], [*long_prompt, 18, 19]
    assert engine.generate([first], 3) == library([first], 3)
    model.counts.clear()
    seq = engine.add(second, 3)
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
    assert [seq.output] == library([second], 3)
    assert seq.num_cached == len(long_prompt) // 16 * 16 > 0
    assert model.counts[0] == len(second) - seq.num_cached


def test_the_last_token_of_a_prompt_is_always_computed(model, long_prompt, library):
    engine = Engine(model, block_size=16)
    prompt = long_prompt[:64]
    assert engine.generate([prompt], 3) == engine.generate([prompt], 3) == library([prompt], 3)


def test_running_sequences_share_their_prefix(model, long_prompt, library):
    engine = Engine(model, block_size=16, num_blocks=64)
    first = engine.add(long_prompt, 8)
    engine.step()
    used = 64 - engine.blocks.num_free
    second = engine.add(long_prompt, 8)
    engine.step()
    assert 64 - engine.blocks.num_free <= used + 2
    while engine.scheduler.running:
        engine.step()
    assert [first.output, second.output] == library([long_prompt] * 2, 8)
    assert engine.blocks.num_free == 64


def test_the_end_of_a_prefix_is_given_away_before_its_beginning(blocks):
    table = blocks.allocate(3)
    blocks.register(TOKENS, table)
    blocks.release(table)
    blocks.allocate(6)  # of the eight blocks
    assert blocks.match(TOKENS) == table[:2]


def test_free_blocks_that_are_shared_are_not_left_for_the_rest(model, long_prompt):
    engine = Engine(model, num_blocks=6, block_size=16)
    prompt = long_prompt[:64]  # four blocks
    engine.generate([prompt], 2)
    others = engine.blocks.allocate(2)  # the four of the prompt are left
    seq = engine.add([*prompt, 17], 1)  # shares these, and needs a fifth: see question 1
    assert engine.scheduler.schedule() == [] and engine.blocks.num_free == 4
    engine.blocks.release(others)
    assert engine.step() == [seq]
