"""Each family computes what transformers computes, in float32, on random small models."""

import json
import math
import os
import random

import plain_layers as plain
import pytest
import torch
from model_helpers import Driver, expected_logits, load, make_checkpoint, read_config
from quantised_helpers import rewrite
from safetensors.torch import save_file
from test_threads import grant, make_root
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PixtralVisionConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SiglipVisionConfig,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from nanovllm import LLM, TINY_MODEL, models
from nanovllm.engine import kv_cache
from nanovllm.engine.dtype import tensors_default_to
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.rope_scaling import rope_frequencies
from nanovllm.layers.rotary import QueryScalingRotaryEmbedding, RotaryEmbedding
from nanovllm.models import (
    MODELS,
    build_model,
    load_model_config,
    read_model_config,
    usable_ram,
)
from nanovllm.weights.loader import check_num_layers

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
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
MOE = dict(
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=3,
)
PHI = dict(num_key_value_heads=2, hidden_size=64, pad_token_id=0)  # heads of 16, 12 of which turn
THETA, PARTIAL = dict(rope_theta=1e4), dict(partial_rotary_factor=0.75)
WHOLE = dict(partial_rotary_factor=1.0)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    long_factor=[1.0, 1.5, 2.5, 4.0, 8.0, 9.0],
)
ORIGINAL = dict(original_max_position_embeddings=4)  # as short as the shortest prompt that is run
WINDOW = dict(sliding_window=6, use_sliding_window=True)
MIXED = ["sliding_attention", "full_attention"]
LATE_QUERIES = YARN | dict(rope_theta=1e4, llama_4_scaling_beta=0.7)
LATE_QUERIES |= dict(original_max_position_embeddings=5)
GEMMA = dict(num_key_value_heads=2, head_dim=12, query_pre_attn_scalar=10, pad_token_id=0)
GEMMA4 = dict(
    num_key_value_heads=2,
    head_dim=8,
    global_head_dim=16,
    hidden_size_per_layer_input=6,
    vocab_size_per_layer_input=101,
    sliding_window=6,
    pad_token_id=0,
)
# The first layers are those of both kinds that the last ones share.
SHARING = dict(
    num_hidden_layers=5,
    layer_types=MIXED + ["sliding_attention"] + MIXED,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
)
EXPERTS_BESIDE = dict(
    hidden_size_per_layer_input=0,
    enable_moe_block=True,
    num_experts=5,
    top_k_experts=2,
    moe_intermediate_size=10,
)
CAPS = dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.0)
YARN_OF_ONE = {
    "full_attention": YARN | THETA,
    "sliding_attention": dict(rope_type="default", rope_theta=5e3),
}
LINEAR_OF_ONE = {
    "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
    "sliding_attention": dict(rope_type="default", rope_theta=1e4),
}
YARN_AS_IT_IS = dict(rope_type="yarn", factor=8.0, truncate=False, rope_theta=150000.0)
OSS = dict(
    num_key_value_heads=2,
    head_dim=10,
    hidden_size=36,
    intermediate_size=26,
    sliding_window=6,
    rope_parameters=YARN_AS_IT_IS | dict(original_max_position_embeddings=8),
)
CLAMPS = dict(swiglu_limit=0.4, swiglu_alpha=1.1)
MULTIPLIERS = dict(
    embedding_multiplier=6.0,
    attention_multiplier=0.2,
    residual_multiplier=0.4,
    logits_scaling=1.5,
)
# Sizes of Gated DeltaNet: odd numbers of heads, keys and values of different sizes.
DELTA = dict(
    num_key_value_heads=2,
    head_dim=16,
    num_hidden_layers=4,
    linear_num_key_heads=3,
    linear_num_value_heads=9,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
)
SHARED = MOE | DELTA | dict(shared_expert_intermediate_size=20)
LINEAR = ["linear_attention", "full_attention"]

