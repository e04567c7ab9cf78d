"""What each sampling parameter does, against a reference that says it plainly."""

import dataclasses
import math
import random

import pytest
import torch
from call_helpers import END, make_llm
from sampling_helpers import Draws, draw, process, random_params
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from nanovllm import SamplingParams
from nanovllm.features.sampling.filters import keep_likeliest
from nanovllm.features.sampling.resampler import Resampler
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.sampler import sample

PROMPTS = [[7, 8, 9, 10] * 5, [1, 2, 3], [40, 41, 42, 43, 44] * 7, [5], [99] * 17]


@pytest.fixture(scope="module")
def llm(folder):
    with make_llm(folder) as llm:
        yield llm


def token_ids(llm, prompts, params):
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_a_special_draw_is_the_plain_reference_with_the_same_noise():
    r, vocab, rows = random.Random(0), 1100, 120
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    seeds = torch.arange(rows)
    prompt, output = r.choices(range(vocab), k=40), r.choices(range(60), k=8)
    stop_ids = (3, 700)
    logits[:, 700] += 6  # often the likeliest
    params = [random_params(r) for _ in range(rows)]
    tokens = draw(logits, params, seeds, prompt, output, stop_ids)
    for row in range(rows):
        scores = torch.tensor(
            [process(logits[row].tolist(), params[row], prompt, output, stop_ids)]
        )
        seed, position = seeds[row : row + 1], torch.tensor([48])
        expected, _ = sample(scores, temperatures=torch.ones(1), seeds=seed, positions=position)
        assert tokens[row] == expected[0], params[row]


@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-20, 1e20, 1e39, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-38, 0.7, 1e38])
def test_no_penalty_lets_a_token_before_min_tokens_that_would_end_the_output(penalty, temperature):
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    logits[:, 3], logits[4:, 3], logits[:, 9] = 20, -20, 0
    options = dict(temperature=temperature, repetition_penalty=penalty, min_tokens=9)
    for more in ({}, dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1)):
        params = SamplingParams(**options, **more)
        tokens = draw(logits, params, torch.arange(8), prompt=[3, 9, 11], output=[9], stop_ids=[3])
        assert all(0 <= token < 50 and token != 3 for token in tokens.tolist())


@pytest.mark.parametrize("penalty", [1e-300, 1e-20, 1e20, 1e300])
def test_among_tokens_of_a_huge_penalty_the_likeliest_stays_the_likeliest(penalty):
    logits = torch.tensor([[5.0, 7.0, 6.0, -1.0, -3.0, 0.0]])
    # A huge penalty leaves the logits so near to each other that any temperature may choose any.
    for temperature in (0.0, 1e-12, 1e-8) if penalty < 1 else (0.0,):
        for more in ({}, dict(top_k=4), dict(min_p=0.01)):
            params = SamplingParams(temperature=temperature, repetition_penalty=penalty, **more)
            (token,) = draw(logits, params, torch.tensor([0]), range(6)).tolist()
            assert token == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-39, 1e-38, 1e-20, 1e-9, 1e-8])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = 40 * torch.randn(20, 500, generator=torch.Generator().manual_seed(2))
    for more in ({}, dict(top_k=50), dict(top_p=0.99), dict(repetition_penalty=1.0001)):
        params = SamplingParams(temperature=temperature, logprobs=0, **more)
        assert torch.equal(draw(logits, params, torch.arange(20)), logits.argmax(dim=1))


def test_rows_drawn_together_do_not_bound_each_other():
    logits = torch.linspace(0, 1e-3, 500).repeat(64, 1)  # all tokens about equally likely
    bounds = [
        dict(repetition_penalty=1.1),
        dict(top_k=2),
        dict(min_p=0.5),
        dict(logprobs=1),
        dict(top_k=7, top_p=0.9),
    ]
    for some in (bounds, bounds[:2], bounds[2:], bounds + [dict(top_p=0.99)]):
        params = [SamplingParams(**some[i % len(some)]) for i in range(64)]
        tokens = draw(logits, params, torch.arange(64), prompt=[0])
        alone = [draw(logits[:1], [params[i]], torch.tensor([i]), prompt=[0]) for i in range(64)]
        assert tokens.tolist() == torch.cat(alone).tolist()
        # The first of each has no bound that matters.
        assert len(set(tokens[:: len(some)].tolist())) > 7


