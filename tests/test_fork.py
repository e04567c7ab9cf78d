"""An LLM serves the process that made it: a fork neither uses it, disturbs it nor waits for it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import PROMPTS, Checkpoint, assert_greedy, greedy
from process_helpers import SECONDS, descendants, in_fork, in_thread, said, started
from rank_faults import EchoRunner
from torch.utils.data import DataLoader

from nanovllm import LLM
from nanovllm.engine.batch import Batch
from nanovllm.engine.kv_cache import allocate_kv_cache, parts_of_layers

OPTIONS = dict(device="cpu", max_model_len=256, kvcache_block_size=16, num_kvcache_blocks=96)


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def with_llm(request, fresh, get_checkpoint):
    """A function: call(function, *args) has the fresh process call function(llm, *args)."""
    fresh(make_llm, get_checkpoint("gqa-2").folder, request.param)
    yield lambda function, *args: fresh(call_with_llm, function, *args)
    fresh(close_llm)


llms: list[LLM] = []  # in the fresh process


def make_llm(folder: Path, num_ranks: int):
    llms.append(LLM(folder, tensor_parallel_size=num_ranks, **OPTIONS))


def call_with_llm(function, *args):
    return function(llms[-1], *args)


def close_llm():
    llms.pop().close()


def test_a_forked_process_writes_no_kv_of_its_parent(fresh):
    fresh(write_kv_in_fork)


def write_kv_in_fork():
    layers = [SimpleNamespace(num_kv_heads=1, head_dim=8)]
    cache = allocate_kv_cache(layers, 4, 16, torch.float32, torch.device("cpu"))
    (part,) = parts_of_layers(cache, layers, 4, 16)
    part[0, 0] = 1
    assert in_fork(lambda: cache.fill_(2).sum().item()) == 2 * cache.numel()
    assert cache.sum() == part[0, 0].numel()


def test_each_call_in_a_forked_process_says_whose_llm_it_is(with_llm, checkpoint):
    with_llm(call_all_in_fork, checkpoint.folder)


def call_all_in_fork(llm: LLM, folder: Path):
    checkpoint = Checkpoint(folder)
    open_stream = llm.stream(PROMPTS[:2], greedy(4))
    first = [next(open_stream), next(open_stream)]  # one step
    request = llm.add_request(PROMPTS[0], greedy(4))
    calls = {
        "generate": lambda: llm.generate(PROMPTS[:2], greedy(4), use_tqdm=False),
        "stream": lambda: next(llm.stream(PROMPTS[:2], greedy(4))),
        "an open stream": lambda: next(open_stream),
        "add_request": lambda: llm.add_request(PROMPTS[0], greedy(4)),
        "step": llm.step,
        "abort": lambda: llm.abort(request),
        "metrics": llm.metrics,
        "close": llm.close,
        "generate after close": lambda: llm.generate(PROMPTS[:2], greedy(4), use_tqdm=False),
    }
    answers = in_fork(lambda: {name: said(call) for name, call in calls.items()})
    assert answers.pop("close") is None
    belongs = f"ValueError: this LLM belongs to process {os.getpid()}, which forked this one, "
    assert [name for name, answer in answers.items() if not str(answer).startswith(belongs)] == []
    # The parent notices nothing: its stream, its request, and new calls.
    tokens = {0: [], 1: []}
    for i, _, new, _ in [*first, *open_stream]:
        tokens[i] += new
    assert list(tokens.values()) == [checkpoint.expected(prompt, 4) for prompt in PROMPTS[:2]]
    while llm.has_unfinished():
        for output in llm.step():
            assert output["token_ids"] == checkpoint.expected(PROMPTS[0], 4)
    assert_greedy(llm, checkpoint)


def test_a_fork_while_another_thread_generates_raises_and_waits_for_no_lock(with_llm, checkpoint):
    outputs = with_llm(fork_while_generating)
    expected = [checkpoint.expected(prompt, 8) for prompt in PROMPTS]
    assert outputs and all(output == expected for output in outputs)


def fork_while_generating(llm: LLM) -> list:
    """The tokens of the other thread's calls."""
    stop = threading.Event()
    outputs = []

    def generate():
        while not stop.is_set():
            call = llm.generate(PROMPTS, greedy(8), use_tqdm=False)
            outputs.append([output["token_ids"] for output in call])

    stream = llm.stream(PROMPTS[:1], greedy(200))
    next(stream)
    thread = in_thread(generate)
    try:
        for _ in range(3):
            while llm._session.lock.acquire(blocking=False):  # until the other thread has it
                llm._session.lock.release()
                assert not thread.done()
            answers = in_fork(
                lambda: [said(lambda: llm.generate([[1]])), said(stream.close), said(llm.close)]
            )
            assert "this LLM belongs to process" in answers[0]
            assert answers[1:] == [None, None]
    finally:
        stop.set()
    thread.result(SECONDS)
    stream.close()
    return outputs


