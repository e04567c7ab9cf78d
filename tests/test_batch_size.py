"""How many sequences run at once on a CPU: as many as make it about as fast as it gets."""

import pytest
import torch
from test_scheduler import make_scheduler

from nanovllm.backends.cpu import batch_size
from nanovllm.backends.cpu.batch_size import FEWEST, enough_sequences
from nanovllm.models import read_model_config

SIZES = dict(
    vocab_size=9,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
)
DENSE = read_model_config(SIZES | dict(architectures=["LlamaForCausalLM"]))


@pytest.fixture
def threads(monkeypatch):
    """A function that sets how many threads compute."""

    def set_threads(number: int) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: number)
        monkeypatch.setattr(batch_size, "usable_cores", lambda: number)

    return set_threads


def test_a_large_model_needs_few_sequences_and_a_small_one_many(threads):
    threads(2)
    counts = [enough_sequences(size, DENSE) for size in (4 * 10**6, 10**7, 135 * 10**6, 8 * 10**9)]
    assert counts == [500, 200, FEWEST, FEWEST]


def test_more_threads_need_more_sequences(threads):
    threads(64)
    assert enough_sequences(135 * 10**6, DENSE) == 474


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_a_mixture_of_experts_needs_as_many_as_keep_each_expert_busy(threads, name):
    threads(2)
    values = dict(architectures=["GptOssForCausalLM"], num_experts_per_tok=8)
    config = read_model_config(SIZES | values | {name: 128, "num_key_value_heads": 1})
    assert enough_sequences(30 * 10**9, config) == 16 * FEWEST


def test_max_num_seqs_is_the_most():
    assert make_scheduler(max_num_seqs=8, enough_seqs=500).enough_seqs == 8
    assert make_scheduler(max_num_seqs=8).enough_seqs == 8


def test_the_scheduler_of_an_llm_on_a_cpu_knows_how_many_are_enough(make_llm, monkeypatch):
    monkeypatch.setattr("nanovllm.build.enough_sequences", lambda *_: 2)
    llm = make_llm()
    assert llm.engine.scheduler.enough_seqs == 2
    llm.engine.reset()  # as after an error
    assert llm.engine.scheduler.enough_seqs == 2
