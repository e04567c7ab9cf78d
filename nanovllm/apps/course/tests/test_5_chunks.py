from nanovllm.apps.course.solution.engine import Engine


def test_a_step_computes_no_more_tokens_than_its_budget(model, prompts, long_prompt, library):
    engine = Engine(model, max_tokens=32)
    both = [long_prompt, *prompts, long_prompt[::-1]]
    assert engine.generate(both, 6) == library(both, 6)
    assert max(model.counts) == 32


def test_others_decode_while_a_long_prompt_is_computed(model, prompts, long_prompt, library):
    model.end_token = -1
    engine = Engine(model, max_tokens=32)
    first = engine.add(prompts[0], 30)
    engine.step()
    second = engine.add(long_prompt, 4)
    num_steps = 0
    while not second.output:
        engine.step()
        num_steps += 1
        assert len(first.output) == 1 + num_steps
    assert num_steps == -(-len(long_prompt) // 31)  # one token of each step goes to the first
    while engine.scheduler.running:
        engine.step()
    assert second.output == library([long_prompt], 4)[0]


def test_a_step_holds_the_ends_and_beginnings_of_several_prompts(model, prompts):
    model.end_token = -1
    Engine(model, max_tokens=16).generate(prompts, 1)
    total = sum(map(len, prompts))
    assert model.counts == [16] * (total // 16) + [total % 16] * (total % 16 > 0)
