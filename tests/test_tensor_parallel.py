"""A model on several ranks draws the tokens it draws on one, and no failure leaves a process
behind.
"""

import gc
import ipaddress
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from model_helpers import make_checkpoint
from process_helpers import SECONDS, alarms, in_thread, started
from rank_faults import EchoRunner, LyingRunner, StarvedRunner, set_fault
from transformers import (
    GptOssConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
)

import nanovllm
from nanovllm import LLM, RankError, SamplingParams
from nanovllm.backends.tensor_parallel.answers import (
    Done,
    Failed,
    MalformedAnswer,
    Ready,
    encode_integers,
    join_fields,
    pack_answer,
    unpack_answer,
)
from nanovllm.backends.tensor_parallel.channel import Channel, ChannelClosed
from nanovllm.backends.tensor_parallel.rank_process import open_store_file
from nanovllm.backends.tensor_parallel.runner import TensorParallelRunner
from nanovllm.config import Config
from nanovllm.engine.batch import Batch, PrefillChunk, RunnerInfo, StepResult
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.sampler import best_over_ranks
from nanovllm.models import load_model_config

# In the environment of every process started here, and so of their children.
MARK = f"{uuid.uuid4()}"
VOCAB = 1027  # a prime: no number of ranks divides it
OPTIONS = dict(
    device="cpu",
    kvcache_block_size=16,
    num_kvcache_blocks=100,
    max_model_len=192,
    max_num_batched_tokens=48,
    max_num_seqs=8,
    seed=1,
)
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=256,
)


@pytest.fixture(scope="module", autouse=True)
def mark():
    os.environ["TENSOR_PARALLEL_TEST"] = MARK
    yield
    del os.environ["TENSOR_PARALLEL_TEST"]
    gc.collect()
    assert leftovers() == []


