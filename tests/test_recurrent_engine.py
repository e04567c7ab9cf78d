"""Models with recurrent layers on the whole engine: states are kept, copied, evicted and split."""

import os
import random
from types import SimpleNamespace

import pytest
import torch
from effort import spread
from engine_helpers import (
    FAMILIES,
    PROMPTS,
    Checkpoint,
    assert_empty,
    assert_greedy,
    greedy,
    save_checkpoint,
)
from test_pause import run_with_pauses

from nanovllm import SamplingParams
from nanovllm.apps.bench.shapes import model_folder
from nanovllm.config import Config
from nanovllm.engine import model_runner
from nanovllm.engine.dtype import tensors_default_to
from nanovllm.engine.kv_cache import divide_memory
from nanovllm.engine.recurrent_state import RecurrentState
from nanovllm.engine.snapshots import StateRows
from nanovllm.features.trace.events import Kept
from nanovllm.features.trace.files import read_jsonl
from nanovllm.features.trace.summary import Summary
from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.recurrent import RecurrentLayer
from nanovllm.models import build_model, load_model_config

overlapped = pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])


def counts(llm):
    return llm.metrics()["state_snapshots"]


@overlapped
def test_conversations_go_on_from_the_states_where_their_answers_end(
    get_checkpoint, make_llm, overlap
):
    """Whatever else runs beside them, and wherever in a block an answer ends."""
    checkpoint = get_checkpoint("qwen3.5")
    llm = make_llm(checkpoint.folder, overlap=overlap, max_num_batched_tokens=50)
    rng = random.Random(0)
    prompts = [list(prompt) for prompt in PROMPTS[4:8]]
    for turn in range(4):
        lengths = [rng.randint(15, 24) for _ in prompts]
        outputs = llm.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
        for prompt, length, output in zip(prompts, lengths, outputs):
            assert output["token_ids"] == checkpoint.expected(prompt, length)
            if turn:
                # All but the last answer's last token, which no step has computed, and the news.
                assert output["num_cached_tokens"] == len(prompt) - 1 - 2
        prompts = [
            [*prompt, *output["token_ids"], rng.randrange(199), rng.randrange(199)]
            for prompt, output in zip(prompts, outputs)
        ]
        assert_empty(llm)
    assert counts(llm)["used"] >= 12


@spread({"share": [0.0, 0.12, 0.5], "overlap": [True, False]})
def test_few_or_many_snapshots_change_no_token(get_checkpoint, make_llm, share, overlap):
    checkpoint = get_checkpoint("qwen3-next")
    options = dict(num_kvcache_blocks=20, state_snapshot_share=share, overlap=overlap)
    llm = make_llm(checkpoint.folder, max_num_batched_tokens=33, max_num_seqs=4, **options)
    rng = random.Random(1)
    for _ in range(3):
        prompts = [rng.choice(PROMPTS) + rng.choice(PROMPTS)[:9] for _ in range(10)]
        assert_greedy(llm, checkpoint, prompts, max_tokens=20)
        assert_empty(llm)
    found = counts(llm)
    assert found["kept"] <= found["room"] == llm.engine.runner.info.num_snapshots
    assert bool(found["room"]) == bool(share)
    assert (found["evicted"] > 0) == (share == 0.12)
    assert (found["used"] > 0) == bool(share)


@overlapped
def test_a_stop_that_is_seen_a_step_late_spoils_no_snapshot(get_checkpoint, make_llm, overlap):
    """With overlap, a step has run beyond the stop. What is kept is the state after that step."""
    checkpoint = get_checkpoint("qwen3.5")
    llm = make_llm(checkpoint.folder, overlap=overlap)
    prompts, params, answers = PROMPTS[4:8], [], []
    for place, prompt in enumerate(prompts, start=3):
        answer = checkpoint.expected(prompt, 24)
        answers.append(answer[: answer.index(answer[place]) + 1])
        stop = dict(temperature=0.0, max_tokens=24, stop_token_ids=[answer[place]])
        params.append(SamplingParams(**stop, ignore_eos=True))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == answers
    longer = [[*prompt, *answer, 7] for prompt, answer in zip(prompts, answers)]
    outputs = llm.generate(longer, greedy(9), use_tqdm=False)
    for prompt, output in zip(longer, outputs):
        assert output["token_ids"] == checkpoint.expected(prompt, 9)
        assert output["num_cached_tokens"] == len(prompt) - (1 if overlap else 2)
    assert_empty(llm)