class AllAtOnce(Resampler):
    rows_at_once = 5000


NO_FILTERS = dict(top_k=0, top_p=1.0, min_p=0.0)


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.7),
        dict(top_k=3),
        dict(top_k=4),  # where two are equally likely: neither goes without the other
        dict(top_k=5, top_p=0.9),  # two are as likely as the fifth
        dict(top_p=0.8),
        dict(min_p=0.2),
        dict(temperature=1.6, top_k=6, top_p=0.9, min_p=0.05),
        dict(presence_penalty=1.5),
        dict(frequency_penalty=-0.6),
        dict(repetition_penalty=1.8, frequency_penalty=0.4, presence_penalty=0.7, top_p=0.95),
        dict(min_tokens=60, top_p=0.9),
    ],
    ids=lambda options: "-".join(options),
)
def test_draws_follow_the_filtered_distribution(options):
    """Chi-squared over 100,000 draws; its upper 1e-4 quantile by Wilson and Hilferty's
    approximation.
    """
    params = SamplingParams(**options)
    inf = math.inf
    logits = [2.0, -1.0, 1.5, -inf, 0.3, 0.1, -2.0, 1.0, 0.3, -0.5, -inf, 0.8]
    context, count = ([0, 1, 1], [2, 2, 7], [0, 5]), 100_000
    rows, seeds = torch.tensor([logits] * 5000), torch.arange(5000) * 7919
    draws = Draws(rows, params, seeds, *context, make_resampler=AllAtOnce)
    table = draws.resampler.token_tables
    counts = None if table.counts is None else table.counts.clone()
    drawn = []
    for position in range(count // len(rows)):
        drawn.append(draws.run(position)[0])
        if counts is not None:  # the token that was just drawn is not there the next time
            table.counts.copy_(counts)
    tokens = torch.cat(drawn)
    scores = process(logits, params, *context)
    # A token as likely as the last one kept is kept too.
    least = min(score for score in scores if score > -inf)
    expected_scores = process(logits, dataclasses.replace(params, **NO_FILTERS), *context)
    weights = [math.exp(x) if x >= least - 1e-9 else 0.0 for x in expected_scores]
    expected = [count * weight / sum(weights) for weight in weights]
    observed = torch.bincount(tokens, minlength=len(logits)).tolist()
    assert all(n == 0 for n, e in zip(observed, expected) if e == 0)
    chi_squared = sum((n - e) ** 2 / e for n, e in zip(observed, expected) if e)
    free = sum(e > 0 for e in expected) - 1
    assert free >= 2
    assert chi_squared < free * (1 - 2 / (9 * free) + 3.719 * math.sqrt(2 / (9 * free))) ** 3


def keep(scores, top_k=0, top_p=1.0, min_p=0.0):
    vocab = len(scores)

    def column(x):
        return torch.tensor([[x]])

    kept = keep_likeliest(
        torch.tensor([scores]),
        temperatures=column(1.0),
        top_k=column(top_k or vocab),
        top_p=column(top_p),
        margin=column(math.log(min_p) if min_p else -math.inf),
        width=(top_k or vocab) if top_k or top_p < 1 else 0,
    )
    return set(kept[0].nonzero().flatten().tolist())


def test_top_p_keeps_the_token_that_crosses_the_bound():
    scores = [math.log(p) for p in (0.125, 0.5, 0.125, 0.25)]
    assert keep(scores, top_p=0.1) == {1}
    assert keep(scores, top_p=0.49) == {1}
    assert keep(scores, top_p=0.51) == {1, 3}
    assert keep(scores, top_p=0.74) == {1, 3}
    # The last two are equally likely: neither goes without the other.
    assert keep(scores, top_p=0.76) == {0, 1, 2, 3}
    assert keep(scores, top_p=1.0) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "options", [dict(top_p=0.5), dict(top_k=3), dict(top_k=2, top_p=0.5, min_p=0.1)], ids=str
)
def test_filters_do_not_hide_logits_that_are_no_numbers(options):
    logits = torch.tensor(
        [[math.nan] * 9, [math.inf] * 9, [-math.inf] * 9, [math.nan, *range(8)], [0.0] * 9]
    )
    tokens = draw(logits, SamplingParams(**options), torch.arange(5), [0, 1], [2])
    assert tokens[:4].tolist() == [-1] * 4 and 0 <= tokens[4] < 9