class Lengths(torch.utils.data.Dataset):
    """A data set whose workers compute a little."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((100, 100), float(i)).mean()


def square(x):
    return x * x


def test_the_parent_of_forked_workers_goes_on_generating(with_llm, checkpoint):
    with_llm(generate_beside_workers, checkpoint.folder)


def generate_beside_workers(llm: LLM, folder: Path):
    checkpoint = Checkpoint(folder)
    assert_greedy(llm, checkpoint)
    loader = DataLoader(Lengths(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for i, batch in enumerate(loader):
        assert batch.tolist() == [2 * i, 2 * i + 1]
        assert_greedy(llm, checkpoint, PROMPTS[i : i + 3], 8)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.imap(square, range(100))
        assert_greedy(llm, checkpoint, max_tokens=8)
        assert list(squares) == [i * i for i in range(100)]


def test_a_worker_forked_by_multiprocessing_hears_what_to_do(with_llm):
    with pytest.raises(
        ValueError, match="make an LLM in a process that multiprocessing's 'spawn' starts"
    ):
        with_llm(generate_in_a_worker)


def generate_in_a_worker(llm: LLM):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply_async(generate_inherited).get(SECONDS)


def generate_inherited():
    return llms[-1].generate([[1, 2]], greedy(2), use_tqdm=False)


def test_an_llm_made_in_a_forked_process_generates(checkpoint):
    """Of a parent that has computed with two threads: where PyTorch would wait for them forever."""
    code = f"""
import os, signal, torch
from nanovllm import LLM, SamplingParams
torch.set_num_threads(2)
def generate():
    with LLM({str(checkpoint.folder)!r}, **{OPTIONS!r}) as llm:
        torch.randn(600, 600) @ torch.randn(600, 600)
        params = SamplingParams(temperature=0, max_tokens=4)
        return llm.generate([[5, 6]], params, use_tqdm=False)[0]["token_ids"]
tokens = generate()
if (child := os.fork()) == 0:
    signal.alarm(60)
    os._exit(0 if generate() == tokens else 3)
print(tokens, os.waitpid(child, 0)[1])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == f"{checkpoint.expected([5, 6], 4)} 0\n", run.stderr


def make_echoing_llm(folder: Path) -> LLM:
    """Its two ranks have no model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanovllm.build.build_runner", EchoRunner)
        return LLM(folder, tensor_parallel_size=2, **OPTIONS)


def test_a_fork_does_not_end_its_parents_ranks(fresh, checkpoint):
    fresh(close_runner_in_fork, checkpoint.folder)


def close_runner_in_fork(folder: Path):
    with make_echoing_llm(folder) as llm:
        assert in_fork(llm.engine.runner.close) is None
        assert llm.engine.runner.launch(Batch(decode_slots=(7,))).wait().tokens == [7]


def test_ranks_leave_when_told_to_although_a_forked_process_lives(fresh, checkpoint):
    fresh(close_beside_a_fork, checkpoint.folder)


def close_beside_a_fork(folder: Path):
    llm = make_echoing_llm(folder)
    ranks = [rank.process for rank in llm.engine.runner._ranks]
    if (child := os.fork()) == 0:
        signal.alarm(SECONDS)  # should nobody kill it
        signal.pause()
    try:
        llm.close()
        assert [rank.returncode for rank in ranks] == [0, 0]  # none was waited for and killed
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_ranks_end_with_a_killed_engine_although_a_forked_process_lives(checkpoint):
    """Here not the main thread starts them, so that the kernel does not end them with it."""
    code = f"""
import os, signal, threading, time
from nanovllm import LLM
def make():
    global llm
    llm = LLM({str(checkpoint.folder)!r}, tensor_parallel_size=2, **{OPTIONS!r})
thread = threading.Thread(target=make)
thread.start()
thread.join()
ranks = [rank.process.pid for rank in llm.engine.runner._ranks]
if (child := os.fork()) == 0:
    signal.pause()
print(child, *ranks, flush=True)
signal.pause()
"""
    with started([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        child, *ranks = map(int, process.stdout.readline().split())
        assert len(ranks) == 2 and descendants(process.pid) == {child, *ranks}
        process.kill()
        process.wait(SECONDS)
        deadline = time.monotonic() + SECONDS
        while any(map(is_running, ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, ranks)) and is_running(child)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