def leftovers() -> list[str]:
    """Processes started by these tests that still run, and children nobody waited for."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if int(process.name) == os.getpid():
            continue
        if MARK.encode() in environment or (state == "Z" and int(parent) == os.getpid()):
            found.append(f"{process.name} {state}")
    return found


def wait_for_no_leftovers(before: list[str], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while set(leftovers()) - set(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(leftovers()) - set(before) == set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, Qwen3Config(**SMALL))
    return path


@pytest.fixture(scope="module")
def llms(folder):
    """The model on 1, 2 and 4 ranks, all alive at once."""
    llms = {}
    try:
        for size in (1, 2, 4):
            llms[size] = LLM(folder, tensor_parallel_size=size, **OPTIONS)
        yield llms
    finally:
        for llm in llms.values():
            llm.close()


def make_prompts(count: int, longest: int = 100, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(VOCAB) for _ in range(chance.randint(1, longest))] for _ in range(count)
    ]


def run(llm: LLM, prompts: list[list[int]], max_tokens: int = 12, **sampling) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("size", [2, 4])
def test_greedy_output_is_that_of_one_rank(llms, size):
    prompts = make_prompts(10)  # some longer than a step's budget: chunked
    assert run(llms[size], prompts, temperature=0) == run(llms[1], prompts, temperature=0)


@pytest.mark.parametrize("size", [2, 4])
def test_a_seed_draws_the_same_tokens_on_any_number_of_ranks(llms, size):
    prompts = make_prompts(10, seed=1)
    drawn = run(llms[size], prompts, temperature=0.9, seed=5)
    assert drawn == run(llms[1], prompts, temperature=0.9, seed=5)
    assert drawn != run(llms[1], prompts, temperature=0)


@pytest.mark.parametrize("size", [2, 4])
def test_rows_that_need_all_logits_draw_the_same_on_any_number_of_ranks(llms, size):
    params = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True, **wish)
        for wish in (
            dict(top_k=30),
            dict(top_p=0.8),
            dict(repetition_penalty=1.3),
            dict(logprobs=2),
            dict(),
        )
    ]
    prompts = make_prompts(len(params), seed=8)
    outputs, expected = [llms[n].generate(prompts, params, use_tqdm=False) for n in (size, 1)]
    assert [output["token_ids"] for output in outputs] == [
        output["token_ids"] for output in expected
    ]
    assert outputs[3]["logprobs"] == [
        pytest.approx(of_token, abs=1e-4) for of_token in expected[3]["logprobs"]
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_prompts_and_continuations_have_the_scores_of_one_rank(llms, size):
    prompts = make_prompts(8, seed=11)
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, temperature=0)
    outputs, expected = [llms[n].generate(prompts, params, use_tqdm=False) for n in (size, 1)]
    for output, other in zip(outputs, expected):
        assert output["token_ids"] == other["token_ids"]
        for values, others in zip(output["prompt_logprobs"], other["prompt_logprobs"], strict=True):
            assert values is others or values == pytest.approx(others, abs=1e-4)
    contexts, continuations = prompts[:4] * 2, prompts[4:] * 2
    scores, expected = [llms[n].score(contexts, continuations, False) for n in (size, 1)]
    for score, other in zip(scores, expected, strict=True):
        assert score["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
        assert score["is_greedy"] == other["is_greedy"]


@pytest.mark.parametrize(
    "config",
    [
        Phi3Config(**SMALL | dict(hidden_size=128), pad_token_id=0),
        Olmo2Config(**SMALL | dict(head_dim=8), pad_token_id=0),
        GptOssConfig(
            **SMALL | dict(intermediate_size=30),
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=20,
            swiglu_limit=0.5,
        ),
    ],
    ids=["phi3", "olmo2", "gpt-oss"],
)
def test_ranks_need_no_transformers_to_run_a_family(tmp_path, config):
    make_checkpoint(tmp_path, config)
    prompts = make_prompts(4, seed=9)
    with LLM(tmp_path, **OPTIONS) as one, LLM(tmp_path, **OPTIONS, tensor_parallel_size=2) as two:
        assert run(two, prompts, temperature=0) == run(one, prompts, temperature=0)


@pytest.mark.parametrize("size", [2, 4])
def test_a_runner_of_several_ranks_says_what_one_rank_says(llms, size):
    one, many = llms[1].engine.runner, llms[size].engine.runner
    assert many.info == one.info
    assert (
        one.info.dtype == "float32"
        and one.info.num_parameters > VOCAB
        and one.info.kv_cache_bytes > 0
    )


@pytest.mark.parametrize("size", [2, 4])
def test_overlap_does_not_change_output_on_several_ranks(llms, size, monkeypatch):
    prompts = make_prompts(10, seed=2)
    expected = run(llms[1], prompts, temperature=0)
    monkeypatch.setattr(llms[size].engine, "overlap", True)
    assert run(llms[size], prompts, temperature=0) == expected


@pytest.mark.parametrize("size", [2, 4])
def test_cached_prefixes_do_not_change_output_on_several_ranks(llms, size):
    start = make_prompts(1, seed=3)[0] * 9
    prompts = [start[:64] + [i] * (i + 1) for i in range(6)]
    expected = run(llms[1], prompts, temperature=0)
    assert run(llms[size], prompts, temperature=0) == expected
    assert run(llms[size], prompts, temperature=0) == expected  # all of them cached


def test_each_rank_copies_its_part_of_a_block(folder, llms):
    first, second = make_prompts(2, seed=3)
    prompts = [first[:40], first[:25] + second, first[:40] + [5]]
    options = OPTIONS | dict(kvcache_block_size=64, num_kvcache_blocks=16)
    with LLM(folder, **options, tensor_parallel_size=2) as two:
        for prompt, expected in zip(prompts, run(llms[1], prompts, temperature=0)):
            assert run(two, [prompt], temperature=0) == [expected]
        assert two.engine.num_prefill_tokens == len(prompts[0]) + len(second) + 1


def test_preemption_and_replicated_heads_do_not_change_output(folder, tmp_path):
    # Fewer key-value heads than ranks, and a tied head.
    make_checkpoint(
        tmp_path, Qwen3Config(**{**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True})
    )
    prompts = make_prompts(8, longest=60, seed=4)
    with LLM(tmp_path, **OPTIONS) as one:
        expected = run(one, prompts, max_tokens=40, temperature=0)
        assert one.engine.scheduler.num_preemptions == 0
    with LLM(tmp_path, **{**OPTIONS, "num_kvcache_blocks": 20}, tensor_parallel_size=4) as four:
        assert run(four, prompts, max_tokens=40, temperature=0) == expected
        assert four.engine.scheduler.num_preemptions > 0


def test_llms_in_one_process_do_not_meet(llms):
    prompts = make_prompts(4, seed=5)
    expected = run(llms[1], prompts, temperature=0)
    for _ in range(2):
        for size in (2, 4):
            assert run(llms[size], prompts, temperature=0) == expected


def test_an_interrupted_call_leaves_the_llm_usable(llms):
    prompts = make_prompts(6, seed=6)
    expected = run(llms[1], prompts, temperature=0)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), alarms(interrupt, 0.15):
        while True:
            run(llms[2], prompts, max_tokens=80, temperature=0)
    assert run(llms[2], prompts, temperature=0) == expected


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_port_listens_beyond_the_loopback_interface(folder, monkeypatch, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    # What a cluster's environment says of its network does not concern ranks on one host.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    before = leftovers()
    with LLM(folder, **OPTIONS | dict(device=device), tensor_parallel_size=2) as llm:
        run(llm, [[1, 2, 3]])
        ranks = {int(line.split()[0]) for line in set(leftovers()) - set(before)}
        assert len(ranks) >= 2
        ports = open_ports({*ranks, os.getpid()})
    assert ports and {address for _, address in ports} <= {"127.0.0.1", "::1"}


def open_ports(pids: set[int]) -> list[tuple[str, str]]:
    """Protocol and address of each socket on which these processes wait for whoever comes."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    found = []
    for protocol, awaiting in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == awaiting and rest[5] in inodes:
                words = bytes.fromhex(local.partition(":")[0])
                words = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append((protocol, str(ipaddress.ip_address(words))))
    return found