FAMILIES = {
    Qwen3Config: {
        "gqa-1": dict(num_key_value_heads=4, head_dim=16),
        "gqa-2": dict(num_key_value_heads=2, head_dim=16),
        "gqa-4": dict(num_key_value_heads=1, head_dim=16),
        "head-dim-of-hidden": dict(num_key_value_heads=2, head_dim=8),
        "tied": dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
        "attention-bias": dict(num_key_value_heads=2, head_dim=16, attention_bias=True),
        "yarn": dict(num_key_value_heads=2, head_dim=16, rope_scaling=YARN, rope_theta=1e6),
        "window": dict(**GQA, head_dim=16, **WINDOW, layer_types=["sliding_attention"] * 2),
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
        "window-of-later-layers": dict(**GQA, **WINDOW, max_window_layers=1),
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
        "window": dict(**GQA, sliding_window=7),
        "window-of-one": dict(**GQA, sliding_window=1),
        "head-dim": dict(**GQA, sliding_window=None, head_dim=16),
    },
    Ministral3Config: {
        "late-queries": dict(**GQA, head_dim=16, rope_parameters=LATE_QUERIES),
        "tied-window": dict(
            **GQA,
            head_dim=8,
            sliding_window=7,
            tie_word_embeddings=True,
            rope_parameters=LATE_QUERIES | dict(original_max_position_embeddings=3),
        ),
    },
    Phi3Config: {
        "whole-heads": dict(**GQA, pad_token_id=0),
        "partial": dict(**PHI, rope_parameters=dict(rope_type="default", **THETA, **PARTIAL)),
        "long": dict(**PHI, rope_parameters=LONGROPE | PARTIAL, **ORIGINAL),
        "mha": dict(pad_token_id=0, tie_word_embeddings=True),
        "window": dict(**PHI, sliding_window=6),
    },
    Olmo2Config: {
        "gqa": dict(**GQA, pad_token_id=0),
        "mha-bias": dict(pad_token_id=0, attention_bias=True, tie_word_embeddings=True),
    },
    Olmo3Config: {
        "three-of-four": dict(**GQA, num_hidden_layers=4, sliding_window=6, pad_token_id=0),
        "yarn-of-one-kind": dict(
            **GQA, layer_types=MIXED, sliding_window=9, rope_parameters=YARN_OF_ONE, pad_token_id=0
        ),
    },
    Gemma3TextConfig: {
        "every-second-layer": dict(**GEMMA, layer_types=MIXED, sliding_window=6),
        "five-of-six": dict(**GEMMA, num_hidden_layers=6, sliding_window=5, attention_bias=True),
        "linear": dict(**GEMMA, layer_types=MIXED, sliding_window=4, rope_parameters=LINEAR_OF_ONE),
        "capped-logits": dict(**GEMMA, sliding_window=7, final_logit_softcapping=0.8),
    },
    Gemma4TextConfig: {
        "five-of-six": dict(**GEMMA4, num_hidden_layers=6, attention_bias=True),
        "shared-kv": dict(**GEMMA4, **SHARING, final_logit_softcapping=0.8),
        "keys-as-values": dict(
            **GEMMA4, layer_types=MIXED, attention_k_eq_v=True, num_global_key_value_heads=1
        ),
        "experts": GEMMA4 | EXPERTS_BESIDE | dict(tie_word_embeddings=False),
        "all": GEMMA4
        | SHARING
        | EXPERTS_BESIDE
        | dict(hidden_size_per_layer_input=3, attention_k_eq_v=True),
    },
    Gemma2Config: {
        "caps": dict(**GEMMA, **CAPS, sliding_window=6),
        "untied": dict(**GEMMA, **CAPS, sliding_window=64, tie_word_embeddings=False),
        "no-caps": dict(
            **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=3
        ),
    },
    GlmConfig: {
        "half": dict(**GQA, head_dim=12, pad_token_id=0, attention_bias=True),
    },
    Glm4Config: {
        "half": dict(**GQA, head_dim=12, pad_token_id=0),
        "whole": dict(**GQA, head_dim=16, pad_token_id=0, attention_bias=False, **WHOLE),
    },
    GraniteConfig: {
        "multipliers": dict(**GQA, **MULTIPLIERS, tie_word_embeddings=True),
        "biases": dict(**GQA, **MULTIPLIERS, attention_bias=True, mlp_bias=True),
    },
    SmolLM3Config: {
        "every-second": dict(**GQA, num_hidden_layers=4, no_rope_layer_interval=2, pad_token_id=0),
        "listed": dict(**GQA, no_rope_layers=[0, 1], pad_token_id=0, tie_word_embeddings=False),
        "window": dict(**GQA, no_rope_layers=[0, 1], pad_token_id=0, **WINDOW),
    },
    Qwen3_5TextConfig: {
        "one-of-four": dict(**DELTA, tie_word_embeddings=True),
        "listed": DELTA | dict(layer_types=LINEAR * 2, linear_num_value_heads=3, **WHOLE),
    },
    Qwen3_5MoeTextConfig: {
        "experts": dict(**SHARED, layer_types=LINEAR * 2),
    },
    Qwen3NextConfig: {
        "experts": SHARED | dict(layer_types=LINEAR * 2, linear_num_value_heads=6),
        "dense-layers": SHARED | dict(decoder_sparse_step=2, mlp_only_layers=[3]),
    },
    GptOssConfig: {
        "experts": OSS | dict(num_local_experts=6, num_experts_per_tok=4),
        "one-of-one": OSS | dict(num_local_experts=1, num_experts_per_tok=1, attention_bias=False),
        "clamps": OSS | dict(num_local_experts=5, num_experts_per_tok=2, **CLAMPS),
    },
    Lfm2Config: {
        "two-of-three": dict(
            **GQA,
            num_hidden_layers=3,
            full_attn_idxs=[1],
            pad_token_id=0,
            block_multiple_of=8,
            block_ffn_dim_multiplier=1.3,
        ),
        "biases": dict(
            **GQA,
            layer_types=["conv", "full_attention"],
            pad_token_id=0,
            conv_bias=True,
            conv_L_cache=5,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=False,
        ),
    },
    SeedOssConfig: {
        "biases": dict(**GQA, head_dim=16, attention_out_bias=False, mlp_bias=True),
        "output-bias": dict(**GQA, head_dim=16, attention_bias=False, attention_out_bias=True),
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
        lens = {
            i: (driver.lens[i], driver.lens[i] + n)
            for i, n in [(i, 1) for i in decodes] + list(chunks.items())
        }
        logits = driver.step(
            {i: tokens[i][driver.lens[i]] for i in decodes},
            {i: tokens[i][slice(*lens[i])] for i in chunks},
        )
        for (i, _), part in zip(
            lens.items(), logits.split([end - begin for begin, end in lens.values()])
        ):
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


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="linear", factor=4.0),
        LLAMA3,
        dict(LLAMA3, factor=32.0, original_max_position_embeddings=8192),
        YARN,
        dict(YARN, original_max_position_embeddings=32768, beta_fast=16, beta_slow=2),
        dict(
            YARN, factor=40.0, mscale=0.8, mscale_all_dim=0.5, original_max_position_embeddings=4096
        ),
        dict(YARN, attention_factor=0.7, truncate=False, original_max_position_embeddings=4096),
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling_equals_transformers(rope):
    length = int(rope["factor"] * rope.get("original_max_position_embeddings", 1024))
    sizes = dict(head_dim=128, max_position_embeddings=length)
    config = LlamaConfig(**{**SMALL, **sizes, "rope_scaling": dict(rope), "rope_theta": 500000.0})
    want, want_scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    settings = read_config(config, architectures=["LlamaForCausalLM"]).rope_settings()
    frequencies, scale = rope_frequencies(settings, 128)
    torch.testing.assert_close(frequencies, want, rtol=1e-6, atol=0)
    assert scale == pytest.approx(want_scale)
    cos_sin = RotaryEmbedding.from_settings(settings, 128).cos_sin
    assert cos_sin.shape == (length, 128)
    angles = torch.arange(64.0)[:, None] * want
    torch.testing.assert_close(
        cos_sin[:64], torch.cat((angles.cos(), angles.sin()), 1) * want_scale, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("positions, seq_len", [(64, 64), (65, 65), (4096, 4096), (None, 4096)])
@pytest.mark.parametrize("own", [{}, dict(attention_factor=1.3), dict(factor=8.0)], ids=str)
def test_long_contexts_turn_by_longrope_as_in_transformers(positions, seq_len, own):
    rope = LONGROPE | PARTIAL | own
    sizes = dict(max_position_embeddings=4096, original_max_position_embeddings=64)
    config = Phi3Config(**{**SMALL, **PHI, **sizes, "rope_parameters": dict(rope)})
    want, want_scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len)
    settings = read_config(config, architectures=["Phi3ForCausalLM"]).rope_settings()
    frequencies, scale = rope_frequencies(settings, 16, positions)
    torch.testing.assert_close(frequencies, want, rtol=1e-6, atol=0)
    assert scale == pytest.approx(want_scale)


def rope_of(kind="full_attention", **values):
    """The rope settings of a Llama whose config.json says `values`."""
    said = dict(SMALL, architectures=["LlamaForCausalLM"], **values)
    return read_model_config(said).rope_settings(kind)


def test_old_and_new_forms_of_rope_settings_are_one():
    # As transformers 4 has them, and as transformers 5 has them.
    old = rope_of(rope_theta=1e6, rope_scaling=dict(type="linear", factor=2.0))
    new = rope_of(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e6))
    torch.testing.assert_close(rope_frequencies(old, 16), rope_frequencies(new, 16), rtol=0, atol=0)