def test_a_preempted_sequence_goes_on_from_its_last_snapshot(get_checkpoint, make_llm):
    """Other sequences take a block of its last snapshot, so it goes on from an earlier snapshot."""
    checkpoint = get_checkpoint("qwen3.5-moe")
    common, computed = PROMPTS[7][:48], {}
    prompts = [[*common, first, *PROMPTS[6][:9]] for first in range(4)]
    for share in (0.0, 0.5):
        options = dict(num_kvcache_blocks=10, state_snapshot_share=share, overlap=True)
        llm = make_llm(checkpoint.folder, max_num_seqs=4, **options)
        assert_greedy(llm, checkpoint, prompts, max_tokens=24)
        preempted = llm.engine.scheduler.num_preemptions
        assert preempted > 0
        assert counts(llm)["used"] == (3 + preempted if share else 0)
        computed[share] = llm.engine.num_prefill_tokens
    assert computed[0.5] < 48 + 4 * 10 + preempted * 35 < computed[0.0]


@overlapped
def test_pauses_change_no_token(get_checkpoint, make_llm, overlap):
    checkpoint = get_checkpoint("qwen3-next")
    sizes = dict(num_kvcache_blocks=8, max_num_seqs=3, max_num_batched_tokens=24, max_model_len=128)
    llm = make_llm(checkpoint.folder, **sizes, state_snapshot_share=0.4, overlap=overlap)
    outputs = run_with_pauses(llm, [(prompt, greedy(24)) for prompt in PROMPTS], seed=0)
    assert [output["token_ids"] for output in outputs] == [
        checkpoint.expected(prompt, 24) for prompt in PROMPTS
    ]
    assert llm.engine.scheduler.num_preemptions > 0
    assert_empty(llm)


def test_completions_of_a_prompt_start_from_the_state_before_its_last_token(
    get_checkpoint, make_llm
):
    checkpoint = get_checkpoint("qwen3.5-moe")
    llm = make_llm(checkpoint.folder, state_snapshot_share=0.5)
    prompt = PROMPTS[7]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, n=4)
    before = llm.engine.num_prefill_tokens
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    for completion in output["completions"]:
        assert completion["token_ids"] == checkpoint.expected(prompt, 9)
    assert llm.engine.num_prefill_tokens - before == len(prompt) + 3


def test_a_trace_and_the_metrics_show_the_states_that_are_kept(get_checkpoint, make_llm, tmp_path):
    path = tmp_path / "run.jsonl"
    llm = make_llm(get_checkpoint("qwen3.5").folder, trace=path)
    (output,) = llm.generate([PROMPTS[7]], greedy(9), use_tqdm=False)
    llm.generate([[*PROMPTS[7], *output["token_ids"], 5]], greedy(3), use_tqdm=False)
    found = counts(llm)
    assert found["saved"] == found["kept"] >= 1 and found["used"] == 1
    llm.close()
    events = read_jsonl(path)
    kept = [event.tokens for event in events if isinstance(event, Kept)]
    assert len(kept) == found["saved"] and len(PROMPTS[7]) + 8 in kept
    assert f", {len(kept)} states kept" in "".join(Summary(events).lines())


def test_new_weights_and_sleep_leave_no_old_state(get_checkpoint, make_llm, tmp_path):
    checkpoint = get_checkpoint("qwen3.5-moe")
    save_checkpoint(tmp_path, FAMILIES["qwen3.5-moe"], seed=5)
    other = Checkpoint(tmp_path)
    llm = make_llm(checkpoint.folder)
    assert_greedy(llm, checkpoint)
    llm.sleep(1)
    assert all(not layer.state.numel() for layer in llm.engine.runner.recurrent.layers)
    llm.wake_up()
    assert_greedy(llm, checkpoint)
    llm.update_weights(other._model.state_dict().items())
    assert counts(llm)["kept"] == 0
    assert_greedy(llm, other)