def test_top_k_and_min_p_keep_exact_sets():
    scores = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert [keep(scores, top_k=k) for k in (1, 2, 3, 4)] == [{1}, {1, 3}, {1, 2, 3}, {0, 1, 2, 3}]
    assert keep(scores, min_p=0.74) == {1, 3}
    assert keep(scores, min_p=0.76) == {1}
    assert keep(scores, min_p=1.0) == {1}
    assert keep(scores, min_p=0.24) == {0, 1, 2, 3}
    # min_p and top_k come before top_p, which is then a part of what they leave.
    assert keep(scores, top_p=0.56, min_p=0.74) == {1}
    assert keep(scores, top_p=0.56) == {1, 3}
    assert keep(scores, top_k=2, top_p=0.58) == {1, 3}
    assert keep(scores, top_k=2, top_p=0.57) == {1}


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.8, 0.9, 0.97])
def test_ties_at_the_kth_token_are_kept_and_count_for_top_p_as_in_transformers(top_k, top_p):
    generator = torch.Generator().manual_seed(top_k)
    for _ in range(20):
        scores = torch.randint(0, 5, (1, 12), generator=generator) / 3
        left = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, scores))
        # Of equally likely tokens, top_p drops some there and none here.
        expected = scores >= scores[left.isfinite()].min()
        assert keep(scores[0].tolist(), top_k, top_p) == set(expected[0].nonzero()[:, 0].tolist())


def test_no_bound_drops_nothing_however_the_sum_rounds():
    scores = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).tolist()
    assert len(keep(scores, top_k=49_999)) == 49_999


class OneOfTwo(ParallelGroup):
    """A rank of two, which hears from the other what it would have sent."""

    def all_gather(self, x):
        starts = self.vocab_starts(101)
        begin, end = starts[1 - self.rank : 3 - self.rank]
        other = torch.nn.functional.pad(LOGITS[:, begin:end], (0, x.shape[1] - (end - begin)))
        return torch.stack((x, other) if self.rank == 0 else (other, x))


LOGITS = torch.randn(20, 101, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rank, shard", [(0, slice(0, 48)), (1, slice(48, 101))])
def test_each_rank_draws_from_the_whole_vocabulary(rank, shard):
    params = SamplingParams(top_p=0.9, repetition_penalty=1.3)
    whole = draw(LOGITS, params, torch.arange(20), [1, 2, 90])
    group = OneOfTwo(rank, 2)
    part = draw(LOGITS[:, shard], params, torch.arange(20), [1, 2, 90], group=group, vocab_size=101)
    assert part.tolist() == whole.tolist()


# In the engine


def test_greedy_penalties_equal_a_plain_loop_over_transformers(llm, plain):
    params = [
        SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, repetition_penalty=1.4),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, presence_penalty=1.1),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=0.6),
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
        SamplingParams(
            temperature=0,
            max_tokens=17,
            ignore_eos=True,
            frequency_penalty=-0.3,
            repetition_penalty=0.8,
        ),
    ]
    for prompt, one, got in zip(PROMPTS, params, token_ids(llm, PROMPTS, params)):
        output = []
        while len(output) < one.max_tokens:
            scores = process(plain.logits(prompt + output).tolist(), one, prompt, output)
            output.append(scores.index(max(scores)))
        assert got == output


def many_params(count=12):
    r = random.Random(3)
    return [
        random_params(r, seed=100 + i, max_tokens=r.randint(12, 40), logprobs=None)
        for i in range(count)
    ]


def many_prompts(count=12):
    r = random.Random(4)
    return [[r.randrange(256) for _ in range(r.randint(1, 60))] for _ in range(count)]


