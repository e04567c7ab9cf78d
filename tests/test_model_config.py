"""A ModelConfig reads of a config.json what transformers reads of it, and needs no transformers."""

import subprocess
import sys
from dataclasses import MISSING, fields, replace

import pytest
import torch
from test_models import FAMILIES, SMALL
from transformers import Gemma3Config, Mistral3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.layers.rope_scaling import rope_frequencies
from nanovllm.models import MODELS, read_model_config
from nanovllm.models.gemma3 import Gemma3Config as OurGemma3Config

SIZES = dict(SMALL, num_hidden_layers=12, num_key_value_heads=2, pad_token_id=0)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
# Fields that transformers holds in another form, which assert_same compares.
UNLIKE = ("rope_parameters", "no_rope_layers", "per_layer_config")
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
