"""Each family computes what transformers computes, in float32, on random small models."""

from types import SimpleNamespace

import pytest
import torch
from model_helpers import Driver, expected_logits, load, make_checkpoint
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm import kernels
from nanovllm.layers.rope_scaling import rope_frequencies
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models import build_model
from nanovllm.layers.parallel import ParallelGroup

SMALL = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)

GQA = dict(num_key_value_heads=2)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
MOE = dict(num_key_value_heads=2, head_dim=16, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3)

FAMILIES = {
    Qwen3Config: {
        "gqa-1": dict(num_key_value_heads=4, head_dim=16),
        "gqa-2": dict(num_key_value_heads=2, head_dim=16),
        "gqa-4": dict(num_key_value_heads=1, head_dim=16),
        "head-dim-of-hidden": dict(num_key_value_heads=2, head_dim=8),
        "tied": dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
        "attention-bias": dict(num_key_value_heads=2, head_dim=16, attention_bias=True),
        "yarn": dict(num_key_value_heads=2, head_dim=16, rope_scaling=YARN, rope_theta=1e6),
    },
    Qwen3MoeConfig: {
        "raw-weights": dict(**MOE, norm_topk_prob=False),
        "renormalized": dict(**MOE, norm_topk_prob=True, tie_word_embeddings=True),
        "every-second-layer": dict(**MOE, num_hidden_layers=4, decoder_sparse_step=2),
        "dense-first-layer": dict(**MOE, mlp_only_layers=[0], attention_bias=True),
    },
    Qwen2Config: {
        "untied": dict(**GQA),
        "tied": dict(**GQA, tie_word_embeddings=True),
        "window-off": dict(**GQA, sliding_window=8, use_sliding_window=False),
        "linear": dict(**GQA, rope_scaling=dict(type="linear", factor=2.0)),
    },
    LlamaConfig: {
        "mha": dict(),
        "tied": dict(**GQA, tie_word_embeddings=True),
        "biases": dict(**GQA, attention_bias=True, mlp_bias=True),
        "llama3": dict(**GQA, rope_scaling=LLAMA3, rope_theta=500000.0),
        "head-dim": dict(**GQA, head_dim=16),
    },
    MistralConfig: {
        "no-window": dict(**GQA, sliding_window=None),
        "window-of-all": dict(**GQA, sliding_window=64),
        "head-dim": dict(**GQA, sliding_window=None, head_dim=16),
    },
}
CONFIGS = {
    f"{family.model_type}-{name}": family(**{**SMALL, **options})
    for family, cases in FAMILIES.items()
    for name, options in cases.items()
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


def test_the_outline_runs_the_first_and_the_last_layer(tmp_path):
    reference = make_checkpoint(tmp_path, Qwen3Config(**{**SMALL, **GQA, "num_hidden_layers": 4}))
    model = load(tmp_path)
    outline = model.outline()
    reference.model.layers = reference.model.layers[::3]
    tokens = list(range(7))
    logits = Driver(outline, num_sequences=1, max_tokens=8).step({}, {0: tokens})
    torch.testing.assert_close(logits, expected_logits(reference, tokens), atol=1e-4, rtol=0)
    assert len(model.model.layers) == 4 and outline.lm_head is model.lm_head


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="linear", factor=4.0),
        LLAMA3,
        dict(LLAMA3, factor=32.0, original_max_position_embeddings=8192),
        YARN,
        dict(YARN, original_max_position_embeddings=32768, beta_fast=16, beta_slow=2),
        dict(YARN, factor=40.0, mscale=0.8, mscale_all_dim=0.5, original_max_position_embeddings=4096),
        dict(YARN, attention_factor=0.7, truncate=False, original_max_position_embeddings=4096),
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling_equals_transformers(rope):
    length = int(rope["factor"] * rope.get("original_max_position_embeddings", 1024))
    sizes = dict(head_dim=128, max_position_embeddings=length)
    config = LlamaConfig(**{**SMALL, **sizes, "rope_scaling": dict(rope), "rope_theta": 500000.0})
    want, want_scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    frequencies, scale = rope_frequencies(config, 128)
    torch.testing.assert_close(frequencies, want, rtol=1e-6, atol=0)
    assert scale == pytest.approx(want_scale)
    cos_sin = RotaryEmbedding.from_config(config, 128).cos_sin
    assert cos_sin.shape == (length, 128)
    angles = torch.arange(64.0)[:, None] * want
    torch.testing.assert_close(cos_sin[:64], torch.cat((angles.cos(), angles.sin()), 1) * want_scale, rtol=0, atol=1e-4)


def test_old_and_new_forms_of_rope_settings_are_one():
    class Old:  # as transformers 4 has it
        rope_theta, rope_scaling, max_position_embeddings = 1e6, dict(type="linear", factor=2.0), 64

    class New:  # as transformers 5 has it
        rope_parameters = dict(rope_type="linear", factor=2.0, rope_theta=1e6)
        max_position_embeddings = 64

    torch.testing.assert_close(rope_frequencies(Old, 16), rope_frequencies(New, 16), rtol=0, atol=0)


def test_experts_result_does_not_depend_on_the_batch():
    x, logits, gate_up, down = torch.randn(16, 8), torch.randn(16, 4), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    whole = kernels.moe(x, logits, gate_up, down, 2, True)
    for i in range(16):
        alone = kernels.moe(x[i : i + 1], logits[i : i + 1], gate_up, down, 2, True)
        torch.testing.assert_close(alone[0], whole[i])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(architectures=["GPT2LMHeadModel"]), "architectures is .*GPT2LMHeadModel.* runs Qwen3ForCausalLM, "),
        (dict(architectures=None), "architectures is "),
        (dict(sliding_window=32), "sliding_window is 32"),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config is set"),
        (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "rope_type is 'dynamic', not implemented"),
        (dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)), "partial_rotary"),
    ],
)
def test_what_no_model_does_is_refused(options, message):
    options = {"architectures": ["MistralForCausalLM"], "sliding_window": None, **options}
    with pytest.raises(ValueError, match=message):
        build_model(MistralConfig(**SMALL, **GQA, **options), ParallelGroup())


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(num_key_value_heads=3), "num_attention_heads is 4, num_key_value_heads is 3"),
        (dict(num_key_value_heads=0), "num_key_value_heads is 0: it must be an integer, 1 or more"),
        (dict(vocab_size=-1), "vocab_size is -1"),
        (dict(num_hidden_layers="2"), "num_hidden_layers is '2'"),
        (dict(max_position_embeddings=0), "max_position_embeddings is 0"),
        (dict(head_dim=7), "head_dim is 7"),
        (dict(rms_norm_eps=None), "rms_norm_eps is None"),
        (dict(architectures="Qwen3ForCausalLM"), "architectures is 'Qwen3ForCausalLM'"),
        (dict(rope_parameters=dict(rope_theta="1e4")), "rope_theta of its rope settings is '1e4'"),
        (dict(rope_parameters=dict(rope_theta=0)), "rope_theta of its rope settings is 0"),
    ],
    ids=str,
)
def test_what_describes_no_model_is_refused(values, message):
    config = Qwen3Config(**SMALL, **GQA, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ValueError, match=message):
        build_model(SimpleNamespace(**{**vars(config), **values}), ParallelGroup())