def test_states_in_bfloat16_take_half_the_bytes_and_change_little(get_checkpoint, make_llm):
    checkpoint, states = get_checkpoint("qwen3-next"), {}
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    for dtype in ("auto", "bfloat16"):
        # In chunks, after each of which a state is rounded.
        options = dict(max_num_batched_tokens=9, max_num_seqs=9, mamba_ssm_cache_dtype=dtype)
        llm = make_llm(checkpoint.folder, **options)
        layers = [layer.state for layer in llm.engine.runner.recurrent.layers]
        states[dtype] = {state.dtype: state[0].nbytes for state in layers if state.dim() == 4}
        convolutions = {state.dtype for state in layers if state.dim() == 3}
        assert convolutions == {torch.float32}, "they have the dtype of the model"
        errors = []
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False)):
            expected = checkpoint.logprobs(prompt)
            found = [next(iter(values.items())) for values in output["prompt_logprobs"][1:]]
            errors += [abs(float(expected[i, t]) - value) for i, (t, value) in enumerate(found)]
        mean = sum(errors) / len(errors)
        assert mean < 1e-4 if dtype == "auto" else 1e-4 < mean < 0.02
    assert states == {
        "auto": {torch.float32: 4 * 8 * 6 * 4},
        "bfloat16": {torch.bfloat16: 4 * 8 * 6 * 2},
    }


@pytest.mark.parametrize("model", ["qwen3-next", "lfm2"])
def test_two_ranks_give_the_tokens_of_one(get_checkpoint, make_llm, model):
    """Each rank has its heads' or channels' states. In qwen3-next, both hold the only key head."""
    checkpoint = get_checkpoint(model)
    options = dict(tensor_parallel_size=2, max_num_batched_tokens=40, num_kvcache_blocks=20)
    llm = make_llm(checkpoint.folder, overlap=True, state_snapshot_share=0.5, **options)
    for _ in range(2):
        assert_greedy(llm, checkpoint, max_tokens=12)
    assert counts(llm)["used"] > 0 and llm.engine.scheduler.num_preemptions > 0


def test_rows_of_layers_of_all_kinds_are_copied_one_after_the_other():
    kinds = [((3,), torch.float32), ((2, 2), torch.bfloat16), ((3,), torch.float32)]
    state = RecurrentState([RecurrentLayer(*kind) for kind in kinds], torch.device("cpu"))
    state.allocate(StateRows(2, 2))
    assert state.nbytes == 6 * state.row_bytes == 6 * (2 * 3 * 4 + 4 * 2)
    for number, layer in enumerate(state.layers):
        assert layer.state.shape == (6, *layer.state_shape) and layer.state.is_contiguous()
        layer.state[:] = 10 * number + torch.arange(6.0).view(6, *[1] * len(layer.state_shape))
    state.copy([(1, 4), (4, 0), (2, 1), (5, 5), (0, 2)])
    for number, layer in enumerate(state.layers):
        rows = layer.state.flatten(1) - 10 * number
        assert rows.tolist() == [[row] * rows.shape[1] for row in (1, 2, 1, 3, 1, 5)]


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_rows_of_state_take_memory_of_a_cpu_only_when_they_are_used():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    state = RecurrentState([RecurrentLayer((2**18,), torch.float32)], torch.device("cpu"))
    before = resident()
    state.allocate(StateRows(200, 300))
    assert state.nbytes > 500 * 2**20 and resident() - before < 50 * 2**20
    state.copy([(state.rows.zeros, 0)])
    assert not state.layers[0].state[0].any()
    too_many = StateRows(2**30, 2**30)
    with pytest.raises(ValueError, match="rows of the state .* set max_num_seqs or state_snapshot"):
        state.allocate(too_many)


