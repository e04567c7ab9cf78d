"""Pause and resume through the calls: the tokens stay what they are, and nothing waits for ever."""

import random
from itertools import product

import pytest
from call_helpers import LaunchClock, completed
from engine_helpers import PROMPTS, Checkpoint, assert_empty, assert_greedy, greedy

from nanovllm import LLM, SamplingParams

TIGHT = dict(num_kvcache_blocks=8, max_num_seqs=3, max_num_batched_tokens=24, max_model_len=128)
REQUESTS = [
    *[(prompt, greedy(24)) for prompt in PROMPTS],
    *[(prompt, SamplingParams(max_tokens=9 + i, seed=i)) for i, prompt in enumerate(PROMPTS[:5])],
    (PROMPTS[5], SamplingParams(max_tokens=20, seed=7, n=3)),
    (PROMPTS[4], SamplingParams(max_tokens=20, seed=8, frequency_penalty=1.0, logprobs=1)),
]


def run_alone(llm: LLM, requests: list) -> list[dict]:
    prompts, params = zip(*requests)
    return completed(llm.generate(list(prompts), list(params), use_tqdm=False))


def run_with_pauses(llm: LLM, requests: list, seed: int) -> list[dict]:
    """Add requests one by one, and pause and resume any of them before each step."""
    chance, waiting, ids = random.Random(seed), list(requests), []
    outputs: dict[int, dict] = {}
    paused: set[int] = set()
    while waiting or llm.has_unfinished():
        if waiting and chance.random() < 0.7:
            ids.append(llm.add_request(*waiting.pop(0)))
        for id in [id for id in ids if id not in outputs]:
            if id in paused and chance.random() < 0.25:
                llm.resume(id)
                paused.remove(id)
            elif chance.random() < 0.15:
                llm.pause(id)
                paused.add(id)
        for output in llm.step():
            outputs[output.pop("id")] = output
            paused -= outputs.keys()
    return completed([outputs[id] for id in ids])


@pytest.mark.parametrize(
    "size, overlap, caching",
    [
        *[(1, *both) for both in product([False, True], repeat=2)],
        (2, True, False),
    ],
)
def test_pauses_change_no_token(make_llm, checkpoint: Checkpoint, size, overlap, caching):
    expected = run_alone(make_llm(), REQUESTS)
    assert [output["token_ids"] for output in expected[: len(PROMPTS)]] == [
        checkpoint.expected(prompt, 24) for prompt in PROMPTS
    ]
    options = TIGHT | dict(overlap=overlap, enable_prefix_caching=caching)
    llm = make_llm(tensor_parallel_size=size, **options)
    for seed in range(2 if size == 1 else 1):
        for output, usual in zip(run_with_pauses(llm, REQUESTS, seed), expected):
            assert without_logprobs(output) == without_logprobs(usual)
        assert llm.metrics()["total"]["preemptions"] > 0
        assert_empty(llm)


def without_logprobs(output: dict) -> dict:
    """Rounding may differ in another batch."""
    return {key: value for key, value in output.items() if "logprob" not in key}


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_step_returns_at_once_while_all_are_paused(make_llm, checkpoint, overlap):
    llm = make_llm(overlap=overlap)
    ids = [llm.add_request(prompt, greedy(9)) for prompt in PROMPTS[:3]]
    for _ in range(3):
        llm.step()
    for id in ids:
        llm.pause(id)
    llm.step()  # what was in flight
    steps = []
    llm.on_step(steps.append)
    assert [llm.step() for _ in range(3)] == [[]] * 3
    assert llm.has_unfinished() and sum(step.decode_tokens for step in steps) == 0
    metrics = llm.metrics()
    assert (metrics["running"], metrics["waiting"], metrics["paused"]) == (0, 0, 3)
    assert metrics["kv_cache_use"] > 0
    for id in ids:
        llm.resume(id)
    outputs = {}
    while llm.has_unfinished():
        outputs |= {output["id"]: output["token_ids"] for output in llm.step()}
    assert outputs == {id: checkpoint.expected(PROMPTS[i], 9) for i, id in enumerate(ids)}
    assert_empty(llm)


def test_pausing_twice_and_resuming_what_runs_change_nothing(make_llm, checkpoint):
    llm = make_llm()
    id = llm.add_request(PROMPTS[3], greedy(6))
    llm.resume(id)
    llm.step()
    llm.pause(id)
    llm.pause(id)
    assert llm.step() == [] and llm.metrics()["paused"] == 1
    llm.resume(id)
    llm.resume(id)
    outputs = []
    while llm.has_unfinished():
        outputs += llm.step()
    assert outputs[0]["token_ids"] == checkpoint.expected(PROMPTS[3], 6)


