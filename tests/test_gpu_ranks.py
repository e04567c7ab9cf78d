"""Two GPUs at the full depth of large models: the same bits in every run, and the tokens of one.

What lies in memory, and which rank comes first, differs from run to run. Few rows are padded to
more, so both would show here. Weights are random. With batch_invariant, a small model must give the
same bits in any batch.
"""

import json
from itertools import cycle, islice

import pytest
import torch
from engine_helpers import SHAPE
from model_helpers import make_checkpoint
from test_gpu_invariant import MIXTURE, WIDE, check_bits_of
from transformers import Qwen3MoeConfig

from nanovllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RUNS = 200
COMMON = dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    vocab_size=151936,
    head_dim=128,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
    attention_bias=False,
)
SHAPES = {
    "experts": dict(  # Qwen3-30B-A3B
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_hidden_layers=48,
        hidden_size=2048,
        intermediate_size=6144,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "dense": dict(  # Qwen3-8B
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "small": dict(  # Qwen3-0.6B, whose kernels are the shortest
        num_hidden_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
}
OPTIONS = dict(load_format="dummy", max_model_len=2048, num_kvcache_blocks=200)
# One row; a few, which are padded to 4 and to 24; and some that a padded prefill has no room for.
CALLS = [
    [[1, 2, 3]],
    [[7] * 30, [5, 6], [1, 2, 3]],
    [[i, i + 1] for i in range(23)],
    [list(range(5, 400)), [7] * 30, *([i, i + 1] for i in range(20))],
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


@pytest.fixture(params=SHAPES)
def folder(request, tmp_path):
    return write_config(tmp_path, **SHAPES[request.param])


def write_config(folder, **shape):
    (folder / "config.json").write_text(json.dumps(COMMON | shape))
    return folder


def run(llm, prompts):
    """Each output's tokens, and their log-probabilities to the bit."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(output["token_ids"], str(output["logprobs"])) for output in outputs]


@pytest.mark.parametrize("symmetric_memory", [True, False])
def test_every_run_on_two_gpus_gives_the_same_bits(folder, symmetric_memory):
    """InvalidLogitsError is raised where one is NaN."""
    options = OPTIONS | dict(enable_prefix_caching=False)  # else later runs begin elsewhere
    options |= dict(tensor_parallel_size=2, symmetric_memory=symmetric_memory)
    with LLM(folder, **options) as llm:
        first: dict[int, list] = {}
        for i in islice(cycle(range(len(CALLS))), RUNS):
            result = run(llm, CALLS[i])
            assert result == first.setdefault(i, result), f"prompts {i}"


@pytest.mark.parametrize("name", SHAPES)
def test_two_gpus_give_the_tokens_of_one_in_float32(tmp_path, name):
    shape = SHAPES[name]
    if name == "experts":  # all 128 would leave no room on one
        shape = shape | dict(num_experts=64)
    folder = write_config(tmp_path, **shape)
    options = OPTIONS | dict(dtype="float32")
    with LLM(folder, **options) as llm:
        expected = [[tokens for tokens, _ in run(llm, prompts)] for prompts in CALLS]
    with LLM(folder, **options, tensor_parallel_size=2) as llm:
        for prompts, tokens in zip(CALLS, expected):
            assert [found for found, _ in run(llm, prompts)] == tokens


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs Hopper GPUs",
)
def test_two_ranks_give_the_same_bits_whatever_runs_beside_a_request(tmp_path):
    """Once by sums in symmetric memory, once by those of NCCL.

    Ranks that hang print their stacks and end at the time limits.
    """
    experts = MIXTURE | dict(mlp_only_layers=[0])  # of two layers: the first has an MLP
    make_checkpoint(tmp_path, Qwen3MoeConfig(**SHAPE | WIDE | experts))
    limits = dict(start_timeout=90, step_timeout=30)
    others = [{}, dict(symmetric_memory=False, max_num_batched_tokens=70)]
    check_bits_of(str(tmp_path), others, tensor_parallel_size=2, **limits)
