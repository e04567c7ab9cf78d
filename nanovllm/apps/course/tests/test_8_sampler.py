import torch
from nanovllm.apps.course.solution.engine import Engine
from nanovllm.apps.course.solution.sampler import keep_likeliest, sample

N = 4000
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, num=N, first_seed=0):
    """Sample `num` tokens from the same logits, with different seeds."""
    return sample(
        logits.repeat(num, 1),
        torch.full((num,), temperature),
        torch.full((num,), top_k),
        torch.full((num,), top_p),
        first_seed + torch.arange(num),
        torch.full((num,), 7),
    )


def shares(tokens):
    return torch.bincount(torch.tensor(tokens), minlength=5) / len(tokens)


def kept(logits, top_k=0, top_p=1.0):
    logits = keep_likeliest(torch.tensor([logits]), torch.tensor([top_k]), torch.tensor([top_p]))
    return [i for i, logit in enumerate(logits[0].tolist()) if logit > -torch.inf]


def test_temperature_0_takes_the_likeliest_token():
    assert {*draw(LOGITS, temperature=0.0)} == {0}


def test_tokens_come_as_often_as_softmax_says():
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS / temperature).softmax(dim=-1)
        assert (shares(draw(LOGITS, temperature)) - expected).abs().max() < 0.04


def test_a_draw_depends_on_seed_and_position_alone():
    tokens = draw(LOGITS)
    assert tokens == draw(LOGITS)
    assert tokens[100:200] == draw(LOGITS, num=100, first_seed=100)  # in another batch
    rows = torch.arange(N)
    ones, zeros = torch.ones(N), torch.zeros(N, dtype=torch.int64)
    at_positions = sample(LOGITS.repeat(N, 1), ones, zeros, ones, zeros, rows)
    assert (shares(at_positions) - LOGITS.softmax(dim=-1)).abs().max() < 0.04


def test_top_k_keeps_the_k_likeliest():
    assert kept([1.0, 5.0, 3.0, 4.0], top_k=2) == [1, 3]
    assert kept([1.0, 5.0, 3.0, 4.0], top_k=0) == [0, 1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log().tolist()
    assert kept(logits, top_p=0.4) == [1]
    assert kept(logits, top_p=0.6) == [1, 2]
    assert kept(logits, top_p=0.8) == [1, 2, 3]
    assert kept(logits, top_p=1.0) == [0, 1, 2, 3]


def test_top_p_counts_what_top_k_kept():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log().tolist()
    assert kept(logits, top_k=2, top_p=0.66) == [1]  # 0.5 of 0.75 is enough
    assert kept(logits, top_k=2, top_p=0.68) == [1, 2]


def test_filtered_tokens_never_come():
    tokens = draw(LOGITS, top_k=2)
    assert {*tokens} == {0, 1}
    assert (shares(tokens)[:2] - LOGITS[:2].softmax(dim=-1)).abs().max() < 0.04


def test_rows_do_not_share_their_parameters():
    tokens = sample(
        LOGITS.repeat(3, 1),
        torch.tensor([0.0, 1.0, 1.0]),
        torch.tensor([0, 1, 0]),
        torch.tensor([1.0, 1.0, 0.1]),
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3]),
    )
    assert tokens == [0, 0, 0]


def test_a_sampled_output_is_the_same_alone_and_beside_others(model, prompts, long_prompt):
    model.end_token = -1
    sampling = dict(temperature=0.8, top_k=50, top_p=0.95, seed=3)
    alone = [Engine(model).generate([prompt], 15, **sampling)[0] for prompt in prompts]
    small = Engine(model, num_blocks=14, block_size=4, max_tokens=8)  # chunks and preemptions
    assert small.generate(prompts, 15, **sampling) == alone
    assert small.scheduler.num_preemptions > 0
    other = Engine(model).generate(prompts[:1], 15, **sampling | {"seed": 4})
    assert other != alone[:1]


def test_the_whole_engine_computes_the_tokens_of_the_library(model, prompts, long_prompt, library):
    asked = [*prompts, long_prompt, [*long_prompt, 17]]
    engine = Engine(model, num_blocks=48, block_size=4, max_seqs=3, max_tokens=24)
    assert engine.generate(asked, 12) == library(asked, 12)