def test_nothing_is_pickled_between_ranks():
    """Who pretends to be a rank could have the others run any code.

    Objects go from the engine to a rank alone, as commands.
    """
    unpickling = set()
    for path in Path(nanovllm.__file__).parent.rglob("*.py"):
        text = path.read_text()
        objects = r"(gather|scatter|broadcast|send|recv)_object(_list)?\(|\bpickle\.|import pickle"
        assert path.name == "commands.py" or not re.search(objects, text), path
        if "unpack_command(" in text:
            unpickling.add(path.name)
    assert unpickling == {"commands.py", "worker.py"}


ANSWERS = [
    Ready(
        RunnerInfo(100, "cuda:0", "bfloat16", "none", 64, num_parameters=2**40, kv_cache_bytes=0)
    ),
    Done(7),
    Done(2**40, error="new weights: no such name 'ü\udcff'"),
    Failed("", "Traceback ...\n", False),
    Failed("dtype is 'x'", "", True),
    Done(3, StepResult([])),
    Done(3, StepResult([5, -1, 2**31])),
    Done(3, StepResult([5, 6, 7], {2: b"8 bytes.", 0: b"two times eight.", 1: b""})),
    Done(3, StepResult([5], {0: b"8 bytes."}, (b"", b"of a prompt, 24 bytes...", b"8 bytes."))),
    Done(3, np.arange(6, dtype=np.float32).reshape(2, 3)),
    Done(3, np.zeros((0, 5), np.float32)),
]


def test_an_answer_arrives_as_it_was_sent():
    for answer in ANSWERS:
        arrived = unpack_answer(pack_answer(answer))
        if isinstance(getattr(answer, "result", None), np.ndarray):
            assert arrived.step == answer.step and arrived.result.flags.writeable
            np.testing.assert_array_equal(arrived.result, answer.result, strict=True)
        else:
            assert arrived == answer and repr(arrived) == repr(answer)


