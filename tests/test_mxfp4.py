"""Weights in MXFP4 are loaded as what they stand for; other quantised checkpoints are refused."""

import json
import shutil
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from model_helpers import Driver, expected_logits, load, make_checkpoint, mended
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanovllm import LLM, SamplingParams
from nanovllm.backends.quantised.config import read_quantization
from nanovllm.backends.quantised.layers import use_quantised_layers
from nanovllm.build import quantization_of
from nanovllm.config import Config
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models import build_model, load_model_config, read_model_config
from nanovllm.weights.loader import init_dummy_weights, load_weights
from nanovllm.weights.mxfp4 import dequantize

CONFIG = GptOssConfig(
    vocab_size=67,
    hidden_size=64,
    intermediate_size=96,  # three blocks, of which two ranks have one and a half each
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    num_local_experts=3,
    num_experts_per_tok=2,
    sliding_window=5,
)
QUANTIZED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
PROJECTIONS = ("gate_up_proj", "down_proj")


def random_blocks(experts, rows, columns, generator):
    """Of every element, with the scales of weights."""
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator)
    scales = torch.randint(119, 125, (experts, rows, columns // 32), generator=generator)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


def set_quantization(folder, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": value}))


def tensors_of(folder):
    files = folder.glob("*.safetensors")
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def rewrite(folder, tensors):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")


def make_twins(packed, plain, config, layers):
    """Make a checkpoint whose experts are in MXFP4 in so many layers, and its dequantised twin."""
    make_checkpoint(plain, config)
    shutil.copytree(plain, packed, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    of_plain = {name: x.bfloat16() for name, x in tensors_of(plain).items()}
    of_packed = dict(of_plain)
    for layer, name in product(range(layers), PROJECTIONS):
        name = f"model.layers.{layer}.mlp.experts.{name}"
        experts, columns, rows = of_packed.pop(name).shape
        blocks, scales = random_blocks(experts, rows, columns, generator)
        of_packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        of_plain[name] = convert_moe_packed_tensors(blocks, scales)
    rewrite(packed, of_packed)
    rewrite(plain, of_plain)
    set_quantization(packed, QUANTIZED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint whose first layer's experts are in MXFP4, and its dequantised twin."""
    packed, plain = (tmp_path_factory.mktemp(name) for name in ("packed", "plain"))
    make_twins(packed, plain, CONFIG, 1)
    return packed, plain


@pytest.fixture
def packed(folders, tmp_path):
    return shutil.copytree(folders[0], tmp_path / "packed")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_checkpoint_in_mxfp4_has_the_weights_of_its_dequantised_twin_on_any_rank(folders, size):
    for rank in range(size):
        packed, plain = (load(folder, rank, size).state_dict() for folder in folders)
        assert packed.keys() == plain.keys()
        assert all(torch.equal(packed[name], plain[name]) for name in plain)


def filled_with_noise(folder, rank, size):
    # Of one expert, so that a slice is a whole tensor, transposed.
    config = replace(load_model_config(folder), num_experts=1, num_experts_per_tok=1)
    model = build_model(config, ParallelGroup(rank, size))
    init_dummy_weights(model)
    return model


@pytest.mark.parametrize("fill", [load, filled_with_noise])
def test_the_ranks_experts_and_sinks_are_those_of_one_rank(folders, fill):
    _, plain = folders
    whole, *parts = (
        fill(plain, rank, size).state_dict() for rank, size in [(0, 1), (0, 2), (1, 2)]
    )
    names = [name for name in whole if ".experts." in name or name.endswith(".sinks")]
    assert len(names) == 10
    for name in names:
        shards = [part[name] for part in parts]
        if "gate_up" in name:
            halves = [shard.chunk(2, dim=1) for shard in shards]
            joined = torch.cat([half[i] for i in (0, 1) for half in halves], dim=1)
        elif name.endswith("down_bias"):
            joined = shards[0]  # of which the first rank's alone is added
        else:
            joined = torch.cat(shards, dim=-1)
        assert torch.equal(joined, whole[name])


def test_logits_of_a_checkpoint_in_mxfp4_equal_transformers(folders):
    packed, _ = folders
    set_quantization(packed, QUANTIZED | {"modules_to_not_convert": ["model.layers.1"]})
    how = Mxfp4Config(dequantize=True, modules_to_not_convert=["model.layers.1"])
    options = dict(quantization_config=how, experts_implementation="eager", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(packed, **options).eval()
    reference = mended(reference.float())  # release 5.17 dequantises to bfloat16
    tokens = list(range(20, 40))
    logits = Driver(load(packed), 1, 32).step({}, {0: tokens})
    torch.testing.assert_close(logits, expected_logits(reference, tokens), rtol=1e-4, atol=1e-3)


def test_every_number_of_mxfp4_is_what_its_bits_say():
    """By the formulas of the specification: E2M1 with a bias of 1, E8M0 with one of 127."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16).repeat(1, 255, 1)
    scales = torch.arange(255, dtype=torch.uint8).repeat(16, 1)
    values = dequantize(blocks, scales).view(16, 255, 32)
    assert values.dtype == torch.bfloat16

    def number(bits):
        sign, exponent, mantissa = (-1) ** (bits >> 3), bits >> 1 & 3, bits & 1
        size = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
        return sign * size

    for scale in (0, 1, 100, 127, 130, 251):
        numbers = [number(bits) for byte in range(256) for bits in (byte % 16, byte // 16)]
        want = torch.tensor(numbers, dtype=torch.float64) * 2.0 ** (scale - 127)
        assert torch.equal(values[:, scale].flatten().double(), want)
    assert torch.equal(values.flatten(1).double(), theirs(blocks, scales).double())
    assert dequantize(blocks[:, :1], torch.full((16, 1), 255, dtype=torch.uint8)).isnan().all()


def theirs(blocks, scales):
    return convert_moe_packed_tensors(blocks[None], scales[None])[0].T


def test_other_families_are_refused_by_name(packed):
    values = json.loads((packed / "config.json").read_text())
    message = "quant_method 'mxfp4', which MistralForCausalLM does not do"
    with pytest.raises(ValueError, match=message):
        read_model_config(values | {"architectures": ["MistralForCausalLM"]})


def packed_model(folder, group=ParallelGroup()):
    """Load a checkpoint whose experts stay packed."""
    config = load_model_config(folder)
    quantization = read_quantization(config.quantization_config, "mxfp4")
    exchange = partial(use_quantised_layers, quantization=quantization)
    model = build_model(config, group, exchange_layers=exchange)
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_that_stay_packed_have_the_weights_of_the_dequantised_twin(folders, size):
    packed, plain = folders
    set_quantization(packed, QUANTIZED | {"modules_to_not_convert": ["model.layers.1"]})
    for rank in range(size):
        model, twin = packed_model(packed, ParallelGroup(rank, size)), load(plain, rank, size)
        held, want = (one.model.layers[0].mlp.experts for one in (model, twin))
        for name in PROJECTIONS:
            weight = held.packed[name]
            assert weight.codes.dtype == torch.uint8
            for expert in range(3):
                parts = [weight.dequantise(rows, n, expert) for n, rows in weight.chunks]
                assert torch.equal(torch.cat(parts), getattr(want, name)[expert])


def test_logits_of_packed_experts_are_those_of_the_dequantised_twin(folders):
    packed, plain = folders
    set_quantization(packed, QUANTIZED | {"modules_to_not_convert": ["model.layers.1"]})
    tokens = list(range(20, 40))
    models = packed_model(packed), load(plain)
    logits = [Driver(model, 1, 32).step({}, {0: tokens}) for model in models]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "device, kernels, stays_packed",
    [("cuda", "auto", True), ("auto", "auto", True), ("cuda", "plain", False)]
    + [("cpu", "auto", False)],
)
def test_experts_stay_packed_by_default_where_kernels_take_them(
    folders, device, kernels, stays_packed, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    set_quantization(folders[0], QUANTIZED)
    config = Config(str(folders[0]), device=device, kernels=kernels)
    formats = quantization_of(config, load_model_config(folders[0]))
    assert (formats is not None and formats.description == "MXFP4 weights") is stays_packed


@pytest.mark.parametrize("value", ["mxfp4", "", ["mxfp4"], 0])
def test_a_quantization_that_is_no_object_is_named(packed, value):
    set_quantization(packed, value)
    with pytest.raises(ValueError, match="quantization_config is .*: it must be an object"):
        load_model_config(packed)


def test_experts_that_lie_both_in_mxfp4_and_as_they_are_are_refused(packed):
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(packed, tensors_of(packed) | {name: torch.zeros(3, 96, 64)})
    with pytest.raises(ValueError, match=rf"has {name} in MXFP4, .* as it is: remove the wrong"):
        load(packed)


def test_blocks_of_what_is_no_expert_are_left_over(packed):
    tensors = tensors_of(packed)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        del tensors[name]
        tensors[f"{name}_blocks"] = torch.zeros(1, 67, 2, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(1, 67, 2, dtype=torch.uint8)
    rewrite(packed, tensors)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="no file has model.embed_tokens.weight"):
        load(packed)


def test_blocks_without_scales_are_named(packed):
    tensors = tensors_of(packed)
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    rewrite(packed, tensors)
    message = r"no file has model.layers.0.mlp.experts.down_proj_scales, with which"
    with pytest.raises(ValueError, match=message):
        load(packed)


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_blocks_or_scales_of_another_dtype_are_named(part, packed):
    tensors = tensors_of(packed)
    name = f"model.layers.0.mlp.experts.down_proj_{part}"
    rewrite(packed, tensors | {name: tensors[name].float()})
    with pytest.raises(ValueError, match=f"{name} is F32, but in MXFP4 it is U8: download"):
        load(packed)


def test_scales_that_are_nan_are_refused(packed):
    tensors = tensors_of(packed)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_scales"][1, 7] = 255
    rewrite(packed, tensors)
    with pytest.raises(ValueError, match=f"{name} has NaN or infinite numbers"):
        load(packed)
    set_quantization(packed, QUANTIZED | {"modules_to_not_convert": ["model.layers.1"]})
    with pytest.raises(ValueError, match=f"{name}_scales has scales of 255, which are NaN: "):
        packed_model(packed)


def test_scales_of_another_shape_are_named(packed):
    tensors = tensors_of(packed)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    rewrite(packed, tensors | {name: tensors[name][:, :5]})
    with pytest.raises(ValueError, match=r"_proj_blocks has shape .*_proj_scales \[3, 5"):
        load(packed)


def test_blocks_of_another_shape_than_the_configuration_means_are_named(packed):
    tensors = tensors_of(packed)
    for name in list(tensors):
        if name.startswith("model.layers.0.mlp.experts.down_proj_") and "bias" not in name:
            tensors[name] = tensors[name][:, :, :2]
    rewrite(packed, tensors)
    with pytest.raises(ValueError, match=r"down_proj has shape \(3, 64, 64\), .* \(3, 96, 64\)"):
        load(packed)


def test_an_llm_of_a_checkpoint_in_mxfp4_gives_the_tokens_of_its_twin(folders):
    outputs = []
    for folder in folders:
        with LLM(folder, device="cpu", num_kvcache_blocks=8) as llm:
            params = SamplingParams(temperature=0, max_tokens=20)
            (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        outputs.append(output["token_ids"])
    assert outputs[0] == outputs[1] and len({*outputs[0]}) > 1
