"""n completions of a prompt that is computed once."""

import random
from dataclasses import replace

import pytest
from call_helpers import check_empty, completed, generate, make_llm, random_prompts
from simulated_device import check_blocks
from simulated_device import check_empty as check_nothing_left

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler


def mixed_params(count, seed=0):
    """Of every length and number of completions, some special."""
    r = random.Random(seed)
    options = [
        dict(),
        dict(top_k=20),
        dict(repetition_penalty=1.3),
        dict(logprobs=2),
        dict(stop=["th", "q"]),
    ]
    return [
        SamplingParams(
            n=r.randint(1, 5), seed=100 * i, max_tokens=r.randint(1, 30), **r.choice(options)
        )
        for i in range(count)
    ]


def one_by_one(llm, prompts, params):
    """The same completions, each a request of its own with its own seed."""
    singles = [
        [SamplingParams(**{**as_dict(one), "n": 1, "seed": one.seed + i}) for i in range(one.n)]
        for one in params
    ]
    return [
        [generate(llm, [prompt], single)[0] for single in one]
        for prompt, one in zip(prompts, singles)
    ]


def as_dict(params):
    return {name: getattr(params, name) for name in params.__slots__}


PROMPTS = random_prompts(9, seed=8) + [list(range(16)), list(range(48)), list(range(33))]


@pytest.fixture(scope="module")
def expected(folder):
    with make_llm(folder, enable_prefix_caching=False) as llm:
        return one_by_one(llm, PROMPTS, mixed_params(12))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(overlap=True),
        dict(enable_prefix_caching=False, overlap=True),
        dict(
            max_num_batched_tokens=16, overlap=True
        ),  # prompts come in chunks, the other completions wait for the last
        dict(num_kvcache_blocks=9, overlap=True),  # completions are preempted
        dict(num_kvcache_blocks=8, max_num_batched_tokens=20, enable_prefix_caching=False),
        dict(max_num_seqs=5, overlap=True),
        dict(max_num_seqs=3),  # some of five wait
        dict(max_num_seqs=1, overlap=True, enable_prefix_caching=False),
        dict(max_num_batched_tokens=2, overlap=True),
        dict(num_kvcache_blocks=5),  # too few for five to begin together
        dict(tensor_parallel_size=2, device="cpu"),
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_completions_are_what_their_seeds_give_alone(folder, expected, options):
    params = mixed_params(12)
    with make_llm(folder, **options) as llm:
        outputs = generate(llm, PROMPTS, params)
        scheduler = llm.engine.scheduler
        check_nothing_left(scheduler)
        if "num_kvcache_blocks" in options:
            assert scheduler.num_preemptions > 0
    for output, one, alone in zip(outputs, params, expected):
        completions = output.pop("completions", [output])
        assert [without_logprobs(completion) for completion in completions] == [
            without_logprobs(one) for one in alone
        ]
        assert output == completions[0]
        if one.logprobs is not None:
            assert [len(completion["logprobs"]) for completion in completions] == [
                len(c["token_ids"]) for c in completions
            ]


def without_logprobs(output):
    return {key: value for key, value in output.items() if "logprob" not in key}


