"""`LLM.on_step`: what its records say, and what a callback may do."""

import threading
from io import StringIO
from types import SimpleNamespace

import pytest
from engine_helpers import PROMPTS, assert_empty, assert_greedy, greedy
from process_helpers import SECONDS, in_thread
from tqdm.auto import tqdm

from nanovllm import LLM, StepRecord
from nanovllm.apps.bench.report import plot
from nanovllm.frontend.progress import Tokens, show_bar


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def llm(make_llm, request):
    # So few blocks that sequences are preempted, and so few tokens that prompts go in chunks.
    return make_llm(
        num_kvcache_blocks=9, max_num_seqs=6, max_num_batched_tokens=32, overlap=request.param
    )


def recorded(llm: LLM, prompts=PROMPTS, max_tokens=24) -> list[StepRecord]:
    steps: list[StepRecord] = []
    remove = llm.on_step(steps.append)
    llm.generate(prompts, greedy(max_tokens), use_tqdm=False)
    remove()
    return steps


def test_records_add_up_to_what_is_known_of_the_call(llm, monkeypatch):
    launch, batches = llm.engine.runner.launch, []
    monkeypatch.setattr(llm.engine.runner, "launch", lambda b: batches.append(b) or launch(b))
    steps = recorded(llm)
    call = llm.metrics()["last_call"]
    assert call["preemptions"] == sum(step.preemptions for step in steps) > 0
    assert call["requests"] == sum(len(step.finished) for step in steps) == len(PROMPTS)
    assert call["kv_cache_use"] == max(step.blocks_in_use for step in steps) / 9
    computed = sum(len(chunk.token_ids) for batch in batches for chunk in batch.prefills)
    assert computed == sum(step.prefill_tokens for step in steps) > 0
    assert computed == llm.engine.num_prefill_tokens
    decoded = sum(len(batch.decode_slots) for batch in batches)
    assert decoded == sum(step.decode_tokens for step in steps) > 0


def test_a_record_says_what_a_step_ran_and_for_how_long(make_llm):
    steps = recorded(make_llm(overlap=False), [[1] * 20, [2] * 10], 6)
    assert [step.number for step in steps] == list(range(6))
    assert [step.prefill_tokens for step in steps] == [30, 0, 0, 0, 0, 0]
    assert [step.decode_tokens for step in steps] == [0, 2, 2, 2, 2, 2]
    assert [(step.running, step.waiting, step.blocks_in_use) for step in steps] == [(2, 0, 3)] * 6
    assert {step.num_blocks for step in steps} == {96}
    assert [len(step.finished) for step in steps] == [0] * 5 + [2]
    ends = [step.time + step.seconds for step in steps]
    assert all(end <= step.time for end, step in zip(ends, steps[1:]))
    assert all(step.seconds > 0 for step in steps)


def test_the_ids_of_finished_requests_are_those_of_add_request(llm):
    steps: list[StepRecord] = []
    llm.on_step(steps.append)
    ids = [llm.add_request(prompt, greedy(n)) for n, prompt in enumerate(PROMPTS[:4], 1)]
    returned = []
    while llm.has_unfinished():
        returned += [output["id"] for output in llm.step()]
    assert [id for step in steps for id in step.finished] == returned
    assert sorted(returned) == ids


def test_a_callback_is_called_until_it_is_removed(llm):
    calls: list[str] = []
    removes = [llm.on_step(lambda step, name=name: calls.append(name)) for name in "abb"]
    llm.generate([PROMPTS[0]], greedy(1), use_tqdm=False)
    once = calls[:3]
    assert once == ["a", "b", "b"]
    removes[1]()
    removes[1]()  # again changes nothing
    calls.clear()
    llm.generate([PROMPTS[0]], greedy(1), use_tqdm=False)
    assert set(zip(calls[::2], calls[1::2])) == {("a", "b")}
    removes[0]()
    removes[2]()
    calls.clear()
    llm.generate([PROMPTS[0]], greedy(1), use_tqdm=False)
    assert calls == []