@pytest.mark.parametrize("call", ["pause", "resume"])
@pytest.mark.parametrize("wrong", [99, -1, None, "0", True])
def test_a_request_that_is_not_there_is_refused_and_no_other_is_harmed(make_llm, call, wrong):
    llm = make_llm()
    id = llm.add_request(PROMPTS[3], greedy(6))
    with pytest.raises(ValueError, match=f"request_id is {wrong!r}, .*: use what add_request"):
        getattr(llm, call)(wrong)
    while llm.has_unfinished():
        llm.step()
    with pytest.raises(ValueError, match=f"request_id is {id}, which no unfinished request has"):
        getattr(llm, call)(id)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_a_paused_request_may_be_aborted(make_llm, n, steps, overlap):
    llm = make_llm(overlap=overlap, max_num_batched_tokens=24)
    id = llm.add_request(PROMPTS[6], SamplingParams(n=n, max_tokens=9))
    for _ in range(steps):
        llm.step()
    llm.pause(id)
    llm.abort(id)
    assert_empty(llm)
    with pytest.raises(ValueError, match="request_id is"):
        llm.resume(id)


def test_generate_and_streams_run_beside_paused_requests_and_take_their_room(make_llm, checkpoint):
    llm = make_llm(**TIGHT)
    ids = [llm.add_request(prompt, greedy(24)) for prompt in PROMPTS[:3]]
    for _ in range(4):
        llm.step()
    for id in ids:
        llm.pause(id)
    expected = checkpoint.expected(PROMPTS[7], 24)
    (output,) = llm.generate([PROMPTS[7]], greedy(24), use_tqdm=False)
    assert output["token_ids"] == expected
    pieces = [ids for _, _, ids, _ in llm.stream([PROMPTS[7]], greedy(24))]
    assert sum(pieces, []) == expected
    for id in ids:
        llm.resume(id)
    outputs = {}
    while llm.has_unfinished():
        outputs |= {output["id"]: output["token_ids"] for output in llm.step()}
    assert outputs == {id: checkpoint.expected(PROMPTS[i], 24) for i, id in enumerate(ids)}


def test_an_interrupt_in_a_pause_leaves_an_empty_usable_llm(make_llm, checkpoint, monkeypatch):
    llm = make_llm()

    def strike(seq):
        raise KeyboardInterrupt("struck")

    for call, place in (("pause", "_withdraw"), ("resume", "resume"), ("abort", "_finish")):
        id = llm.add_request(PROMPTS[3], greedy(6))
        llm.step()
        if call == "resume":
            llm.pause(id)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.scheduler, place, strike)
            with pytest.raises(KeyboardInterrupt, match="struck"):
                getattr(llm, call)(id)
        assert not llm.has_unfinished()
        assert_greedy(llm, checkpoint, PROMPTS[3:5], max_tokens=6)


def test_an_error_drops_paused_requests_too(make_llm, checkpoint, monkeypatch):
    llm = make_llm()
    id = llm.add_request(PROMPTS[3], greedy(6))
    llm.step()
    llm.pause(id)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "launch", None)
        with pytest.raises(TypeError):
            llm.generate([PROMPTS[4]], greedy(6), use_tqdm=False)
    assert_empty(llm)
    with pytest.raises(ValueError, match="request_id is"):
        llm.resume(id)
    assert_greedy(llm, checkpoint, PROMPTS[3:5], max_tokens=6)


@pytest.mark.parametrize("n", [1, 2])
def test_the_clock_of_a_paused_request_stands_still(make_llm, monkeypatch, n):
    """A launch takes a second, and a pause a thousand: one before the first token, one after."""
    llm = make_llm(overlap=False)
    clock = LaunchClock(llm, monkeypatch)
    id = llm.add_request(PROMPTS[3], SamplingParams(max_tokens=5, ignore_eos=True, n=n))
    for steps in (0, 2, 3):
        for _ in range(steps):
            llm.step()
        if llm.has_unfinished():
            llm.pause(id)
            clock.now += 1000.0
            llm.pause(id)
            llm.resume(id)
    call = llm.metrics()["total"]
    assert call["requests"] == 1
    assert call["time_to_first_token"] == {"median": 1.0, "p99": 1.0}
    assert call["time_per_output_token"] == {"median": 1.0, "p99": 1.0}


def test_a_token_in_flight_is_counted_by_when_the_pause_began(make_llm, monkeypatch):
    now = 10.0
    llm = make_llm(overlap=True)
    monkeypatch.setattr("nanovllm.engine.llm_engine.perf_counter", lambda: now)
    id = llm.add_request(PROMPTS[3], greedy(2))
    llm.step()
    llm.pause(id)
    now += 1000.0
    assert llm.step() == []
    llm.resume(id)
    now += 1.0
    assert llm.step() == []
    llm.pause(id)
    now += 1000.0
    assert len(llm.step()) == 1, "it was in its last step"
    total = llm.metrics()["total"]
    assert total["time_to_first_token"]["p99"] == 0.0
    assert total["time_per_output_token"]["p99"] == 1.0
