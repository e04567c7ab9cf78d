"""An LLM can be closed and interrupted at any time and from any thread, and no rank outlives it."""

import gc
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from engine_helpers import PROMPTS, assert_greedy, greedy
from process_helpers import SECONDS, alarms, in_thread, no_process_left, said
from rank_faults import EchoRunner, set_fault

from nanovllm import LLM, RankError
from nanovllm.backends.tensor_parallel import rank_process
from nanovllm.backends.tensor_parallel.runner import TensorParallelRunner

OPTIONS = dict(device="cpu", max_model_len=256, kvcache_block_size=16, num_kvcache_blocks=96)
TESTS = Path(__file__).parent
CLOSED = "ClosedError: this LLM is closed: make a new one"


@pytest.fixture
def make(checkpoint, request):
    """A function: number of ranks, options -> an LLM."""

    def make(ranks: int = 1, **options) -> LLM:
        llm = LLM(checkpoint.folder, tensor_parallel_size=ranks, **OPTIONS | options)
        request.addfinalizer(llm.close)
        return llm

    return make


@pytest.fixture
def echo_ranks(monkeypatch):
    """Ranks without a model."""
    monkeypatch.setattr("nanovllm.build.build_runner", EchoRunner)


def in_threads(calls) -> list:
    """What each call returns or raises, all of them begun at the same time."""
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait(SECONDS)
        return said(call)

    threads = [in_thread(partial(run, call)) for call in calls]
    return [thread.result(SECONDS) for thread in threads]


@pytest.mark.parametrize("ranks", [1, 2])
def test_closing_ends_a_call_in_another_thread_with_a_clear_error(make, ranks):
    llm = make(ranks)
    begun = threading.Event()
    step = llm.engine.step

    def signalling_step():
        begun.set()
        return step()

    llm.engine.step = signalling_step

    def generate():
        return llm.generate(PROMPTS, greedy(150), use_tqdm=False)

    def close():
        assert begun.wait(SECONDS)
        llm.close()

    with no_process_left():
        assert in_threads([generate, close]) == [CLOSED, None]
    assert llm.engine is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_number_of_threads_may_close(make, ranks, monkeypatch):
    llm = make(ranks)
    close = llm.engine.close
    monkeypatch.setattr(llm.engine, "close", lambda: (time.sleep(0.05), close()))
    assert in_threads([llm.close] * 4) == [None] * 4
    llm.close()
    assert said(lambda: llm.generate([[1]])) == CLOSED


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_handler_may_close_in_the_middle_of_a_step(make, ranks):
    llm = make(ranks)
    with no_process_left(), alarms(lambda *_: llm.close(), 0.05):
        answer = []
        while isinstance(answer, list):
            answer = said(lambda: llm.generate(PROMPTS, greedy(50), use_tqdm=False))
    assert answer == CLOSED


def test_a_stream_of_a_closed_llm_says_so(make):
    llm = make()
    stream = llm.stream(PROMPTS[:1], greedy(50))
    next(stream)
    llm.close()
    assert said(lambda: next(stream)) == CLOSED


class Interrupts:
    """Calls a function; the first few times raises KeyboardInterrupt, before or after the call."""

    def __init__(self, function, count: int, after: bool = False) -> None:
        self.function, self.left, self.after = function, count, after

    def __call__(self, *args, **options):
        if self.left > 0:
            self.left -= 1
            if self.after:
                self.function(*args, **options)
            raise KeyboardInterrupt
        return self.function(*args, **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_interrupts_of_a_step_and_of_its_clean_up_leave_the_llm_usable(make, checkpoint, ranks):
    """Before a function is called, and after."""
    llm = make(ranks)
    engine, runner = llm.engine, llm.engine.runner
    places = [], [(engine, "reset")], [(runner, "synchronize")], [(engine, "_make_scheduler")]
    for interrupted, after in product(places, (False, True)):
        other = llm.stream(PROMPTS[:1], greedy(20))
        next(other)
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in [(runner, "launch"), *interrupted]:
                patch.setattr(owner, name, Interrupts(getattr(owner, name), 1, after))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, greedy(8), use_tqdm=False)
        assert_greedy(llm, checkpoint)
        assert [item[3] for item in other] == ["abort"]


def run_interrupted(call, count: int, delay: float, interval: float) -> None:
    """Call again and again until `count` interrupts came in calls, the first after `delay` s."""

    def interrupt(_, frame):
        nonlocal count
        while frame is not None and frame.f_code is not call.__code__:
            frame = frame.f_back
        if frame is None or count == 0:
            return  # between two calls
        count -= 1
        raise KeyboardInterrupt

    with alarms(interrupt, delay, interval):
        while count:
            with suppress(KeyboardInterrupt):
                call()


def test_interrupts_in_quick_succession_leave_an_llm_of_several_ranks_usable(make, checkpoint):
    llm, chance = make(2), random.Random(0)
    for i in range(30):
        run_interrupted(
            lambda: llm.generate(PROMPTS, greedy(24), use_tqdm=False),
            count=1 + i % 3,
            delay=chance.uniform(1e-3, 0.05),
            interval=chance.uniform(1e-4, 2e-3),
        )
        assert_greedy(llm, checkpoint, PROMPTS[:4], 4)


@pytest.fixture
def interrupt_waits(monkeypatch):
    """A function: so many of the next waits for a process end in KeyboardInterrupt."""

    def interrupt_waits(count: int) -> Interrupts:
        wait = Interrupts(subprocess.Popen.wait, count)
        monkeypatch.setattr(
            subprocess.Popen, "wait", lambda *args, **options: wait(*args, **options)
        )
        return wait

    return interrupt_waits