def test_an_llm_without_room_for_all_states_runs_fewer_sequences(
    get_checkpoint, make_llm, monkeypatch
):
    checkpoint = get_checkpoint("qwen3.5")
    monkeypatch.setattr(model_runner, "bytes_in_ram", lambda ranks: 200_000)
    llm = make_llm(checkpoint.folder, num_kvcache_blocks=None)
    info = llm.engine.runner.info
    assert 1 < info.num_state_slots < len(PROMPTS) and info.num_snapshots > 0
    assert 180_000 < info.state_bytes + info.kv_cache_bytes <= 200_000
    assert_greedy(llm, checkpoint)


@pytest.mark.parametrize(
    "total, slots", [(141, range(512, 513)), (80, range(300, 512)), (24, range(2, 40))]
)
def test_states_of_a_9b_are_divided_by_the_memory_of_a_gpu(monkeypatch, total, slots):
    """No option is set, and no error raised: 512 states take 26 GB."""
    pytest.importorskip("triton")
    from nanovllm.backends.cuda import memory_budget
    from nanovllm.backends.cuda.runner import CUDAModelRunner

    gb, weights, graphs = 10**9, 17.9e9, 2**30
    peak = int(weights + 1.5e9)  # with the activations of the largest step
    reserved = 0
    block = 256 * 8 * 2 * 4 * 256 * 2  # of 8 layers' K and V, 4 heads of 256; one during that step
    cuda = SimpleNamespace(
        memory_reserved=lambda device: reserved,
        max_memory_reserved=lambda device: peak + block,
        mem_get_info=lambda device: (int(total * gb - weights), total * gb),
        empty_cache=lambda: None,
        synchronize=lambda device: None,
        reset_peak_memory_stats=lambda device: None,
    )
    monkeypatch.setattr(memory_budget, "torch", SimpleNamespace(cuda=cuda))
    with tensors_default_to(torch.bfloat16, torch.device("meta")):
        folder, _ = model_folder("qwen3.5-9b")
        model = build_model(load_model_config(folder), ParallelGroup(), 4096)
    runner = object.__new__(CUDAModelRunner)
    runner.config, runner.group = Config("m"), ParallelGroup()
    runner.max_num_seqs, runner.block_size, runner.max_blocks = 512, 256, 16
    runner.max_num_batched_tokens = 16384
    runner.kv_dtype = torch.bfloat16
    layers = [one for one in model.modules() if isinstance(one, RecurrentLayer)]
    runner.recurrent = RecurrentState(layers, torch.device("meta"))
    runner.layers_with_kv = [one for one in model.modules() if isinstance(one, SelfAttention)]
    runner._run_largest_step, runner._graph_bytes = lambda: None, lambda: graphs
    runner._budget = memory_budget.MemoryBudget(torch.device("cuda"), 0.9)
    reserved = int(weights)
    num_blocks, rows = runner._count_blocks_and_rows()
    row = runner.recurrent.row_bytes
    assert 512 * row == pytest.approx(26.4e9, rel=0.01)  # 25.8 GB of S alone
    assert rows.num_slots in slots and rows.num_snapshots > 0 and num_blocks >= 16
    room = 0.9 * total * gb - peak - graphs - memory_budget.SLACK
    assert room - block - row < num_blocks * block + rows.total * row <= room


def test_fewer_sequences_run_where_their_states_do_not_fit():
    # Qwen3.5-9B: a row of 50 MB, blocks of 256 tokens of 32 KB.
    sizes = dict(block_bytes=2**23, least_kv=16 * 2**23, row_bytes=50 * 2**20, max_num_seqs=512)
    for gib in (1, 2, 8, 24, 100):
        for share in (0.0, 0.25, 0.9):
            room = gib * 2**30
            num_blocks, rows = divide_memory(room, **sizes, snapshot_share=share)
            taken = num_blocks * sizes["block_bytes"] + rows.total * sizes["row_bytes"]
            assert room - 2**23 < taken <= room
            assert num_blocks >= 16 and 1 <= rows.num_slots <= 512
            if gib >= 8 and share < 0.9:
                assert rows.num_snapshots == int(share * room) // sizes["row_bytes"]
    assert rows.num_slots == 512 or share == 0.9
    assert divide_memory(
        2**30, block_bytes=2**20, least_kv=0, row_bytes=0, max_num_seqs=7, snapshot_share=0.5
    ) == (
        1024,
        StateRows(7, 0),
    )
