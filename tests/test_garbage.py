"""Garbage collection during a call."""

import gc
import threading

import pytest
from process_helpers import SECONDS, in_thread

from nanovllm import SamplingParams
from nanovllm.backends.cpu.garbage import TIMES_RARER, full_collections_are_rare


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


RARE = (700, 10, 10 * TIMES_RARER)


def test_full_collections_are_rare_in_a_call_and_as_before_after_it(make_llm, monkeypatch):
    llm, seen = make_llm(), []
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: seen.append(gc.get_threshold()) or step())
    params = SamplingParams(temperature=0.0, max_tokens=2)
    llm.generate([[1, 2]], params, use_tqdm=False)
    assert set(seen) == {RARE} and gc.get_threshold() == (700, 10, 10)

    def fail():
        raise RuntimeError("mine")

    monkeypatch.setattr(llm.engine, "step", fail)
    with pytest.raises(RuntimeError, match="mine"):
        llm.generate([[1, 2]], params, use_tqdm=False)
    assert gc.get_threshold() == (700, 10, 10)


def test_calls_of_several_threads_end_with_the_thresholds_of_before():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with full_collections_are_rare():
            inside.set()
            leave.wait(SECONDS)

    with full_collections_are_rare():
        thread = in_thread(other)
        assert inside.wait(SECONDS) and gc.get_threshold() == RARE
    assert gc.get_threshold() == RARE, "the other is still inside"
    leave.set()
    thread.result(SECONDS)
    assert gc.get_threshold() == (700, 10, 10)


def test_what_the_user_sets_meanwhile_stays():
    with full_collections_are_rare():
        gc.set_threshold(1000, 5, 5)
    assert gc.get_threshold() == (1000, 5, 5)