def test_a_callback_may_remove_itself(llm):
    calls = []

    def once(step: StepRecord) -> None:
        calls.append(step)
        remove()

    remove = llm.on_step(once)
    last = []
    llm.on_step(last.append)
    llm.generate([PROMPTS[0]], greedy(4), use_tqdm=False)
    assert len(calls) == 1 and len(last) >= 4  # the other one missed none


def test_what_a_callback_raises_leaves_the_call_and_an_empty_usable_llm(llm, checkpoint):
    def fail(step: StepRecord) -> None:
        if step.decode_tokens:
            raise RuntimeError("enough")

    remove = llm.on_step(fail)
    with pytest.raises(RuntimeError, match="enough"):
        llm.generate(PROMPTS, greedy(9), use_tqdm=False)
    assert_empty(llm)
    with pytest.raises(RuntimeError, match="enough"):
        list(llm.stream(PROMPTS, greedy(9)))
    assert_empty(llm)
    remove()
    assert_greedy(llm, checkpoint)


def test_a_callback_may_use_the_llm(llm, checkpoint):
    """It aborts one request, adds another, and reads the metrics, between two steps."""
    ids = [llm.add_request(prompt, greedy(24)) for prompt in PROMPTS[:3]]
    added = []

    def change(step: StepRecord) -> None:
        if step.number == 2:
            llm.abort(ids[1])
            added.append(llm.add_request(PROMPTS[5], greedy(5)))
        assert llm.metrics()["total"]["kv_cache_use"] >= step.blocks_in_use / step.num_blocks

    llm.on_step(change)
    outputs = {}
    while llm.has_unfinished():
        outputs |= {output["id"]: output["token_ids"] for output in llm.step()}
    expected = {ids[0]: (PROMPTS[0], 24), ids[2]: (PROMPTS[2], 24), added[0]: (PROMPTS[5], 5)}
    assert outputs == {id: checkpoint.expected(*what) for id, what in expected.items()}
    assert_empty(llm)


RUN_STEPS = {
    "generate": lambda llm, stream: llm.generate([[1]], use_tqdm=False),
    "stream": lambda llm, stream: list(llm.stream([[1]])),
    "stream that has begun": lambda llm, stream: next(stream),
    "score": lambda llm, stream: llm.score([[1]], [[2]], use_tqdm=False),
    "step": lambda llm, stream: llm.step(),
    "sleep": lambda llm, stream: llm.sleep(),
    "update_weights": lambda llm, stream: llm.update_weights([]),
}


@pytest.mark.parametrize("call", RUN_STEPS.values(), ids=RUN_STEPS)
@pytest.mark.parametrize("catches", [True, False], ids=["caught", ""])
def test_a_callback_that_would_run_steps_is_refused(llm, checkpoint, call, catches):
    """Where the callback catches the error, the call around it goes on undisturbed."""
    stream = llm.stream([PROMPTS[3]], greedy(30))
    next(stream)
    refused = []

    def disturb(step: StepRecord) -> None:
        if refused:
            return
        try:
            call(llm, stream)
        except RuntimeError as error:
            refused.append(str(error))
            if not catches:
                raise

    remove = llm.on_step(disturb)
    if catches:
        (output,) = llm.generate([PROMPTS[0]], greedy(3), use_tqdm=False)
        assert output["token_ids"] == checkpoint.expected(PROMPTS[0], 3)
        assert len(refused) == 1
    else:
        with pytest.raises(RuntimeError, match="in a callback use add_request"):
            llm.generate([PROMPTS[0]], greedy(3), use_tqdm=False)
    remove()
    stream.close()
    assert_empty(llm)
    assert_greedy(llm, checkpoint)


def test_a_callback_may_close_the_llm(llm):
    llm.on_step(lambda step: llm.close())
    with pytest.raises(ValueError, match="closed"):
        llm.generate(PROMPTS, greedy(9), use_tqdm=False)


def test_a_callback_runs_in_the_thread_of_the_step(llm):
    threads = set()
    llm.on_step(lambda step: threads.add(threading.current_thread()))

    def call():
        llm.generate([PROMPTS[0]], greedy(3), use_tqdm=False)
        return threading.current_thread()

    caller = in_thread(call).result(SECONDS)
    assert threads == {caller}


