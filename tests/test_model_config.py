"""A ModelConfig reads of a config.json what transformers reads of it, and needs no transformers."""

import subprocess
import sys
from dataclasses import MISSING, fields, is_dataclass, replace

import pytest
import torch
from test_models import FAMILIES, SMALL
from transformers import (
    Gemma3Config,
    Gemma4TextConfig,
    Mistral3Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3NextConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.layers.rope_scaling import rope_frequencies
from nanovllm.models import MODELS, read_model_config
from nanovllm.models.gemma3 import Gemma3Config as OurGemma3Config

SIZES = dict(SMALL, num_hidden_layers=12, num_key_value_heads=2, pad_token_id=0)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
EXPERTS |= dict(shared_expert_intermediate_size=8)
# Fields that transformers holds in another form, which assert_same compares.
UNLIKE = ("rope_parameters", "no_rope_layers", "per_layer_config", "full_attn_idxs")
BOTH = ("full_attention", "sliding_attention")


def architecture_of(kind) -> str:
    family = kind.__name__.removesuffix("Config").removesuffix("Text")
    return f"{family}ForCausalLM"


def values_of(kind, **values) -> dict:
    """A config.json of the family that says what a checkpoint must say, and `values`."""
    name = architecture_of(kind)
    required = {one.name for one in fields(MODELS[name].config_class) if one.default is MISSING}
    given = SIZES | {key: value for key, value in EXPERTS.items() if key in required}
    return given | dict(architectures=[name], model_type=kind.model_type) | values


def assert_same(ours, theirs):
    """Compare each field that both configurations have, and the angles of each kind of layer."""
    theirs.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose layers differ
    for index, kind in enumerate(ours.layer_types if theirs.is_heterogeneous else ()):
        of_layer = theirs.per_layer_config[index]
        assert ours.head_dim_of(kind) == of_layer.head_dim
        assert ours.kv_heads_of(kind) == of_layer.num_key_value_heads
    for one in fields(ours):
        if not hasattr(theirs, one.name) or one.name in UNLIKE:
            continue
        value, want = getattr(ours, one.name), getattr(theirs, one.name)
        if one.name == "sliding_window" and not ours.use_sliding_window:
            value = None  # as Qwen's classes of transformers write it
        if one.name == "num_experts":
            want = want or 0
        if one.name == "use_bidirectional_attention":
            value, want = bool(value), bool(want)
        assert (list(value) if isinstance(value, tuple) else value) == want, one.name
    for index in range(len(getattr(theirs, "no_rope_layers", ()))):
        assert ours.has_rope(index) == theirs.no_rope_layers[index]
    for kind in set(ours.layer_types):
        nested = kind in theirs.rope_parameters
        rope = theirs.rope_parameters[kind] if nested else theirs.rope_parameters
        got, scale = rope_frequencies(ours.rope_settings(kind), ours.head_dim_of(kind))
        if rope["rope_type"] == "default":
            size = int(ours.head_dim * rope.get("partial_rotary_factor", 1.0))
            want, want_scale = rope["rope_theta"] ** -(torch.arange(0, size, 2) / size), 1.0
        else:
            options = dict(layer_type=kind) if nested else {}
            compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
            want, want_scale = compute(theirs, torch.device("cpu"), **options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        assert scale == pytest.approx(want_scale)


@pytest.mark.parametrize("kind", FAMILIES)
def test_fields_that_a_checkpoint_leaves_out_are_as_in_transformers(kind):
    values = values_of(kind)
    assert_same(read_model_config(values), kind.from_dict(values))


@pytest.mark.parametrize("kind", FAMILIES)
def test_windows_bases_and_scalings_in_their_older_forms_are_as_in_transformers(kind):
    values = values_of(
        kind,
        rope_theta=3e5,
        torch_dtype="bfloat16",
        tie_word_embeddings=True,
    )
    name = architecture_of(kind)
    # Phi-3 knows LongRoPE alone, and Gemma 4 has no older form.
    if "Phi3" not in name and "Gemma4" not in name:
        values |= dict(rope_scaling=dict(rope_type="linear", factor=4.0))
    if MODELS[name].config_class.has_windows:
        values |= dict(sliding_window=16, use_sliding_window=True, max_window_layers=5)
    if "Gemma3" in name:
        values |= dict(rope_local_base_freq=2e4, sliding_window_pattern=4)
    ours, theirs = read_model_config(values), kind.from_dict(values)
    assert ours.dtype == "bfloat16"
    assert_same(replace(ours, dtype=theirs.dtype), theirs)


def test_a_text_model_is_read_from_within_a_model_that_sees():
    text = dict(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024
    )
    text |= dict(model_type="gemma3_text", rope_scaling=dict(factor=8.0, rope_type="linear"))
    values = dict(architectures=["Gemma3ForConditionalGeneration"], text_config=text)
    values |= dict(model_type="gemma3", torch_dtype="bfloat16", vision_config=dict(hidden_size=9))
    ours = read_model_config(values)
    assert isinstance(ours, OurGemma3Config) and ours.dtype == "bfloat16"
    assert_same(replace(ours, dtype=None), Gemma3Config.from_dict(values).text_config)
    assert ours.tie_word_embeddings
    assert not read_model_config(values | dict(tie_word_embeddings=False)).tie_word_embeddings


# What the config.json of each published Qwen3.5 and 3.6 says of its text model, read or not.
OF_QWEN3_5 = dict(
    attention_bias=False,
    attention_dropout=0.0,
    attn_output_gate=True,
    bos_token_id=248044,
    dtype="bfloat16",
    eos_token_id=248044,
    full_attention_interval=4,
    head_dim=256,
    hidden_act="silu",
    initializer_range=0.02,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_value_head_dim=128,
    mamba_ssm_dtype="float32",
    max_position_embeddings=262144,
    mlp_only_layers=[],
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    partial_rotary_factor=0.25,
    rms_norm_eps=1e-06,
    rope_parameters=dict(
        mrope_interleaved=True,
        mrope_section=[11, 11, 10],
        partial_rotary_factor=0.25,
        rope_theta=10000000,
        rope_type="default",
    ),
    use_cache=True,
    vocab_size=248320,
)


def qwen3_5(kind, *, tied=False, hidden, layers, heads, kv_heads, value_heads, **values):
    """The config.json of a published Qwen3.5, which also sees."""
    text = OF_QWEN3_5 | dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        linear_num_value_heads=value_heads,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        model_type=f"{kind.model_type}_text",
        **values,
    )
    name = kind.__name__.removesuffix("Config")
    return dict(
        architectures=[f"{name}ForConditionalGeneration"],
        language_model_only=False,
        model_type=kind.model_type,
        text_config=text,
        tie_word_embeddings=tied,
        transformers_version="5.8.0",
        vision_config=dict(depth=27, hidden_size=1152, out_hidden_size=hidden),
    )


OF_27B = dict(hidden=5120, layers=64, heads=24, kv_heads=4, value_heads=48, intermediate_size=17408)
OF_35B = dict(hidden=2048, layers=40, heads=16, kv_heads=2, value_heads=32, num_experts=256)
OF_35B |= dict(num_experts_per_tok=8, moe_intermediate_size=512)
OF_35B |= dict(shared_expert_intermediate_size=512, router_aux_loss_coef=0.001)
OF_0_8B = dict(hidden=1024, layers=24, heads=8, kv_heads=2, value_heads=16, intermediate_size=3584)
OF_397B = dict(hidden=4096, layers=60, heads=32, kv_heads=2, value_heads=64, num_experts=512)
OF_397B |= dict(num_experts_per_tok=10, moe_intermediate_size=1024)
OF_397B |= dict(shared_expert_intermediate_size=1024)
PUBLISHED = {
    "3.5-0.8B": (Qwen3_5Config, qwen3_5(Qwen3_5Config, tied=True, **OF_0_8B)),
    "3.6-27B": (Qwen3_5Config, qwen3_5(Qwen3_5Config, output_gate_type="swish", **OF_27B)),
    "3.5-35B-A3B": (Qwen3_5MoeConfig, qwen3_5(Qwen3_5MoeConfig, **OF_35B)),
    "3.5-397B-A17B": (Qwen3_5MoeConfig, qwen3_5(Qwen3_5MoeConfig, **OF_397B)),
    "3-Next-80B-A3B": (
        Qwen3NextConfig,
        OF_QWEN3_5
        | dict(
            architectures=["Qwen3NextForCausalLM"],
            model_type="qwen3_next",
            hidden_size=2048,
            intermediate_size=5120,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=2,
            linear_num_value_heads=32,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            rope_parameters=None,
            rope_scaling=None,
            rope_theta=10000000,
            vocab_size=151936,
        ),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_of_published_qwen3_5_are_read_as_transformers_reads_them(name):
    kind, values = PUBLISHED[name]
    ours, theirs = read_model_config(values), kind.from_dict(values)
    is_tied = values.get("tie_word_embeddings", False)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings == is_tied
    theirs = theirs.get_text_config()
    as_theirs = dict(tie_word_embeddings=theirs.tie_word_embeddings, dtype=theirs.dtype)
    assert_same(replace(ours, **as_theirs), theirs)
    assert ours.dtype == "bfloat16" and ours.architecture == values["architectures"][0]
    text = values.get("text_config", values)
    assert ours.linear_num_value_heads == text["linear_num_value_heads"]
    # `layer_types` says what full_attention_interval says without it.
    text = {key: value for key, value in text.items() if key != "layer_types"}
    without = values | (dict(text_config=text) if "text_config" in values else text)
    without = {key: value for key, value in without.items() if key != "layer_types"}
    assert read_model_config(without) == ours
    assert ours.layer_types[:4] == ("linear_attention",) * 3 + ("full_attention",)


def test_gemma_4_says_the_sizes_of_layers_without_a_window_in_two_ways():
    """As published checkpoints do, and as newer transformers write them."""
    published = values_of(Gemma4TextConfig, global_head_dim=512, num_global_key_value_heads=1)
    published |= dict(attention_k_eq_v=True, head_dim=256)
    ours, theirs = read_model_config(published), Gemma4TextConfig.from_dict(published)
    written = theirs.to_dict() | dict(architectures=published["architectures"])
    again = read_model_config(written)
    for kind in BOTH:
        assert ours.head_dim_of(kind) == again.head_dim_of(kind)
        assert ours.kv_heads_of(kind) == again.kv_heads_of(kind)
    assert (ours.head_dim_of(BOTH[0]), ours.kv_heads_of(BOTH[0])) == (512, 1)


@pytest.mark.parametrize("kind", ["mistral", "ministral3", None])
def test_the_text_model_of_a_mistral_that_sees_is_the_one_that_it_names(kind):
    text = SIZES | (dict(model_type=kind) if kind else {})
    values = dict(architectures=["Mistral3ForConditionalGeneration"], text_config=text)
    ours, theirs = read_model_config(values), Mistral3Config.from_dict(values)
    # transformers ties by what is said beside text_config.
    assert_same(replace(ours, tie_word_embeddings=False), theirs.text_config)
    assert ours.tie_word_embeddings and theirs.tie_word_embeddings
    assert not read_model_config(values | dict(tie_word_embeddings=False)).tie_word_embeddings
    with pytest.raises(ValueError, match="is 'mistral4': .* here with mistral or ministral3"):
        read_model_config(values | dict(text_config=text | dict(model_type="mistral4")))


@pytest.mark.parametrize("architecture", MODELS)
def test_a_missing_size_is_named_with_the_class_that_needs_it(architecture):
    message = f"config.json has no (vocab|hidden)_size, which {architecture} needs: add it"
    with pytest.raises(ValueError, match=message):
        read_model_config(dict(architectures=[architecture]))


@pytest.mark.parametrize(
    "value, message",
    [
        (dict(dtype=16), "dtype is 16: it must be a name"),
        (dict(torch_dtype={"x": 1}), "torch_dtype is {'x': 1}: it must be a name"),
        (dict(rope_parameters=[1]), "rope_parameters is .1.: it must be an object"),
        (dict(layer_types="full_attention"), "layer_types is 'full_att.*: it must be a list of"),
        (dict(tie_word_embeddings=None), "tie_word_embeddings is None: it must be true or false"),
        (dict(num_hidden_layers=True), "num_hidden_layers is True: it must be an integer"),
    ],
    ids=str,
)
def test_a_field_of_another_type_is_refused_under_the_name_that_the_file_gives_it(value, message):
    llama = dict(SIZES, architectures=["LlamaForCausalLM"])
    assert read_model_config(llama).num_hidden_layers == 12
    with pytest.raises(ValueError, match=f"^config.json: {message}"):
        read_model_config(llama | value)


def test_reading_a_configuration_does_not_import_transformers():
    code = (
        "import sys; from nanovllm.models import read_model_config\n"
        f"for values in {[values_of(kind) for kind in FAMILIES]!r}: read_model_config(values)\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("kind", sorted({one.config_class for one in MODELS.values()}, key=str))
def test_a_configuration_has_one_base_whose_defaults_no_other_base_replaces(kind):
    """Of two bases, dataclasses take the fields that the first one inherits, defaults and all."""
    bases = [base for base in kind.__mro__ if is_dataclass(base)]
    assert all(set(one.__bases__) == {after} for one, after in zip(bases, bases[1:]))
