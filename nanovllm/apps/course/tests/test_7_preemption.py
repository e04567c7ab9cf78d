import pytest
from nanovllm.apps.course.solution.engine import Engine


@pytest.mark.parametrize("num_blocks", [10, 16])
def test_few_blocks_do_not_change_the_outputs(model, prompts, num_blocks):
    model.end_token = -1
    engine = Engine(model, num_blocks=num_blocks, block_size=4)
    outputs = engine.generate(prompts, 20)
    assert outputs == Engine(model, num_blocks=64, block_size=4).generate(prompts, 20)
    assert engine.scheduler.num_preemptions > 0
    assert engine.blocks.num_free == num_blocks


def test_the_sequence_that_came_last_is_preempted(model, prompts):
    model.end_token = -1
    engine = Engine(model, num_blocks=10, block_size=4)
    seqs = [engine.add(prompt, 20) for prompt in prompts]
    ended = []
    while len(ended) < len(seqs):
        ended += engine.step()
        if seqs[0] not in ended:
            assert seqs[0] in engine.scheduler.running  # the first is never preempted
    assert ended[0] is seqs[0] and {*ended} == {*seqs}
    assert ended[-1] is seqs[-1]


def test_a_preempted_sequence_keeps_its_output(model, prompts, library):
    engine = Engine(model, num_blocks=10, block_size=4)
    seqs = [engine.add(prompt, 12) for prompt in prompts[:3]]
    longest = [0, 0, 0]
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
        lengths = [len(seq.output) for seq in seqs]
        assert all(length >= before for length, before in zip(lengths, longest))
        longest = lengths
    assert engine.scheduler.num_preemptions > 0
    assert [seq.output for seq in seqs] == library(prompts[:3], 12)


def test_a_request_that_can_never_fit_is_refused(model, prompts):
    with pytest.raises(ValueError, match="blocks"):
        Engine(model, num_blocks=4, block_size=4).add(prompts[0], 20)
