import threading

import pytest
from nanovllm.apps.course.solution.engine import Engine
from nanovllm.apps.course.solution.overlapped import OverlappedEngine


@pytest.fixture
def gate(model):
    """A semaphore that each forward pass must pass: the device can be made to wait."""
    gate = threading.Semaphore(0)
    forward = model.forward

    def gated(*args):
        if not gate.acquire(timeout=20):
            raise TimeoutError("the host waited for a step that it had only to launch")
        return forward(*args)

    model.forward = gated
    return gate


def test_outputs_are_those_of_the_library(model, prompts, library):
    engine = OverlappedEngine(model)
    assert engine.generate(prompts, 12) == library(prompts, 12)
    assert engine.generate(prompts[::-1], 7) == library(prompts[::-1], 7)


def test_the_first_step_is_launched_and_not_waited_for(model, prompts, gate):
    engine = OverlappedEngine(model)
    seq = engine.add(prompts[0], 3)
    assert engine.step() == []  # the gate is closed
    gate.release(9)
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
    assert len(seq.output) == 3


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(model, prompts, gate):
    model.end_token = -2
    engine = OverlappedEngine(model)
    short, long = engine.add(prompts[0], 1), engine.add(prompts[1], 4)
    assert engine.step() == []
    gate.release()  # the first step may run, and no other
    assert engine.step() == [short]
    assert long in engine.scheduler.running
    gate.release(9)
    while engine.scheduler.running:
        engine.step()
    assert [len(short.output), len(long.output)] == [1, 4]


def test_a_sequence_runs_one_step_too_far_if_nobody_knew_its_end(model, prompts):
    model.end_token = -2
    (output,) = Engine(model).generate(prompts[:1], 8)
    model.end_token = output[4]  # so the end comes as a surprise
    length = output.index(model.end_token) + 1
    model.counts.clear()
    assert OverlappedEngine(model).generate(prompts[:1], 8) == [output[:length]]
    assert sum(model.counts) == len(prompts[0]) + length


def test_a_sequence_does_not_run_beyond_max_tokens(model, prompts):
    model.end_token = -2
    OverlappedEngine(model).generate(prompts[:1], 8)
    assert sum(model.counts) == len(prompts[0]) + 7


@pytest.mark.parametrize("num_blocks", [10, 16])
def test_few_blocks_and_chunks_do_not_change_the_outputs(model, prompts, num_blocks):
    model.end_token = -2
    engine = OverlappedEngine(model, num_blocks=num_blocks, block_size=4, max_tokens=8)
    outputs = engine.generate(prompts, 20)
    assert outputs == Engine(model, num_blocks=64, block_size=4).generate(prompts, 20)
    assert engine.scheduler.num_preemptions > 0
    assert engine.blocks.num_free == num_blocks


def test_a_preempted_sequence_may_end_by_a_token_that_was_under_way(model, prompts):
    model.end_token = -2
    plain = Engine(model).generate(prompts, 20)
    for end in plain[2][:8]:
        model.end_token = end
        expected = [[*output, end][: [*output, end].index(end) + 1][:20] for output in plain]
        engine = OverlappedEngine(model, num_blocks=10, block_size=4, max_tokens=8)
        assert engine.generate(prompts, 20) == expected
        assert engine.blocks.num_free == 10


def test_the_prefix_cache_works(model, long_prompt, library):
    engine = OverlappedEngine(model, block_size=8)
    first = engine.generate([long_prompt], 4)
    model.counts.clear()
    assert engine.generate([long_prompt], 4) == first == library([long_prompt], 4)
    assert model.counts[0] <= 8


def test_sampled_outputs_are_the_same_with_and_without_overlap(model, prompts):
    model.end_token = -2
    sampling = dict(temperature=0.8, top_k=50, top_p=0.95, seed=3)
    expected = Engine(model).generate(prompts, 15, **sampling)
    assert OverlappedEngine(model).generate(prompts, 15, **sampling) == expected