def test_what_cannot_be_called_is_refused(llm):
    with pytest.raises(TypeError, match="callback is 3: give a function"):
        llm.on_step(3)
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.on_step(print)


def test_the_progress_of_a_call_leaves_no_observer(llm):
    llm.generate(PROMPTS, greedy(3), use_tqdm=True)
    assert llm._session._observers == []


def test_a_call_without_a_bar_does_not_wait_for_tqdms_lock(llm):
    """Forked processes share it: one that is killed inside it never gives it back."""
    with tqdm.get_lock():
        in_thread(lambda: llm.generate([PROMPTS[0]], greedy(3), use_tqdm=False)).result(SECONDS)


def test_progress_counts_the_requests_of_its_call_alone(llm, capfd):
    other = llm.add_request(PROMPTS[0], greedy(1))
    llm.generate(PROMPTS[1:4], greedy(5), use_tqdm=True)
    shown = capfd.readouterr().err
    assert "3/3" in shown and "4/3" not in shown
    assert [output["id"] for output in llm.step()] == [other]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set, as clock.now."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("nanovllm.frontend.progress.perf_counter", lambda: clock.now)
    return clock


def test_a_bars_rates_are_those_of_the_last_seconds(clock):
    tokens = Tokens()
    clock.now += 1
    tokens.add(4000, 0)
    assert str(tokens) == "4,000 tokens, prefill 4,000 tok/s, decode 0 tok/s"
    for _ in range(100):
        clock.now += 0.5
        tokens.add(0, 50)
    assert str(tokens) == "9,000 tokens, prefill 0 tok/s, decode 100 tok/s"
    clock.now += 20  # one long step
    tokens.add(10000, 50)
    assert str(tokens).endswith("prefill 500 tok/s, decode 2 tok/s")


def test_a_bar_shows_tokens_before_any_request_has_finished(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream := StringIO())
    bar = show_bar(True, total=3)
    bar._time = lambda: clock.now
    bar.start_t = bar.last_print_t = clock.now
    clock.now += 1
    bar.set_postfix_str("7 tokens", refresh=False)
    bar.update(2)
    for _ in range(5):
        clock.now += 1
        bar.set_postfix_str(f"{clock.now:.0f} tokens", refresh=False)
        bar.update(0)
        assert f"{clock.now:.0f} tokens" in stream.getvalue()
    bar.close()


class Failing(StringIO):
    """A stream on which so many writes succeed."""

    def __init__(self, num_left: int, error: Exception) -> None:
        super().__init__()
        self.num_left, self.error = num_left, error

    def write(self, text: str) -> int:
        self.num_left -= 1
        if self.num_left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("num_left", [0, 1, 3])
@pytest.mark.parametrize("error", [OSError(28, "no space"), RuntimeError("a stranger's stream")])
def test_a_bar_that_cannot_be_written_costs_no_results(
    llm, checkpoint, monkeypatch, num_left, error
):
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread would write, too
    scores = llm.score([[5]], [[6, 7]], use_tqdm=False)
    monkeypatch.setattr("sys.stderr", stream := Failing(num_left, error))
    outputs = llm.generate(PROMPTS[:3], greedy(5))
    assert [one["token_ids"] for one in outputs] == [
        checkpoint.expected(prompt, 5) for prompt in PROMPTS[:3]
    ]
    assert stream.num_left < 0, "a write has failed"
    monkeypatch.setattr("sys.stderr", Failing(num_left, error))
    assert llm.score([[5]], [[6, 7]]) == scores
    monkeypatch.setattr("sys.stderr", stream := StringIO())
    llm.generate(PROMPTS[:3], greedy(5))
    assert "3/3" in stream.getvalue(), "the next bar is shown again"


def test_bench_draws_the_steps_of_a_run(llm, tmp_path):
    pytest.importorskip("matplotlib")
    plot(recorded(llm), tmp_path / "run.png", "a run")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