@pytest.mark.parametrize("length, again", [(48, 1), (40, 8)])  # blocks have 16 tokens
def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared(folder, length, again):
    """Though no prefix is cached for others. A further completion computes the last token alone,
    or the last block if that is too short to copy.
    """
    prompt = [1] * length
    with make_llm(folder, enable_prefix_caching=False) as llm:
        params = SamplingParams(n=6, max_tokens=3, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert len(output["completions"]) == 6 and output["num_cached_tokens"] == 0
        assert llm.engine.num_prefill_tokens == length + 5 * again
        metrics = llm.metrics()["total"]
        counts = metrics["requests"], metrics["prompt_tokens"], metrics["output_tokens"]
        assert counts == (1, length, 18)
        assert metrics["kv_cache_use"] == (length // 16 + 6) / 128
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output["num_cached_tokens"] == 0


def test_without_a_seed_completions_differ(folder):
    with make_llm(folder) as llm:
        (output,) = generate(llm, [[1, 2, 3]], SamplingParams(n=4, max_tokens=12, ignore_eos=True))
    assert len({tuple(completion["token_ids"]) for completion in output["completions"]}) == 4


def test_a_request_of_several_completions_may_be_stepped_and_aborted(folder):
    params = SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True)
    with make_llm(folder, max_num_batched_tokens=16, overlap=True) as llm:
        expected = generate(llm, [[1] * 40], params)
        for steps in (0, 1, 2, 3, 4, 6):  # waiting, in the middle of its prompt, all completions
            dropped = llm.add_request([2] * 40, params)
            for _ in range(steps):
                assert llm.step() == []
            llm.abort(dropped)
            check_empty(llm)
        kept = llm.add_request([1] * 40, params)
        outputs = []
        while llm.has_unfinished():
            outputs += llm.step()
        assert completed(outputs) == [{"id": kept, **expected[0]}]


@pytest.mark.parametrize("prompt", [[1], [1] * 20, [1] * 32, [1] * 60], ids=len)
def test_completions_that_cannot_begin_together_wait_for_those_that_do(folder, prompt):
    """By batch slots, which are eight here, or by KV blocks. The prompt is computed once."""
    params = SamplingParams(n=30, seed=3, max_tokens=5, ignore_eos=True)
    with make_llm(folder) as llm:
        alone = [replace(params, n=1, seed=3 + i) for i in range(30)]
        expected = [output["token_ids"] for output in generate(llm, [prompt] * 30, alone)]
    with make_llm(folder, num_kvcache_blocks=5, overlap=True) as llm:
        most = []
        llm.on_step(lambda step: most.append(step.running))
        (output,) = generate(llm, [prompt], params)
        assert [one["token_ids"] for one in output["completions"]] == expected
        assert min(8, 5 - len(prompt) // 16) <= max(most) <= 8
        # Of a prompt that is cached, each computes the last token, and up to fifteen before it.
        assert llm.engine.num_prefill_tokens <= len(prompt) + 29 * 16
        check_empty(llm)


def test_completions_that_wait_can_be_aborted_and_paused(folder):
    params = SamplingParams(n=7, seed=1, max_tokens=6, ignore_eos=True)
    with make_llm(folder, max_num_seqs=3) as llm:
        expected = generate(llm, [[1] * 40], params)
        for steps in range(5):
            dropped, kept = (llm.add_request([1] * 40, params) for _ in range(2))
            for _ in range(steps):
                assert llm.step() == []
            llm.abort(dropped)
            llm.pause(kept)
            assert llm.step() == []
            llm.resume(kept)
            outputs = []
            while llm.has_unfinished():
                outputs += llm.step()
            for output in (*outputs, *expected):
                output.pop("num_cached_tokens", None)
            assert completed(outputs) == [{"id": kept, **expected[0]}]
            check_empty(llm)


def test_a_stream_of_several_completions_is_refused(folder):
    with make_llm(folder) as llm:
        with pytest.raises(ValueError, match=r"sampling_params\[0\].n is 2: stream one"):
            llm.stream([[1]], SamplingParams(n=2))
        check_empty(llm)


def test_blocks_of_completions_are_counted_at_every_step():
    """Random requests and random tokens, some of which end a sequence, in a scheduler alone."""
    for seed in range(60):
        r = random.Random(seed)
        scheduler = Scheduler(
            BlockManager(r.randint(6, 14), 4, r.random() < 0.7),
            max_num_seqs=6,
            max_num_batched_tokens=r.randint(6, 20),
        )
        requests, in_flight, overlap = [], [], r.random() < 0.5
        id = 0
        for _ in range(r.randint(1, 8)):
            prompt = [r.randrange(2) for _ in range(r.randint(1, 12))]
            n, max_len = r.randint(1, 9), len(prompt) + r.randint(1, 8)
            options = dict(max_len=max_len, seeds=range(n), stop_ids=frozenset({5}))
            requests.append(Request(id, prompt, SamplingParams(max_tokens=8), **options))
            scheduler.add(requests[-1])
            id += n
        while scheduler.has_unfinished():
            batch = scheduler.schedule()
            check_blocks(scheduler)
            if batch is not None:
                in_flight.append(len(batch.sampling_slots))
            if in_flight and (not overlap or batch is None or len(in_flight) > 1):
                scheduler.commit([r.randrange(6) for _ in range(in_flight.pop(0))])
                check_blocks(scheduler)
        check_nothing_left(scheduler)
        for seq in [seq for request in requests for seq in request.completions]:
            assert (
                len(seq.token_ids) == seq.max_len
                if seq.finish_reason == "length"
                else seq.token_ids[-1] == 5
            )
