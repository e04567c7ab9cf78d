from nanovllm.apps.course.solution.engine import Engine
from nanovllm.apps.course.solution.scheduler import Scheduler


def run_all(engine):
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()


def test_outputs_are_those_of_the_library(model, prompts, library):
    engine = Engine(model)
    assert engine.generate(prompts, 12) == library(prompts, 12)
    assert engine.generate(prompts[::-1], 7) == library(prompts[::-1], 7)


def test_a_step_computes_one_token_of_each_sequence_that_decodes(model, prompts):
    model.end_token = -1
    Engine(model).generate(prompts, 5)
    assert model.counts == [sum(map(len, prompts)), 4, 4, 4, 4]


def test_a_sequence_may_join_while_others_run(model, prompts, library):
    engine = Engine(model)
    first = engine.add(prompts[0], 9)
    for _ in range(3):
        engine.step()
    second = engine.add(prompts[1], 9)
    engine.step()
    assert len(first.output) == 4 and len(second.output) == 1
    run_all(engine)
    assert [first.output, second.output] == library(prompts[:2], 9)


def test_a_waiting_sequence_starts_as_soon_as_another_has_ended(model, prompts):
    model.end_token = -1
    engine = Engine(model, max_seqs=2)
    short, long = engine.add(prompts[0], 2), engine.add(prompts[1], 6)
    last = engine.add(prompts[2], 3)
    lengths = []
    for _ in range(6):
        engine.step()
        lengths.append([len(short.output), len(long.output), len(last.output)])
    assert lengths == [[1, 1, 0], [2, 2, 0], [2, 3, 1], [2, 4, 2], [2, 5, 3], [2, 6, 3]]


def test_no_more_sequences_run_than_may(model, prompts, library):
    engine = Engine(model, max_seqs=1)
    assert engine.generate(prompts, 4) == library(prompts, 4)
    assert max(model.counts[1:4]) == 1


def test_a_sequence_waits_until_there_are_blocks_for_its_prompt(model, prompts, library):
    engine = Engine(model, num_blocks=4, block_size=8)
    assert len(prompts[1]) > 8 and len(prompts[2]) <= 8
    first, second = engine.add(prompts[1], 3), engine.add(prompts[1], 3)
    engine.blocks.allocate(1)  # three are left
    engine.step()
    assert len(first.output) == 1 and second.output == []
    run_all(engine)
    assert [first.output, second.output] == library([prompts[1]] * 2, 3)


def test_all_blocks_are_free_in_the_end(model, prompts):
    engine = Engine(model)
    engine.generate(prompts, 12)
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_ended_sequences_are_returned(model, prompts):
    model.end_token = -1
    engine = Engine(model)
    short, long = engine.add(prompts[0], 1), engine.add(prompts[1], 2)
    assert engine.step() == [short]
    assert engine.step() == [long]
    assert isinstance(engine.scheduler, Scheduler)