SEES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
SEES |= dict(image_size=28, patch_size=14)
MISTRAL = {**SMALL, **GQA, "head_dim": 16}
SEEING = {
    "gemma3": Gemma3Config(
        text_config={**SMALL, **GEMMA, "sliding_window": 6, "num_hidden_layers": 6},
        vision_config=SiglipVisionConfig(**SEES),
        mm_tokens_per_image=4,
    ),
    "ministral3": Mistral3Config(
        text_config=dict(MISTRAL, model_type="ministral3", rope_parameters=LATE_QUERIES),
        vision_config=PixtralVisionConfig(**SEES),
        tie_word_embeddings=False,
    ),
    "ministral3-tied": Mistral3Config(
        text_config=dict(MISTRAL, model_type="ministral3", rope_parameters=LATE_QUERIES),
        vision_config=PixtralVisionConfig(**SEES),
    ),
    "gemma4": Gemma4Config(
        text_config={**SMALL, **GEMMA4, **SHARING},
        vision_config=Gemma4VisionConfig(**SEES, num_key_value_heads=2, head_dim=8),
        audio_config=Gemma4AudioConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16
        ),
    ),
    "mistral": Mistral3Config(
        text_config=dict(MISTRAL, model_type="mistral", sliding_window=None),
        vision_config=PixtralVisionConfig(**SEES),
        tie_word_embeddings=False,
    ),
}
QWEN3_5_VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    out_hidden_size=32,
    num_position_embeddings=16,
)
QWEN3_5 = {
    "Qwen3_5": ({**SMALL, **DELTA}, Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "Qwen3_5Moe": (
        {**SMALL, **SHARED},
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
    ),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused-experts", "single-experts"])
@pytest.mark.parametrize("name", QWEN3_5)
def test_a_qwen3_5_that_sees_runs_on_text(name, fused, tmp_path, caplog):
    text, config_class, reference_class = QWEN3_5[name]
    config = config_class(text_config=text, vision_config=QWEN3_5_VISION, tie_word_embeddings=True)
    torch.manual_seed(0)
    reference = reference_class(config).eval()
    reference.config.text_config._experts_implementation = "eager"
    for parameter in reference.parameters():
        parameter.data.normal_(0.0, 0.2)
    # The tensors of published checkpoints: experts are fused, or single ones in quantised models.
    tensors = {"mtp.fc.weight": torch.zeros(4, 4)}
    for key, tensor in reference.state_dict().items():
        if key == "lm_head.weight":
            continue
        path, _, kind = key.rpartition(".")
        if fused or not path.endswith("experts"):
            tensors[key] = tensor.contiguous()
            continue
        for i, one in enumerate(tensor):
            parts = {kind: one}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), one.chunk(2)))
            for part, values in parts.items():
                tensors[f"{path}.{i}.{part}.weight"] = values.clone()
    assert any(key.startswith("model.visual.") for key in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    values = json.loads(config.to_json_string()) | dict(architectures=[reference_class.__name__])
    (tmp_path / "config.json").write_text(json.dumps(values))
    tokens = torch.randint(90, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = Driver(load(tmp_path), 1, 40).step({}, {0: tokens})
    torch.testing.assert_close(logits, expected_logits(reference, tokens), rtol=0, atol=1e-4)
    with caplog.at_level("INFO", "nanovllm"):
        check_num_layers(4, tmp_path, MODELS[reference_class.__name__])
    assert "model.visual, mtp left out" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["3.5", "3.6"])
def test_a_checkpoint_may_hold_gates_and_their_norm_more_precisely_than_the_rest(dtype, tmp_path):
    reference = make_checkpoint(tmp_path, CONFIGS["qwen3_5_text-listed"])
    precise = ("A_log", "linear_attn.norm.weight")
    tensors = {
        name: x.to(dtype if name.endswith(precise) else torch.bfloat16)
        for name, x in reference.state_dict().items()
    }
    rewrite(tmp_path, tensors)
    reference.load_state_dict(tensors)
    tokens = torch.randint(101, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = Driver(load(tmp_path), 1, 32).step({}, {0: tokens})
    torch.testing.assert_close(logits, expected_logits(reference, tokens), rtol=0, atol=1e-4)
    with tensors_default_to(torch.bfloat16, torch.device("cpu")):
        layer = load(tmp_path).model.layers[0].linear_attn
    name = "model.layers.0.linear_attn.A_log"
    assert torch.equal(layer.A_log, tensors[name].float())


@pytest.mark.parametrize("name", SEEING)
def test_a_model_that_sees_runs_on_text_and_says_what_is_left_out(name, tmp_path, caplog):
    config = SEEING[name]
    config.image_token_index = 99
    torch.manual_seed(0)
    reference = AutoModelForImageTextToText.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(90, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = Driver(load(tmp_path), 1, 32).step({}, {0: tokens})
    torch.testing.assert_close(logits, expected_logits(reference, tokens), rtol=0, atol=1e-4)
    with caplog.at_level("INFO", "nanovllm"):
        LLM(tmp_path, device="cpu", num_kvcache_blocks=2).close()
    left_out = "multi_modal_projector, vision_tower"
    if name == "gemma4":
        parts = "audio_tower", "embed_audio", "embed_vision", "vision_tower"
        left_out = ", ".join(f"model.{part}" for part in parts)
    assert f" {left_out} left out" in caplog.text


def test_queries_count_more_at_late_positions_as_in_transformers():
    rope = dict(Ministral3Config().rope_parameters)
    rope |= dict(max_position_embeddings=10**5, partial_rotary_factor=1.0)
    positions = torch.arange(10**5)
    with tensors_default_to(torch.bfloat16, torch.device("cpu")):
        rotary = QueryScalingRotaryEmbedding.from_settings(rope, 4)
    got = rotary.scale_queries(torch.ones(len(positions), 1, 1), positions)
    want = get_llama_4_attn_scale(positions[None], 0.1, 16384).view(-1, 1, 1)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    # Where all factors are 1, the plain embedding serves, which faster layers know.
    within = QueryScalingRotaryEmbedding.from_settings(rope, 4, max_positions=16384)
    assert type(within) is RotaryEmbedding and got[16383] == 1 < got[16384]


def test_what_layers_that_share_kv_would_need_if_they_did_not_is_left_out(tmp_path):
    """Published checkpoints of Gemma 4 hold it."""
    config = Gemma4TextConfig(**{**SMALL, **GEMMA4, **SHARING})
    reference = make_checkpoint(tmp_path, config)
    name = "model.layers.{}.self_attn.{}.weight"
    unused = {name.format(4, part): torch.zeros(7) for part in ("k_proj", "v_proj", "k_norm")}
    save_file(unused, tmp_path / "unused.safetensors")
    (index,) = tmp_path.glob("*.index.json")
    files = json.loads(index.read_text())
    files["weight_map"] |= dict.fromkeys(unused, "unused.safetensors")
    index.write_text(json.dumps(files))
    logits = Driver(load(tmp_path), 1, 32).step({}, {0: [5, 6, 7]})
    torch.testing.assert_close(logits, expected_logits(reference, [5, 6, 7]), rtol=0, atol=1e-4)


def test_each_layers_kv_cache_has_its_own_shape_and_shared_kv_is_held_once(tmp_path):
    make_checkpoint(tmp_path, CONFIGS["gemma4_text-all"])
    with LLM(tmp_path, device="cpu", kvcache_block_size=16, num_kvcache_blocks=3) as llm:
        runner = llm.engine.runner
        # Layers with a window, with and without; the last two share those of layers 2 and 1.
        shapes = [tuple(part.shape) for part in runner.kv_parts]
        assert shapes == [(2, 3, 16, 2, 8), (2, 3, 16, 2, 16), (2, 3, 16, 2, 8)]
        assert runner.info.kv_cache_bytes == 4 * sum(map(math.prod, shapes))
        caches = [layer.kv_cache for layer in runner.attention_layers]
        assert caches[3] is caches[2] and caches[4] is caches[1]


def test_experts_result_does_not_depend_on_the_batch():
    x, logits, gate_up, down = (
        torch.randn(16, 8),
        torch.randn(16, 4),
        torch.randn(4, 12, 8),
        torch.randn(4, 8, 6),
    )
    options = dict(gate_up=gate_up, down=down, top_k=2, renormalize=True)
    whole = plain.moe(x, logits, **options)
    for i in range(16):
        alone = plain.moe(x[i : i + 1], logits[i : i + 1], **options)
        torch.testing.assert_close(alone[0], whole[i])


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(architectures=["GPT2LMHeadModel"]),
            "architectures is .*GPT2LMHeadModel.* runs Qwen3ForCausalLM, ",
        ),
        (dict(architectures=None), "architectures is "),
        (dict(sliding_window=-1), "sliding_window is -1: it must be an integer from 0"),
        (dict(sliding_window=8.0), "sliding_window is 8.0"),
        (
            dict(sliding_window=32, architectures=["LlamaForCausalLM"]),
            "sliding_window is 32: LlamaForCausalLM has no windows here",
        ),
        (
            dict(layer_types=["full_attention"]),
            "layer_types is .*for each of 2 layers which one of full_attention, sliding_attention",
        ),
        (dict(layer_types=["chunked_attention"] * 2), "layer_types is .'chunked_attention'"),
        (
            dict(layer_types=["sliding_attention"] * 2),
            "layer_types has sliding_attention, but sliding_window is None",
        ),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (
            dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)),
            "rope_type is 'dynamic', not implemented",
        ),
        (
            dict(
                rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
            ),
            "partial_rotary",
        ),
    ],
)
def test_what_no_model_does_is_refused(options, message):
    options = {"architectures": ["MistralForCausalLM"], "sliding_window": None, **options}
    with pytest.raises(ValueError, match=message):
        build_model(read_config(MistralConfig(**SMALL, **GQA), **options), ParallelGroup())


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(num_key_value_heads=3), "num_attention_heads is 4, num_key_value_heads is 3"),
        (dict(num_key_value_heads=0), "num_key_value_heads is 0: it must be an integer from 1"),
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
        build_model(read_config(config, **values), ParallelGroup())


