"""Models with a state on a GPU: kernels, graphs, and whatever the engine does with states."""

import pytest
import torch
from engine_helpers import DELTA, FAMILIES, PROMPTS, Checkpoint, assert_empty, assert_greedy, greedy
from engine_helpers import save_checkpoint as save
from transformers import Qwen3_5TextConfig, Qwen3NextConfig

from nanovllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Heads that the kernels know. All layers of qwen3-next are dense.
HEADS = DELTA | dict(linear_key_head_dim=32, linear_value_head_dim=16)
CONFIGS = {
    "qwen3.5": Qwen3_5TextConfig(**HEADS),
    "qwen3-next": Qwen3NextConfig(
        **HEADS | dict(linear_num_key_heads=1, linear_num_value_heads=4),
        mlp_only_layers=[*range(4)],
    ),
    "lfm2": FAMILIES["lfm2"],
}


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save(folder, CONFIGS[request.param])
    return Checkpoint(folder)


@pytest.fixture
def make_llm(checkpoint):
    made = []

    def make(**options):
        options = dict(dtype="float32", max_model_len=256, num_kvcache_blocks=40) | options
        made.append(LLM(checkpoint.folder, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_graphs_give_the_tokens_of_transformers_with_snapshots_and_without(
    checkpoint, make_llm, overlap
):
    llm = make_llm(overlap=overlap)
    assert_greedy(llm, checkpoint)
    # The next turn of each conversation begins with the state where the answer ended.
    assert_greedy(llm, checkpoint, [[*p, *checkpoint.expected(p, 24), 5] for p in PROMPTS])
    assert {key[0] for key in llm.engine.runner.graphs._graphs} == {"decode", "forward"}
    assert llm.metrics()["state_snapshots"]["used"] > 0


def test_chunks_and_preemption_change_no_token(checkpoint, make_llm):
    sizes = dict(max_num_batched_tokens=33, kvcache_block_size=16, num_kvcache_blocks=24)
    llm = make_llm(**sizes, max_num_seqs=8, state_snapshot_share=0.5)
    for _ in range(2):
        assert_greedy(llm, checkpoint)
    assert llm.engine.scheduler.num_preemptions > 0


def test_steps_without_graphs_give_the_same_tokens(checkpoint, make_llm):
    llm = make_llm(enforce_eager=True)
    assert llm.engine.runner.graphs is None
    assert_greedy(llm, checkpoint)


def test_completions_of_a_prompt_have_states_of_their_own(checkpoint, make_llm):
    llm = make_llm(max_num_seqs=6)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, n=3)
    (output,) = llm.generate([PROMPTS[7]], params, use_tqdm=False)
    for completion in output["completions"]:
        assert completion["token_ids"] == checkpoint.expected(PROMPTS[7], 9)


def test_prompts_that_come_while_others_decode_leave_their_states_alone(checkpoint, make_llm):
    """A graph is captured between two steps: its dry run must change no state."""
    llm = make_llm()
    ids = [llm.add_request(prompt, greedy(24)) for prompt in PROMPTS[:4]]
    done = {output["id"]: output for _ in range(6) for output in llm.step()}
    ids += [llm.add_request(prompt, greedy(24)) for prompt in PROMPTS[4:]]
    while llm.has_unfinished():
        done |= {output["id"]: output for output in llm.step()}
    for prompt, request in zip(PROMPTS, ids):
        assert done[request]["token_ids"] == checkpoint.expected(prompt, 24)
    assert_empty(llm)


def test_heads_that_no_kernel_knows_run_by_plain_layers(tmp_path):
    save(tmp_path, FAMILIES["qwen3.5"])
    options = dict(dtype="float32", max_model_len=256, num_kvcache_blocks=40)
    with LLM(tmp_path, **options) as llm:
        assert llm.engine.runner.graphs is None
        assert_greedy(llm, Checkpoint(tmp_path))