def make_stopped_ranks(make) -> LLM:
    """Ranks that leave only if they are killed."""
    llm = make(2)
    for rank in llm.engine.runner._ranks:
        rank.process.send_signal(signal.SIGSTOP)
    return llm


@pytest.mark.parametrize("count", [1, 4])
def test_interrupts_while_ranks_are_ended_leave_none(make, echo_ranks, interrupt_waits, count):
    with no_process_left():
        llm = make_stopped_ranks(make)
        wait = interrupt_waits(count)
        with pytest.raises(KeyboardInterrupt):
            llm.close()
        assert wait.left == 0
    llm.close()
    assert llm.engine is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_while_ranks_of_a_forgotten_llm_are_ended_leave_none(
    checkpoint, echo_ranks, interrupt_waits
):
    with no_process_left():
        llm = make_stopped_ranks(
            lambda n: LLM(checkpoint.folder, tensor_parallel_size=n, **OPTIONS)
        )
        interrupt_waits(3)
        del llm
        gc.collect()


def test_ranks_whose_end_was_interrupted_before_it_began_are_ended_later(
    checkpoint, echo_ranks, monkeypatch
):
    with no_process_left():
        llm = make_stopped_ranks(
            lambda n: LLM(checkpoint.folder, tensor_parallel_size=n, **OPTIONS)
        )
        with monkeypatch.context() as patch:
            for name in ("end_ranks", "kill_ranks"):
                interrupt = Interrupts(None, 1)
                patch.setattr(f"nanovllm.backends.tensor_parallel.runner.{name}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.close()
        del llm
        gc.collect()


@pytest.mark.parametrize(
    "where, waits",
    [*product(["open_socket_pair", "inherited", "_hear"], [0, 2]), ("_send", 2), ("_listen", 2)],
)
def test_interrupts_while_ranks_are_started_leave_none(
    make, echo_ranks, monkeypatch, interrupt_waits, where, waits
):
    """With waits = 0 no further wait is interrupted, and the ranks that were started end late."""
    owner = rank_process if hasattr(rank_process, where) else TensorParallelRunner
    original = getattr(owner, where)
    calls_to_go = {"open_socket_pair": 1, "inherited": 2}.get(where, 0)  # what one rank takes

    def interrupted(*args):
        nonlocal calls_to_go
        calls_to_go -= 1
        if calls_to_go < 0:
            raise KeyboardInterrupt
        return original(*args)

    interrupt_waits(waits)
    monkeypatch.setattr(owner, where, interrupted)
    with no_process_left():
        with pytest.raises(KeyboardInterrupt):
            make(2)


def test_real_interrupts_while_ranks_are_started_and_ended_leave_none(checkpoint, echo_ranks):
    def start_and_end():
        LLM(checkpoint.folder, tensor_parallel_size=2, **OPTIONS).close()

    for delay in (0.004, 0.006, 0.009, 0.05, 0.3, 0.9, 1.4, 1.8):
        # An interrupt in subprocess.Popen can lose the process's number. The rank ends all the
        # same, but nobody can wait for it.
        with no_process_left(zombies=False):
            run_interrupted(start_and_end, count=3, delay=delay, interval=0.002)
            gc.collect()


def test_a_rank_that_hangs_while_starting_is_reported(checkpoint, monkeypatch):
    set_fault(monkeypatch, 1, "start", "hang")
    with no_process_left():
        with pytest.raises(RankError, match="gave no sign for 6 s; .* raise start_timeout"):
            LLM(checkpoint.folder, tensor_parallel_size=2, start_timeout=6, **OPTIONS)


def run_script(code: str, *, flags: str = "", redirections: str = "") -> str:
    """What the code prints, run by a shell."""
    line = f"exec {sys.executable} {flags} -c {shlex.quote(code)} {redirections}"
    run = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_program_whose_standard_files_are_closed_may_have_ranks(checkpoint, tmp_path, closed):
    out = tmp_path / "tokens"
    code = f"""
from nanovllm import LLM, SamplingParams
import os
with LLM({str(checkpoint.folder)!r}, tensor_parallel_size=2, **{OPTIONS!r}) as llm:
    params = SamplingParams(temperature=0, max_tokens=4)
    tokens = llm.generate([[5, 6]], params, use_tqdm=False)[0]["token_ids"]
with open({str(out)!r}, "w") as file:
    file.write(str(tokens))
"""
    run_script(code, redirections=closed)
    assert out.read_text() == str(checkpoint.expected([5, 6], 4))


def test_ranks_are_started_with_the_interpreters_flags(checkpoint):
    code = f"""
import sys
sys.path[:0] = {[str(TESTS), str(TESTS.parent)]!r}
from types import SimpleNamespace
from rank_faults import FlagsRunner
from nanovllm.config import Config
from nanovllm.backends.tensor_parallel.runner import TensorParallelRunner
from nanovllm.models import load_model_config
config = Config({str(checkpoint.folder)!r}, tensor_parallel_size=2, device="cpu")
runner = TensorParallelRunner(
    config, load_model_config(config.model), config.model, FlagsRunner
)
print(runner.info.attention == str(sys.flags), sys.flags.isolated, sys.flags.utf8_mode)
runner.close()
"""
    assert run_script(code, flags="-I -X utf8") == "True 1 1\n"