def random_rope(r, kind, at_top):
    """Settings of a scaling as a config.json may have them: some left out, some null."""
    rope = {r.choice(["rope_type", "type"]): kind}
    if at_top:
        rope["rope_theta"] = r.choice([1e4, 5e5, 1000000])
    if kind == "linear":
        rope["factor"] = r.choice([2.0, 4, 8.0])
    if kind in ("llama3", "yarn") and r.random() < 0.6:
        rope["original_max_position_embeddings"] = r.choice([512, 1024])
    if kind == "llama3":
        low, high = r.choice([1.0, 2, 1]), r.choice([4.0, 8])
        rope |= dict(factor=r.choice([2.0, 8]), low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        rope["factor"] = r.choice([2.0, 4, None])
        optional = dict(
            beta_fast=[16, 32.0, None],
            beta_slow=[1, 2.0, None],
            mscale=[0.7, 1.0, None, 0],
            mscale_all_dim=[0.5, 1.0, None, 0],
            attention_factor=[0.8, 1.0, None],
            truncate=[True, False],
        )
        rope |= {name: r.choice(some) for name, some in optional.items() if r.random() < 0.3}
    return rope


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_frequencies_of_random_settings_are_transformers_wherever_they_stand(tmp_path, kind):
    r = random.Random(kind)
    families = {
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mistral": "MistralForCausalLM",
    }
    for _ in range(60):
        model_type = r.choice(list(families))
        values = SMALL | GQA | dict(model_type=model_type, architectures=[families[model_type]])
        values |= dict(head_dim=32, max_position_embeddings=4096, rms_norm_eps=1e-6)
        if r.random() < 0.5:
            values["rope_theta"] = r.choice([1e4, 5e5, 10000])
        newer = r.random() < 0.5
        values["rope_parameters" if newer else "rope_scaling"] = random_rope(r, kind, newer)
        if r.random() < 0.2:  # an older one beside it, which wins
            values["rope_scaling"] = random_rope(r, r.choice(["linear", "yarn"]), False)
        if r.random() < 0.4:
            values["original_max_position_embeddings"] = r.choice([256, 2048])
        (tmp_path / "config.json").write_text(json.dumps(values))
        theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
        frequencies, scale = rope_frequencies(load_model_config(tmp_path).rope_settings(), 32)
        torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=2e-6, atol=0, msg=str(values))
        assert scale == pytest.approx(theirs.attention_scaling), values


