"""Sampling: reproducible from a seed, the same in any batch, and as random as its temperature
says.
"""

from collections import Counter

import pytest
from engine_helpers import PROMPTS, greedy

from nanovllm import SamplingParams

WARM = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)


def draw(llm, prompts, params=WARM):
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_seed_draws_the_same_tokens(make_llm, overlap):
    first, second = (draw(make_llm(seed=3, overlap=overlap), PROMPTS) for _ in range(2))
    assert first == second


def test_another_seed_draws_other_tokens(make_llm):
    runs = [draw(make_llm(seed=seed), PROMPTS) for seed in (3, 4, None, None)]
    assert all(
        a != b for i, run in enumerate(runs) for other in runs[:i] for a, b in zip(run, other)
    )


def test_requests_of_one_call_draw_independently(make_llm):
    outputs = draw(make_llm(seed=3), [PROMPTS[4]] * 5)
    assert len({tuple(output) for output in outputs}) == 5


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_seqs=3),
        dict(max_num_batched_tokens=20),
        dict(num_kvcache_blocks=9),
        dict(overlap=True),
        dict(overlap=True, num_kvcache_blocks=9, max_num_batched_tokens=20),
        dict(enable_prefix_caching=False),
    ],
    ids=str,
)
def test_draws_do_not_depend_on_how_they_are_run(make_llm, options):
    params = SamplingParams(temperature=1.5, max_tokens=50, ignore_eos=True)
    usual = draw(make_llm(seed=3), PROMPTS, params)
    llm = make_llm(seed=3, **options)
    assert draw(llm, PROMPTS, params) == usual
    assert "num_kvcache_blocks" not in options or llm.engine.scheduler.num_preemptions


def test_draws_do_not_depend_on_the_batch(make_llm):
    together, one_by_one = draw(make_llm(seed=3), PROMPTS), make_llm(seed=3)
    assert [draw(one_by_one, [prompt])[0] for prompt in PROMPTS] == together


def test_greedy_and_sampled_requests_share_a_batch(make_llm, checkpoint):
    usual = draw(make_llm(seed=3), PROMPTS)
    params = [WARM if i % 2 else greedy(20) for i in range(len(PROMPTS))]
    outputs = draw(make_llm(seed=3), PROMPTS, params)
    for i, (prompt, output) in enumerate(zip(PROMPTS, outputs)):
        assert output == (usual[i] if i % 2 else checkpoint.expected(prompt, 20))


def test_first_tokens_follow_the_models_distribution(make_llm, checkpoint):
    """Chi-square of 2000 draws against transformers' softmax; the seed is fixed, so it never
    fails by chance.
    """
    temperature, count = 1.3, 2000
    llm = make_llm(seed=0, max_num_seqs=256)
    params = SamplingParams(temperature=temperature, max_tokens=1)
    seen = Counter(tokens[0] for tokens in draw(llm, [PROMPTS[4]] * count, params))
    probabilities = checkpoint.probabilities(PROMPTS[4], temperature)
    likely = [token for token, p in enumerate(probabilities) if p * count >= 5]
    rest = (
        count - sum(seen[token] for token in likely),
        count * (1 - sum(probabilities[token] for token in likely)),
    )
    cells = [(seen[token], count * probabilities[token]) for token in likely] + [rest]
    chi_square = sum((got - expected) ** 2 / expected for got, expected in cells)
    freedom = len(cells) - 1
    assert freedom > 5 and chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_a_low_temperature_is_all_but_greedy(make_llm, checkpoint):
    outputs = draw(
        make_llm(seed=0), PROMPTS, SamplingParams(temperature=1e-6, max_tokens=20, ignore_eos=True)
    )
    assert outputs == [checkpoint.expected(prompt, 20) for prompt in PROMPTS]
