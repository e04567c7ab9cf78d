"""Each family computes what transformers computes, in float32, on random small models."""

import pytest
import torch
from model_helpers import Driver, expected_logits, load, make_checkpoint
from transformers import Qwen3Config

SMALL = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)

CONFIGS = {
    f"qwen3-{name}": Qwen3Config(**{**SMALL, "num_key_value_heads": 2, "head_dim": 16, **options})
    for name, options in {
        "gqa-1": dict(num_key_value_heads=4),
        "gqa-2": dict(),
        "gqa-4": dict(num_key_value_heads=1),
        "head-dim-of-hidden": dict(head_dim=8),
        "tied": dict(tie_word_embeddings=True),
        "attention-bias": dict(attention_bias=True),
    }.items()
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name, tmp_path):
    reference = make_checkpoint(tmp_path, CONFIGS[name])
    driver = Driver(load(tmp_path), num_sequences=3, max_tokens=32)
    tokens = torch.randint(101, (3, 32), generator=torch.Generator().manual_seed(1)).tolist()
    want = [expected_logits(reference, sequence) for sequence in tokens]
    seen: list[list[torch.Tensor]] = [[], [], []]

    def step(decodes, chunks):
        lens = {i: (driver.lens[i], driver.lens[i] + n) for i, n in [(i, 1) for i in decodes] + list(chunks.items())}
        logits = driver.step(
            {i: tokens[i][driver.lens[i]] for i in decodes}, {i: tokens[i][slice(*lens[i])] for i in chunks}
        )
        for (i, _), part in zip(lens.items(), logits.split([end - begin for begin, end in lens.values()])):
            seen[i].append(part)

    step([], {0: 9, 1: 4})  # whole prompts
    for _ in range(5):
        step([1, 0], {})  # decodes
    step([0], {2: 7})  # a decode next to a new prompt
    step([0, 1], {2: 6})  # decodes next to a chunk of a prompt that has begun
    step([2, 0, 1], {})
    for i in range(3):
        got = torch.cat(seen[i])
        torch.testing.assert_close(got, want[i][: len(got)], rtol=0, atol=1e-4)