@pytest.mark.parametrize("kind", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_an_original_context_at_the_top_of_the_configuration_wins(kind):
    rope = dict(kind, rope_theta=5e5, original_max_position_embeddings=512)
    longer = dict(original_max_position_embeddings=1024)
    at_top, among, without = (
        rope_frequencies(settings, 64)
        for settings in (
            rope_of(rope_parameters=rope, **longer),
            rope_of(rope_parameters=rope | longer),
            rope_of(rope_parameters=rope),
        )
    )
    torch.testing.assert_close(at_top, among)
    assert not torch.equal(at_top[0], without[0])


NO_NUMBERS = (-1, -0.5, 0, math.nan, math.inf, -math.inf, 1e39, 10**400, "8", True, [1], {"a": 1})
WRONG_ROPES = [
    (dict(rope_theta=value), "rope_theta|kinds of layers") for value in (*NO_NUMBERS, 0.5, 1)
]
WRONG_ROPES += [(dict(YARN, factor=value), "factor|kinds of layers") for value in NO_NUMBERS]
WRONG_ROPES += [
    (dict(YARN, attention_factor=-0.5), "attention_factor of its rope settings is -0.5"),
    (dict(YARN, beta_fast=-1), "beta_fast of its rope settings is -1"),
    (dict(YARN, mscale=math.nan, mscale_all_dim=1.0), "mscale of its rope settings is nan"),
    (dict(YARN, original_max_position_embeddings=0), "original_max_position_embeddings"),
    (dict(YARN, original_max_position_embeddings=512.0), "original_max_position_embeddings"),
    (
        dict(LLAMA3, high_freq_factor=1.0),
        "high_freq_factor of its rope settings is 1.0: .* above low",
    ),
    (dict(rope_type="linear"), "rope_type is 'linear', which needs 'factor': add it"),
    (dict(rope_type=["linear"]), "rope_type is .*not implemented"),
    (
        {"full_attention": {"rope_type": "default", "rope_theta": 5e5}},
        "given for kinds of layers .full_attention., and not for sliding_attention: give",
    ),
    ([1], "must be an object"),
    (LONGROPE | dict(short_factor=None), "rope_type is 'longrope', which needs 'short_factor'"),
    (LONGROPE | dict(short_factor=[1.0, 0]), "short_factor .* must be a list of finite numbers"),
    (LONGROPE | dict(short_factor=[1.0] * 7), "short_factor .* has 7 numbers: .* each of 8 pairs"),
    (dict(partial_rotary_factor=0.0), "partial_rotary_factor is 0.0"),
    (dict(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5"),
    (dict(partial_rotary_factor=0.2), "partial_rotary_factor is 0.2 of a head_dim of 16: an even"),
    (dict(partial_rotary_factor="1"), "partial_rotary_factor is '1'"),
]


@pytest.mark.parametrize("rope, message", WRONG_ROPES, ids=str)
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rope_settings_that_mean_nothing_are_refused(rope, message, name):
    with pytest.raises(ValueError, match=message):
        rope_frequencies(rope_of("sliding_attention", **{name: rope}), 16)


@pytest.mark.parametrize("theta", NO_NUMBERS)
def test_a_base_beside_the_rope_settings_is_checked_too(theta):
    with pytest.raises(ValueError, match="config.json: rope_theta is .*: it must be a finite numb"):
        rope_of(rope_theta=theta)


@pytest.mark.parametrize(
    "kind, values, message",
    [
        (GraniteConfig, dict(residual_multiplier=0), "residual_multiplier is 0: it must be a fin"),
        (GraniteConfig, dict(logits_scaling="8"), "logits_scaling is '8'"),
        (SmolLM3Config, dict(no_rope_layers=[1]), "no_rope_layers is .1.: it must be a list of 0"),
        (SmolLM3Config, dict(no_rope_layers=[2, 1]), "no_rope_layers is .2, 1."),
        (Gemma3TextConfig, dict(query_pre_attn_scalar=0), "query_pre_attn_scalar is 0"),
        (Gemma3TextConfig, dict(final_logit_softcapping=-1), "final_logit_softcapping is -1"),
        (Gemma2Config, dict(attn_logit_softcapping="50"), "attn_logit_softcapping is '50'"),
        (Gemma2Config, dict(hidden_activation="silu"), "is 'silu': Gemma2ForCausalLM has 'gelu_p"),
        (
            Gemma3TextConfig,
            dict(use_bidirectional_attention=True),
            "use_bidirectional_attention is True: .* choose one",
        ),
        (GptOssConfig, dict(num_local_experts=0), "num_local_experts is 0: it must be an integer"),
        (
            GptOssConfig,
            dict(num_experts_per_tok=129),
            "is 129, more than num_experts or num_local_experts",
        ),
        (GptOssConfig, dict(swiglu_limit="7"), "swiglu_limit is '7': it must be a finite number"),
        (GptOssConfig, dict(swiglu_alpha=0), "swiglu_alpha is 0"),
        (GptOssConfig, dict(layer_types=["chunked_attention"] * 2), "layer_types is .'chunked"),
        (GptOssConfig, dict(hidden_act="gelu"), "hidden_act is 'gelu': GptOssForCausalLM has"),
        (
            Gemma4TextConfig,
            dict(use_bidirectional_attention="all"),
            "use_bidirectional_attention is 'all': .* choose one",
        ),
        (Gemma4TextConfig, dict(num_kv_shared_layers=2), "num_kv_shared_layers is 2 of 2: the oth"),
        (
            Gemma4TextConfig,
            dict(per_layer_config={"0": {"head_dim": 8}}),
            "per_layer_config is .*: only head_dim and num_key_value_heads may differ",
        ),
        (
            Gemma4TextConfig,
            dict(per_layer_config=None, num_global_key_value_heads=3, attention_k_eq_v=True),
            "layers without a window have .*'num_key_value_heads': 3}",
        ),
        (
            Gemma4TextConfig,
            dict(enable_moe_block=True),
            "enable_moe_block is set, num_exp",
        ),
        (
            Gemma4TextConfig,
            dict(vocab_size_per_layer_input=100),
            "vocab_size_per_layer_input is 100, vocab_size is 101: each token needs",
        ),
        (Gemma2Config, dict(use_bidirectional_attention=1), "use_bidirectional_attention is 1: "),
        (Glm4Config, dict(hidden_act="gelu"), "hidden_act is 'gelu': Glm4ForCausalLM has 'silu'"),
        (Olmo2Config, dict(rope_parameters=dict(partial_rotary_factor=0.5)), "only 1.0 is implem"),
        (Qwen3_5TextConfig, dict(output_gate_type="sigmoid"), "output_gate_type is 'sigmoid': Qwe"),
        (Qwen3_5TextConfig, dict(attn_output_gate=False), "attn_output_gate is False"),
        (Qwen3NextConfig, dict(linear_num_key_heads=3), "heads is 32, linear_num_key_heads is 3"),
        (Lfm2Config, dict(layer_types=["conv"] * 2), "layer_types is .*: no layer has attention"),
        (Qwen3_5TextConfig, dict(layer_types=LINEAR[:1] * 2), "no layer has attention, and models"),
        (Qwen3_5MoeTextConfig, dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim is 1: it m"),
    ],
    ids=str,
)
def test_what_a_family_does_not_do_is_refused_by_name(kind, values, message):
    family = kind.__name__.removesuffix("Config").removesuffix("Text")
    values = dict(architectures=[f"{family}ForCausalLM"], **values)
    with pytest.raises(ValueError, match=message):
        build_model(read_config(kind(**SMALL, **GQA, pad_token_id=0), **values), ParallelGroup())


@pytest.mark.parametrize("value", [True, False, None], ids=repr)
@pytest.mark.parametrize("name", ["is_causal", "use_bidirectional_attention"])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, Gemma3TextConfig])
def test_a_model_is_refused_if_its_tokens_see_later_ones_in_transformers(
    tmp_path, kind, name, value
):
    more = {**SMALL, **GQA, "head_dim": 8, "pad_token_id": 0, "rope_theta": 1e4, name: value}
    config = kind(**more, attn_implementation="eager")
    reference = make_checkpoint(tmp_path, config)
    first, other = [expected_logits(reference, tokens)[0] for tokens in ([5, 6, 7], [5, 6, 8])]
    if torch.equal(first, other):
        load(tmp_path)
        return
    with pytest.raises(ValueError, match=f"json: {name} is {value}: .* choose one that generates"):
        load(tmp_path)


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(decoder_sparse_step=0), "decoder_sparse_step is 0: it must be an integer from 1"),
        (dict(num_experts_per_tok=0), "num_experts_per_tok is 0"),
        (dict(num_experts_per_tok=-1), "num_experts_per_tok is -1"),
        (
            dict(num_experts_per_tok=9),
            "num_experts_per_tok is 9, more than num_experts or num_local_experts, which is 8",
        ),
        (dict(moe_intermediate_size=-24), "moe_intermediate_size is -24"),
        (dict(num_experts=None), "num_experts is None"),
        (dict(num_experts="8"), "num_experts is '8'"),
        (dict(norm_topk_prob="false"), "norm_topk_prob is 'false': it must be true or false"),
        (dict(mlp_only_layers=["0"]), "mlp_only_layers is .'0'.: it must be a list"),
        (dict(head_dim=-16), "head_dim is -16"),
        (dict(head_dim="16"), "head_dim is '16'"),
        (dict(intermediate_size=-48), "intermediate_size is -48"),
        (
            dict(hidden_size=10**30),
            "hidden_size is 10{30}: it must be an integer from 1 to 2147483647",
        ),
        (dict(num_hidden_layers=10**5), "num_hidden_layers is 100000: .* from 1 to 10000"),
        (dict(attention_bias="false"), "attention_bias is 'false': it must be true or false"),
        (dict(architectures=[["Qwen3ForCausalLM"]]), "architectures is .*this library runs"),
        (dict(sliding_window="8", use_sliding_window=True), "sliding_window is '8'"),
    ],
    ids=str,
)
def test_a_mixture_of_experts_that_is_none_is_refused(values, message):
    config = Qwen3MoeConfig(**SMALL, **MOE, architectures=["Qwen3MoeForCausalLM"]).to_dict()
    del config["num_local_experts"]  # the other name, which comes first
    with pytest.raises(ValueError, match=message):
        read_model_config(config | {"num_experts": 8} | values)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_experts_have_two_names_and_null_under_both_is_refused(name):
    config = Qwen3MoeConfig(**SMALL, **MOE, architectures=["Qwen3MoeForCausalLM"]).to_dict()
    del config["num_local_experts"]
    assert read_model_config(config | {name: 6}).num_experts == 6
    beside = {"num_experts": 8} if name == "num_local_experts" else {"num_local_experts": 8}
    assert read_model_config(config | beside | {name: None}).num_experts == 8
    with pytest.raises(ValueError, match=f"{name} is None: it must be an integer"):
        read_model_config(config | {name: None})
    with pytest.raises(ValueError, match="num_local_experts is '8'"):
        read_model_config(config | {"num_experts": 8, "num_local_experts": "8"})


