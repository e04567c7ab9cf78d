"""Models with recurrent layers on the whole engine: states are kept, copied, evicted and split."""

import random

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
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.kv_cache import divide_memory
from nanovllm.engine.recurrent_state import RecurrentState
from nanovllm.engine.snapshots import StateRows
from nanovllm.layers.recurrent import RecurrentLayer

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


@pytest.mark.parametrize("model", ["qwen3-next", "lfm2"])
def test_two_ranks_give_the_tokens_of_one(get_checkpoint, make_llm, model):
    """Each rank has its heads' or channels' states. In qwen3-next, both hold the only key head."""
    checkpoint = get_checkpoint(model)
    options = dict(tensor_parallel_size=2, max_num_batched_tokens=40, num_kvcache_blocks=20)
    llm = make_llm(checkpoint.folder, overlap=True, state_snapshot_share=0.5, **options)
    for _ in range(2):
        assert_greedy(llm, checkpoint, max_tokens=12)
    assert counts(llm)["used"] > 0 and llm.engine.scheduler.num_preemptions > 0


class Remembering(RecurrentLayer):
    pass


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_rows_are_copied_as_if_one_after_the_other(copies):
    state = RecurrentState([Remembering((3,), torch.float32)], torch.device("cpu"))
    state.allocate(StateRows(2, 2))
    (layer,) = state.layers
    layer.state[:] = torch.arange(6.0).unsqueeze(1)
    want = list(range(6))
    for source, copy in copies:
        want[copy] = want[source]
    state.copy(copies, torch.from_numpy)
    assert layer.state[:, 0].tolist() == want


def test_fewer_sequences_run_where_their_states_do_not_fit():
    # Qwen3.5-9B: a row of 50 MB, blocks of 256 tokens of 32 KB.
    sizes = dict(block=2**23, least=16 * 2**23, row=50 * 2**20, max_num_seqs=512)
    for gib in (1, 2, 8, 24, 100):
        for share in (0.0, 0.25, 0.9):
            room = gib * 2**30
            num_blocks, rows = divide_memory(room, **sizes, snapshot_share=share)
            taken = num_blocks * sizes["block"] + rows.total * sizes["row"]
            assert room - 2**23 < taken <= room
            assert num_blocks >= 16 and 1 <= rows.num_slots <= 512
            if gib >= 8 and share < 0.9:
                assert rows.num_snapshots == int(share * room) // sizes["row"]
    assert rows.num_slots == 512 or share == 0.9
    assert divide_memory(
        2**30, block=2**20, least=0, row=0, max_num_seqs=7, snapshot_share=0.5
    ) == (
        1024,
        StateRows(7, 0),
    )