def test_any_bytes_are_an_answer_of_right_types_or_refused():
    rng = random.Random(0)
    refused = 0
    for answer in ANSWERS:
        data = pack_answer(answer)
        others = [data[:i] for i in range(len(data))] + [data + b"x"]
        for _ in range(400):
            changed = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                changed[rng.randrange(len(data))] = rng.choice((0, 1, 2, 255, rng.randrange(256)))
            others.append(bytes(changed))
        for other in others:
            try:
                read = unpack_answer(other)
            except MalformedAnswer:
                refused += 1
                continue
            assert type(read) in (Ready, Done, Failed)
            assert unpack_answer(pack_answer(read)) is not None
    assert refused > 2000


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [b""],
        [b"unknown"],
        [b"done", bytes(8)],
        [b"done", bytes(7), b""],
        [b"done", bytes(16), b""],
        [b"done", bytes(8), b"\xff"],
        [b"ready", b"[]"],
        [b"ready", b"{}"],
        [b"ready", b"[" * 100_000],
        [b"ready", json.dumps(asdict(ANSWERS[0].info) | {"num_blocks": "100"}).encode()],
        [b"ready", json.dumps(asdict(ANSWERS[0].info) | {"num_blocks": True}).encode()],
        [b"ready", json.dumps(asdict(ANSWERS[0].info) | {"more": 1}).encode()],
        [b"logits", bytes(8), encode_integers([2, 3]), bytes(20)],
        [b"logits", bytes(8), encode_integers([-2, -3]), bytes(24)],
        [b"logits", bytes(8), encode_integers([-1, 3]), bytes(24)],
        [b"logits", bytes(8), encode_integers([6]), bytes(24)],
        [b"logits", bytes(8), encode_integers([1, 6]), bytes(23)],
        [b"sampled", bytes(8), bytes(16), encode_integers([2]), bytes(8)],
        [b"sampled", bytes(8), bytes(16), encode_integers([-1]), bytes(8)],
        [b"sampled", bytes(8), bytes(16), encode_integers([0, 1]), bytes(8)],
        [b"sampled", bytes(8), bytes(16), encode_integers([0]), bytes(7)],
    ],
    ids=lambda fields: str([field[:40] for field in fields]),
)
def test_fields_of_another_number_type_or_shape_are_no_answer(fields):
    with pytest.raises(MalformedAnswer):
        unpack_answer(join_fields(fields))


@pytest.mark.parametrize(
    "lie, message",
    [
        ("a pickle", "rank 1 of 2 sent a malformed answer"),
        ("another result", "rank 0 answered a ndarray, not a StepResult"),
    ],
)
def test_a_rank_that_answers_something_else_ends_all_and_runs_nothing_here(
    folder, monkeypatch, tmp_path, lie, message
):
    before = leftovers()
    monkeypatch.setenv("RANK_LIE", json.dumps([lie, str(tmp_path / "made")]))
    config = Config(str(folder), tensor_parallel_size=2, device="cpu")
    runner = TensorParallelRunner(config, load_model_config(folder), str(folder), LyingRunner)
    with pytest.raises(RankError, match=message):
        runner.launch(Batch(decode_slots=(0, 1))).wait()
        runner.synchronize()
    assert not (tmp_path / "made").exists()
    assert set(leftovers()) <= set(before)


def test_a_message_takes_memory_as_it_comes_and_not_as_it_says():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(Channel.HEADER.pack(2**63) + b"the rest never comes")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelClosed):
            Channel(ours).receive()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the file has a name")
def test_no_name_leads_to_the_file_through_which_ranks_meet():
    with open_store_file() as store:
        assert os.fstat(store.fileno()).st_nlink == 0 and store.fileno() > 2


def test_every_rank_has_the_fewest_blocks_of_any(folder, monkeypatch):
    monkeypatch.setattr("nanovllm.build.build_runner", StarvedRunner)
    with LLM(folder, **OPTIONS, tensor_parallel_size=2) as llm:
        assert llm.engine.runner.info.num_blocks == 20
        assert run(llm, [[1, 2, 3]], temperature=0)


@pytest.mark.parametrize(
    "changes, size, message",
    [
        (dict(), 3, "num_attention_heads is 8"),
        (dict(num_key_value_heads=4, num_attention_heads=12), 6, "num_key_value_heads is 4"),
        (dict(intermediate_size=97), 2, "97"),
    ],
)
def test_what_cannot_be_split_is_refused_before_a_process_starts(
    tmp_path, monkeypatch, changes, size, message
):
    Qwen3Config(**{**SMALL, **changes, "architectures": ["Qwen3ForCausalLM"]}).save_pretrained(
        tmp_path
    )
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, **OPTIONS, tensor_parallel_size=size, load_format="dummy")