@pytest.fixture(scope="module")
def alone(llm):
    return [
        token_ids(llm, [prompt], params)[0] for prompt, params in zip(many_prompts(), many_params())
    ]


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(overlap=True),
        dict(max_num_batched_tokens=24, overlap=True),  # prompts come in chunks
        dict(num_kvcache_blocks=12, enable_prefix_caching=False),  # sequences are preempted
        dict(num_kvcache_blocks=12, overlap=True),
        dict(max_num_seqs=3, overlap=True),  # rows change hands
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_a_seed_gives_the_same_tokens_in_any_batch(folder, alone, options):
    prompts, params = many_prompts(), many_params()
    order = random.Random(5).sample(range(12), 12)
    with make_llm(folder, **options) as llm:
        together = token_ids(llm, [prompts[i] for i in order], [params[i] for i in order])
        if options.get("num_kvcache_blocks"):
            assert llm.engine.scheduler.num_preemptions > 0
    assert together == [alone[i] for i in order]


def test_two_ranks_draw_what_one_does(folder, alone):
    prompts, params = many_prompts(), many_params()
    with make_llm(folder, tensor_parallel_size=2, device="cpu", overlap=True) as llm:
        assert token_ids(llm, prompts, params) == alone
        asking = [dataclasses.replace(one, logprobs=2) for one in params]
        outputs = llm.generate(prompts, asking, use_tqdm=False)
    assert all(len(output["logprobs"]) == len(output["token_ids"]) for output in outputs)


def test_another_seed_gives_other_tokens_and_none_the_engines_own(llm):
    prompts = [[1, 2, 3]] * 4
    seeds = [11, 11, 12, None]
    outputs = token_ids(
        llm, prompts, [SamplingParams(seed=seed, max_tokens=20, ignore_eos=True) for seed in seeds]
    )
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs}) == 3


def test_plain_rows_pay_nothing_and_draw_the_same_beside_special_ones(llm, alone, monkeypatch):
    plain_params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
    resampler = llm.engine.runner.resampler
    token_ids(llm, [[1]] * 8, SamplingParams(max_tokens=1))  # no row is special any more
    with monkeypatch.context() as patch:
        patch.setattr(Resampler, "_sample", None)  # would raise
        before = token_ids(llm, [[1, 2, 3]], plain_params)
    assert not resampler._metadata and not resampler._groups
    params = [
        plain_params,
        SamplingParams(top_k=2, max_tokens=20),
        SamplingParams(logprobs=1, max_tokens=20),
    ]
    assert token_ids(llm, [[1, 2, 3]] * 3, params)[0] == before[0]


def test_without_penalties_no_tokens_are_counted(folder):
    with make_llm(folder) as llm:
        token_ids(llm, [[1, 2]], SamplingParams(top_p=0.5, logprobs=2, min_tokens=3, max_tokens=4))
        assert llm.engine.runner.resampler.token_tables.counts is None
        token_ids(llm, [[1, 2]], SamplingParams(presence_penalty=0.5, max_tokens=2))
        assert llm.engine.runner.resampler.token_tables.counts is not None


def test_min_tokens_holds_back_every_token_that_would_end_the_output(llm):
    stop = list(range(200))  # together they are nearly always drawn
    params = SamplingParams(stop_token_ids=stop, max_tokens=30, min_tokens=9, temperature=1.5)
    for output in llm.generate([[i] for i in range(10)], params, use_tqdm=False):
        ids = output["token_ids"]
        assert all(token not in stop and token != END for token in ids[:9])
        assert output["finish_reason"] == "stop" and ids[-1] in [*stop, END] and len(ids) >= 10


