"""Layers: each rank holds its part of every tensor, and the ranks' results add up to the whole
model's.
"""

import threading
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from model_helpers import Driver, load, make_checkpoint, read_config
from process_helpers import SECONDS, in_thread
from transformers import (
    Gemma4TextConfig,
    Glm4Config,
    Ministral3Config,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nanovllm.layers.embedding import ParallelLMHead
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.layers.sampler import CELL
from nanovllm.models import build_model, load_model_config
from nanovllm.weights.fused_experts import split_experts
from nanovllm.weights.loader import (
    init_dummy_weights,
    load_weights,
    model_weight_slices,
    open_checkpoint,
)

SMALL = dict(
    vocab_size=101,  # which neither 2 nor 4 divide
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,  # which 4 ranks hold twice
    head_dim=16,
    attention_bias=True,
    max_position_embeddings=64,
)
CONFIG = Qwen3Config(architectures=["Qwen3ForCausalLM"], **SMALL)
MOE_CONFIG = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"],
    **SMALL,
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    mlp_only_layers=[0],
)
SMALLER = {
    name: value for name, value in SMALL.items() if name not in ("head_dim", "attention_bias")
}
CONFIGS = {
    "dense": CONFIG,
    "experts": MOE_CONFIG,
    "stacked": Phi3Config(architectures=["Phi3ForCausalLM"], **SMALLER, pad_token_id=0),
    "norm-of-all-heads": Olmo2Config(
        architectures=["Olmo2ForCausalLM"], **SMALLER, pad_token_id=0, attention_bias=True
    ),
    # A layer that shares K and V, heads by kind of layer, experts, embeddings for each layer.
    "gemma4": Gemma4TextConfig(
        architectures=["Gemma4ForCausalLM"],
        **SMALL | dict(num_hidden_layers=4),
        global_head_dim=8,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        layer_types=["full_attention", "sliding_attention"] * 2,
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=101,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
        sliding_window=5,
        pad_token_id=0,
    ),
    "late-queries": Ministral3Config(
        architectures=["Ministral3ForCausalLM"],
        **SMALLER,
        head_dim=8,
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=4.0,
            original_max_position_embeddings=4,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "norms-after": Glm4Config(architectures=["Glm4ForCausalLM"], **SMALL, pad_token_id=0),
}


@dataclass(frozen=True)
class ThreadGroup(ParallelGroup):
    """Ranks that are threads of this process and meet at a barrier, each with a slot for what it
    brings.
    """

    meeting: tuple[threading.Barrier, list] | None = None

    def all_reduce(self, x):
        barrier, slots = self.meeting
        slots[self.rank] = x.clone()
        barrier.wait()
        x.copy_(sum(slots))
        barrier.wait()  # none may write its slot again before all have read
        return x


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_checkpoint(folder, CONFIGS[request.param])
    return folder


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_parts_make_the_whole_tensors(size, saved):
    checkpoint = open_checkpoint(saved)
    if not getattr(load(saved, 0, 1), "stacks_experts", False):
        split_experts(checkpoint)
    everything = slice(None)
    whole = {
        name: tensor[(everything,) * len(tensor.get_shape())]
        for name, (_, tensor) in checkpoint.items()
    }
    parts = {name: torch.full(tensor.shape, torch.nan) for name, tensor in whole.items()}
    for rank in range(size):
        for source in model_weight_slices(load(saved, rank, size)):
            part = parts[source.name][source.index]
            # What two ranks both hold (norms, shared key-value heads) they hold alike.
            assert part.isnan().all() or torch.equal(part, source.destination), source.name
            part.copy_(source.destination)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_do_not_depend_on_the_number_of_ranks(size, config):
    def dummy(rank, size):
        model = build_model(read_config(config), ParallelGroup(rank, size))
        init_dummy_weights(model, seed=3)
        return list(model_weight_slices(model))

    whole = {source.name: torch.empty(source.shape) for source in dummy(0, 1)}
    for source in dummy(0, 1):
        whole[source.name][source.index] = source.destination
    for rank in range(size):
        for source in dummy(rank, size):
            assert torch.equal(source.destination, whole[source.name][source.index]), source.name


@pytest.mark.parametrize("size", [2, 4])
def test_logits_do_not_depend_on_the_number_of_ranks(size, saved):
    tokens = torch.randint(101, (12,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(model):
        driver = Driver(model, num_sequences=2, max_tokens=16)
        prompts = driver.step({}, {0: tokens[:9], 1: tokens[:5]})
        return torch.cat((prompts, driver.step({0: tokens[9], 1: tokens[5]}, {})))

    state = threading.Barrier(size, timeout=SECONDS), [None] * size
    results = [None] * size

    def run(rank):
        model = build_model(load_model_config(saved), ThreadGroup(rank, size, meeting=state))
        load_weights(model, saved)
        results[rank] = logits(model)

    threads = [in_thread(partial(run, rank)) for rank in range(size)]
    for thread in threads:
        thread.result(SECONDS)
    torch.testing.assert_close(torch.cat(results, dim=1), logits(load(saved)), rtol=0, atol=1e-4)


def test_shares_of_an_uneven_vocabulary_are_real_and_meet():
    heads = [ParallelLMHead(101, 8, ParallelGroup(rank, 4)) for rank in range(4)]
    assert [head.weight.shape[0] for head in heads] == [16, 32, 16, 37]
    assert [(head.vocab_start, head.vocab_end) for head in heads] == [
        (0, 16),
        (16, 48),
        (48, 64),
        (64, 101),
    ]


def test_shares_of_a_vocabulary_meet_between_the_cells_that_are_drawn_from():
    for size in (2, 3, 4, 8):
        for vocab in (151936, 128256, 1027, 16 * size):
            starts = ParallelGroup(0, size).vocab_starts(vocab)
            assert all(start % CELL == 0 for start in starts[:-1])
            assert (
                starts[0] == 0 and starts[-1] == vocab and all(map(int.__lt__, starts, starts[1:]))
            )
    # None is left without.
    assert ParallelGroup(0, 8).vocab_starts(9) == [0, 1, 2, 3, 4, 5, 6, 7, 9]


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda group: MergedColumnParallelLinear(8, 10, group, names=("gate", "up")),
            "gate is 10, .*=4",
        ),
        (lambda group: RowParallelLinear(10, 8, group), "in_features is 10, .*=4"),
        (lambda group: QKVParallelLinear(8, 6, 2, 4, group), "num_attention_heads is 6, .*=4"),
        (lambda group: QKVParallelLinear(8, 12, 6, 4, group), "num_key_value_heads is 6, .*=4"),
        (lambda group: QKVParallelLinear(8, 12, 3, 4, group), "num_key_value_heads is 3, .*=4"),
    ],
)
def test_what_ranks_cannot_share_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(ParallelGroup(0, 4))


def test_ranks_without_a_kv_head_of_their_own_take_their_queries():
    for rank in range(8):
        layer = QKVParallelLinear(8, 16, 2, 4, ParallelGroup(rank, 8))
        _, k, v = layer.shards
        assert (k.start, k.count) == (v.start, v.count) == (rank // 4 * 4, 4)


def test_rotation_table_is_float32_whatever_the_default_dtype():
    settings = read_config(CONFIG).rope_settings()
    torch.set_default_dtype(torch.bfloat16)
    try:
        table = RotaryEmbedding.from_settings(settings, 16).cos_sin
    finally:
        torch.set_default_dtype(torch.float32)
    assert table.dtype == torch.float32 and table.shape == (64, 16)
    torch.testing.assert_close(
        table, RotaryEmbedding.from_settings(settings, 16).cos_sin, rtol=0, atol=0
    )