def test_any_architecture_on_any_configuration_is_built_or_refused(tmp_path):
    kinds = (Qwen3Config, Qwen3MoeConfig, Qwen2Config, LlamaConfig, MistralConfig, GPT2Config)
    refused = 0
    for kind in kinds:
        for architecture in MODELS:
            config = kind(**SMALL) if kind is GPT2Config else kind(**SMALL, **GQA)
            config.architectures, config.sliding_window = [architecture], None
            config.save_pretrained(tmp_path)
            try:
                with torch.device("meta"):
                    build_model(load_model_config(tmp_path), ParallelGroup())
            except ValueError as error:
                refused += 1
                assert "config.json" in str(error), (kind, architecture, error)
    assert refused >= 10


@pytest.mark.parametrize("size", [2**31 - 1, 10**9])
def test_a_model_that_no_memory_holds_is_refused(size):
    values = dict(SMALL, **GQA, vocab_size=size, hidden_size=size, head_dim=16)
    config = read_config(Qwen3Config(**SMALL), **values, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(
        ValueError, match=rf"no memory for the model .*hidden_size {size}.* smaller"
    ):
        build_model(config, ParallelGroup())


def test_weights_that_a_machine_has_no_memory_for_are_refused_before_they_take_it(monkeypatch):
    """Linux would grant the memory, and kill the process when it is used."""
    monkeypatch.setattr(models, "usable_ram", lambda: (2**20 * 13, "this machine has"))
    fault = (
        r"no memory for the model .* weights take 0\.0 GiB, .* has 0\.0 GiB; the options dtype and"
    )
    with pytest.raises(ValueError, match=fault):
        LLM(TINY_MODEL, num_kvcache_blocks=4)
    for option in (dict(dtype="bfloat16"), dict(quantization="int8")):
        LLM(TINY_MODEL, num_kvcache_blocks=4, **option).close()


def test_weights_that_a_container_has_no_memory_for_are_refused_too(monkeypatch, tmp_path):
    root = make_root(tmp_path, "0::/job\n")
    grant(root, "job", memory__max=str(2**20 * 13))
    limit = usable_ram(root)
    monkeypatch.setattr(models, "usable_ram", lambda: limit)
    with pytest.raises(
        ValueError, match=r"control group's limit \(\S*/job/memory.max\) is 0\.0 GiB"
    ):
        LLM(TINY_MODEL, num_kvcache_blocks=4)
    monkeypatch.setattr(kv_cache, "usable_ram", lambda: limit)
    assert kv_cache.bytes_in_ram(2) == 2**20 * 13 // 8


GIB, UNLIMITED = 2**30, 2**63 - 4096
GROUPS = {
    "version 2": ("0::/a/b\n", {"a/b": "memory.max"}),
    "a parent": ("0::/a/b\n", {"a": "memory.max"}),
    "the host's path": ("0::/docker/0123\n", {"": "memory.max"}),
    "version 1": ("2:cpu:/\n1:memory:/a\n0::/\n", {"memory/a": "memory.limit_in_bytes"}),
    "version 1's parent": ("1:memory:/a\n", {"memory": "memory.limit_in_bytes"}),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_the_least_limit_of_a_control_group_is_the_memory(kind, tmp_path):
    lines, files = GROUPS[kind]
    root = make_root(tmp_path, lines)
    machine, limit = usable_ram(root)
    assert limit == "this machine has" and machine > GIB
    for group, name in files.items():
        for value in ("max", UNLIMITED, machine + 1):
            grant(root, group, **{name.replace(".", "__"): f"{value}\n"})
            assert usable_ram(root) == (machine, "this machine has")
        grant(root, group, **{name.replace(".", "__"): f"{GIB}\n"})
        size, limit = usable_ram(root)
        assert size == GIB and str(root / "sys/fs/cgroup" / group / name) in limit


def test_without_control_groups_the_machine_limits_the_memory(tmp_path):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert usable_ram(tmp_path) == (machine, "this machine has")


def test_ranks_that_do_not_divide_hear_what_does():
    with pytest.raises(
        ValueError, match="num_heads is 9, .*=2 does not divide: use one of 1, 3, 9$"
    ):
        ParallelGroup(0, 2).shard(9, "num_heads")
    with pytest.raises(ValueError, match="use one of 1$"):
        ParallelGroup(0, 2).shard(10**9 + 7, "width")


def test_angles_are_made_for_the_positions_that_are_asked_for():
    long = dict(max_position_embeddings=10**9, architectures=["Qwen3ForCausalLM"])
    config = read_config(Qwen3Config(**SMALL, **GQA), **long)
    model = build_model(config, ParallelGroup(), max_model_len=64)
    tables = {
        module.cos_sin.shape for module in model.modules() if isinstance(module, RotaryEmbedding)
    }
    assert {rows for rows, _ in tables} == {64}


def test_an_llm_asks_for_as_many_positions_as_its_sequences_may_have(tmp_path):
    make_checkpoint(tmp_path, Qwen3Config(**{**SMALL, **GQA, "max_position_embeddings": 10**9}))
    with LLM(tmp_path, device="cpu", max_model_len=48, num_kvcache_blocks=4) as llm:
        (attention, *_) = llm.engine.runner.attention_layers
        assert attention.rotary.cos_sin.shape[0] == 48