def test_a_stop_token_ends_the_output_and_stays_in_it(llm, plain):
    greedy = plain.greedy([1, 2, 3], 25)
    stop = greedy[8]
    first = greedy.index(stop)
    params = SamplingParams(temperature=0, max_tokens=25, stop_token_ids=[stop], ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert output["token_ids"] == greedy[: first + 1]
    assert output["finish_reason"] == "stop"


def test_logprobs_are_the_models_own(folder, plain):
    params = [
        SamplingParams(
            max_tokens=20,
            logprobs=3,
            temperature=2.0,
            top_k=40,
            repetition_penalty=1.5,
            seed=1,
            ignore_eos=True,
        ),
        SamplingParams(max_tokens=11, logprobs=0, seed=2, ignore_eos=True),
        SamplingParams(max_tokens=9, seed=3),
        SamplingParams(max_tokens=15, logprobs=5, temperature=0, ignore_eos=True),
    ]
    with make_llm(folder, overlap=True) as llm:
        outputs = llm.generate(PROMPTS[:4], params, use_tqdm=False)
    assert "logprobs" not in outputs[2]
    for prompt, one, output in zip(PROMPTS, params, outputs):
        if one.logprobs is None:
            continue
        assert len(output["logprobs"]) == len(output["token_ids"])
        tokens = list(prompt)
        for token, got in zip(output["token_ids"], output["logprobs"]):
            expected = plain.logits(tokens).log_softmax(-1)
            best = expected.topk(one.logprobs).indices.tolist()
            assert set(got) == {token, *best}
            assert list(got)[0] == token
            assert all(abs(value - expected[i]) < 1e-3 for i, value in got.items())
            tokens.append(token)


def test_a_token_drawn_too_far_leaves_no_logprobs(folder, plain):
    stop = plain.greedy([1, 2, 3], 6)[-1]
    params = SamplingParams(
        temperature=0, max_tokens=20, stop_token_ids=[stop], logprobs=1, ignore_eos=True
    )
    with make_llm(folder, overlap=True) as llm:
        outputs = llm.generate(
            [[1, 2, 3], [7]],
            [params, dataclasses.replace(params, stop_token_ids=[])],
            use_tqdm=False,
        )
    assert all(len(output["logprobs"]) == len(output["token_ids"]) for output in outputs)


@pytest.mark.parametrize(
    "error, options",
    [
        (TypeError, dict(temperature="hot")),
        (ValueError, dict(temperature=-0.1)),
        (ValueError, dict(temperature=math.nan)),
        (ValueError, dict(temperature=math.inf)),
        (TypeError, dict(top_k=2.0)),
        (ValueError, dict(top_k=-2)),
        (TypeError, dict(top_p=None)),
        (ValueError, dict(top_p=0.0)),
        (ValueError, dict(top_p=1.1)),
        (ValueError, dict(min_p=-0.1)),
        (ValueError, dict(min_p=1.5)),
        (TypeError, dict(max_tokens=True)),
        (ValueError, dict(max_tokens=0)),
        (ValueError, dict(min_tokens=-1)),
        (ValueError, dict(min_tokens=65)),
        (TypeError, dict(ignore_eos=1)),
        (TypeError, dict(stop=3)),
        (TypeError, dict(stop=["a", 3])),
        (ValueError, dict(stop="")),
        (TypeError, dict(stop_token_ids=3)),
        (TypeError, dict(stop_token_ids=["a"])),
        (TypeError, dict(seed=1.0)),
        (ValueError, dict(seed=-1)),
        (ValueError, dict(seed=2**63)),
        (ValueError, dict(n=0)),
        (TypeError, dict(logprobs=True)),
        (ValueError, dict(logprobs=21)),
        (ValueError, dict(repetition_penalty=0)),
        (ValueError, dict(presence_penalty=2.1)),
        (ValueError, dict(frequency_penalty=-3)),
    ],
    ids=str,
)
def test_a_wrong_parameter_raises_naming_field_value_and_remedy(error, options):
    (field,) = options
    with pytest.raises(error, match=rf"^{field} (is|holds) .*: \w+ ") as raised:
        SamplingParams(**options)
    value = options[field]
    # Of a list of token ids, the error shows the wrong item.
    wrong = repr(value[0]) if value == ["a"] else str(value)
    assert value == "" or wrong in str(raised.value)


def test_a_stop_token_outside_the_vocabulary_is_refused_before_anything_runs(llm):
    with pytest.raises(ValueError, match=r"stop_token_ids.*263.*0 to 262"):
        llm.generate(
            [[1], [2]], [SamplingParams(), SamplingParams(stop_token_ids=[4, 263])], use_tqdm=False
        )
    assert not llm.engine.has_unfinished()


def test_defaults_are_plain_and_lists_become_tuples():
    # They change no arg max.
    assert SamplingParams(temperature=0, top_k=5, top_p=0.9, min_p=0.1).is_plain
    assert not any(
        SamplingParams(**one).is_plain for one in (dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1))
    )
    assert (
        SamplingParams().is_plain
        and SamplingParams(seed=3, stop="a", stop_token_ids=[1], top_k=-1).is_plain
    )
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert params.stop == ("a", "b") and params.stop_token_ids == (1, 2)
    assert SamplingParams(stop="ab", stop_token_ids=None).stop == ("ab",)
    assert hash(params) == hash(dataclasses.replace(params))