def test_what_is_wrong_with_a_checkpoint_is_said_as_on_one_rank(tmp_path):
    Qwen3Config(**SMALL, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    before = leftovers()
    messages = []
    for size in (1, 2):
        with pytest.raises(ValueError) as error:
            LLM(tmp_path, **OPTIONS, tensor_parallel_size=size)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    wait_for_no_leftovers(before, seconds=0)


@pytest.mark.parametrize(
    "rank, where, action, message",
    [
        (1, "start", "kill", r"rank 1 of 2 died: it was killed by SIGKILL"),
        (0, "prefill", "kill", r"rank 0 of 2 died: it was killed by SIGKILL"),
        (1, "decode", "kill", r"rank 1 of 2 died: it was killed by SIGKILL"),
        (
            1,
            "decode",
            "raise EOFError",
            r"rank 1 of 2 raised:(.|\n)*in fail_at(.|\n)*EOFError: the planted end",
        ),
        (1, "prefill", "hang", r"gave no sign for 3 s; .* raise step_timeout"),
    ],
)
def test_a_failing_rank_is_reported_and_takes_all_along(
    folder, monkeypatch, capfd, rank, where, action, message
):
    before = leftovers()
    set_fault(monkeypatch, rank, where, action)
    timeout = 3.0 if action == "hang" else 60.0  # that no other rank may need on a busy machine
    options = {**OPTIONS, "step_timeout": timeout, "tensor_parallel_size": 2}
    if where == "start":
        with pytest.raises(RankError, match=message):
            LLM(folder, **options)
        assert set(leftovers()) <= set(before)
        return
    llm = LLM(folder, **options)
    with pytest.raises(RankError, match=message):
        run(llm, make_prompts(4), temperature=0)
    assert set(leftovers()) <= set(before)
    if action == "hang":
        assert "in fail_at" in capfd.readouterr().err
    with pytest.raises(RankError, match="make a new LLM"):
        run(llm, [[1]])
    llm.close()


@pytest.fixture(scope="module")
def echo(folder):
    """Two ranks that answer at once, started by a thread that is no more."""
    runners = []

    def start():
        config = Config(str(folder), tensor_parallel_size=2, device="cpu")
        model_config = load_model_config(folder)
        runners.append(TensorParallelRunner(config, model_config, str(folder), EchoRunner))

    in_thread(start).result(SECONDS)
    yield runners[0]
    runners[0].close()


def test_a_command_has_no_size_limit(echo):
    chunk = PrefillChunk(0, list(range(1_000_000)), 0, 0, [1], True, 0.0, 0)
    assert echo.launch(Batch(decode_slots=(3, 1), prefills=(chunk,))).wait().tokens == [
        3,
        1,
        1_000_000,
    ]


def test_an_answer_without_size_limit_waits_for_no_command(echo):
    """A rank that is sending takes nothing, so the engine must listen while it sends."""
    rows = tuple(range(300_000))
    steps = []
    for _ in range(3):
        steps.append(echo.launch(Batch(decode_slots=rows)))
        time.sleep(0.2)  # until the rank is sending
    assert all(step.wait().tokens == list(rows) for step in steps)


def test_a_stream_may_be_closed_after_its_llm(folder):
    with LLM(folder, tensor_parallel_size=2, overlap=True, **OPTIONS) as llm:
        stream = llm.stream([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
        next(stream)
        llm.close()
        stream.close()


def test_steps_are_launched_ahead_of_their_results(echo):
    steps = [echo.launch(Batch(decode_slots=(i,))) for i in range(20)]
    assert [step.wait().tokens for step in reversed(steps)] == [[i] for i in reversed(range(20))]


def test_an_interrupt_anywhere_leaves_the_channel_whole(echo):
    class Alarm(BaseException):
        pass

    def interrupt(*_):
        raise Alarm

    chance = random.Random(0)
    chunk = PrefillChunk(0, list(range(30_000)), 0, 0, [1], True, 0.0, 0)
    interrupted = 0
    tracer = sys.gettrace()
    # One that measures coverage may hold its lock when it is interrupted, and never gives it back.
    sys.settrace(None)
    try:
        with alarms(interrupt):
            for i in range(300):
                batch = Batch(decode_slots=(i,), prefills=(chunk,) * (i % 2))
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 2e-3))
                    for _ in range(100):
                        echo.launch(batch).wait()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Alarm:
                    interrupted += 1
                    echo.synchronize()
                assert echo.launch(batch).wait().tokens == [i] + [30_000] * (i % 2)
    finally:
        sys.settrace(tracer)
    assert interrupted > 100


def make_script(folder: Path, forever: bool) -> str:
    """Generates and prints some tokens, then again and again; it has no `if __name__ ==
    "__main__"`.
    """
    return f"""
from nanovllm import LLM, SamplingParams
llm = LLM({str(folder)!r}, tensor_parallel_size=2, **{OPTIONS!r})
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
print("tokens", llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"], flush=True)
while {forever}:
    llm.generate([[5, 6, 7]] * 4, params, use_tqdm=False)
"""


def script(*arguments: str, **options) -> AbstractContextManager[subprocess.Popen]:
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return started([sys.executable, *arguments], **pipes, **options)


def first_tokens(process: subprocess.Popen) -> str:
    line = process.stdout.readline()
    assert line.startswith("tokens"), line + process.stderr.read()
    return line.removeprefix("tokens").strip()


def test_a_script_without_guard_runs_and_ends_with_ctrl_c(llms, folder, tmp_path):
    before = leftovers()
    path = tmp_path / "script.py"
    path.write_text(make_script(folder, forever=True))
    with script(str(path)) as process:
        assert first_tokens(process) == str(run(llms[1], [[5, 6, 7]], temperature=0)[0])
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all it finds
        _, errors = process.communicate(timeout=SECONDS)
        assert errors.count("KeyboardInterrupt") == 1  # no rank's traceback beside it
        wait_for_no_leftovers(before)


def test_ranks_end_with_a_parent_that_is_killed(folder):
    before = leftovers()
    with script("-", stdin=subprocess.PIPE) as process:
        process.stdin.write(make_script(folder, forever=True))
        process.stdin.close()
        first_tokens(process)
        assert len(set(leftovers()) - set(before)) >= 3
        process.kill()
        process.wait(SECONDS)
        wait_for_no_leftovers(before)


def test_ranks_end_with_a_script_that_closes_nothing(folder):
    before = leftovers()
    with script("-c", make_script(folder, forever=False)) as process:
        assert first_tokens(process)
        assert process.wait(SECONDS) == 0
        assert set(leftovers()) <= set(before)


def test_an_llm_that_is_forgotten_ends_its_ranks(folder, monkeypatch):
    before = leftovers()
    monkeypatch.setattr("nanovllm.build.build_runner", EchoRunner)
    llm = LLM(folder, **OPTIONS, tensor_parallel_size=2)
    assert len(set(leftovers()) - set(before)) == 2
    del llm
    gc.collect()
    assert set(leftovers()) <= set(before)


class FixedGroup(ParallelGroup):
    """One rank among others whose keys are given."""

    def maximum(self, x):
        others.append(x.clone())
        return torch.stack(others).amax(0)


others: list[torch.Tensor] = []


def test_the_largest_value_of_any_rank_wins_and_the_lowest_token_a_tie():
    values = torch.tensor(
        [[-1.5, 3.0, 0.0, -0.0, float("-inf"), 1e-45], [-1.25, 3.0, -0.0, 0.0, -3e38, 0.0]]
    )
    tokens = torch.tensor([[7, 9, 1, 2, 3, 4], [1000, 8, 2, 1, 5, 6]])
    others.clear()
    best_over_ranks(tokens[0], values[0], FixedGroup(0, 2))
    assert best_over_ranks(tokens[1], values[1], FixedGroup(1, 2)).tolist() == [1000, 8, 1, 1, 5, 4]
