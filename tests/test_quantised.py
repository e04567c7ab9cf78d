"""Quantised checkpoints compute what transformers computes with the weights that they stand for."""

import shutil
from functools import partial

import pytest
import torch
from model_helpers import Driver, expected_logits, make_checkpoint
from model_helpers import load as load_plain
from quantised_helpers import (
    HEAD,
    PROJECTIONS,
    awq,
    change_config,
    compressed,
    fp8_blocks,
    fp8_tensor,
    gptq,
    make_pair,
    on_ranks,
    pack_checkpoint,
    reference_of,
    rewrite,
    tensors_of,
)
from transformers import (
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Gemma4TextConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nanovllm import LLM, SamplingParams
from nanovllm.backends.quantised import packed
from nanovllm.backends.quantised.config import read_quantization
from nanovllm.backends.quantised.layers import Quantised, use_quantised_layers
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models import build_model, load_model_config
from nanovllm.weights.loader import init_dummy_weights, load_weights

SIZES = dict(
    vocab_size=83,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
DENSE = Qwen3Config(**SIZES)
EXPERTS = Qwen3MoeConfig(
    **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
)
PHI = Phi3Config(
    **{name: size for name, size in SIZES.items() if name != "head_dim"},
    original_max_position_embeddings=64,
    pad_token_id=0,
)
GEMMA4 = Gemma4TextConfig(
    **SIZES | dict(intermediate_size=64),
    global_head_dim=16,
    sliding_window=6,
    pad_token_id=0,
    hidden_size_per_layer_input=0,
    enable_moe_block=True,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=64,
)
GEMMA4_OWN_INPUTS = Gemma4TextConfig(
    **SIZES,
    global_head_dim=16,
    sliding_window=6,
    pad_token_id=0,
    hidden_size_per_layer_input=32,
    vocab_size_per_layer_input=83,
)
TOKENS = torch.randint(83, (20,), generator=torch.Generator().manual_seed(1)).tolist()

INT4 = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
FLOAT8 = dict(num_bits=8, type="float", symmetric=True)
TOKEN = FLOAT8 | dict(strategy="token", dynamic=True)
BLOCK = FLOAT8 | dict(strategy="block", block_structure=[16, 32])
NVFP4 = dict(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
NVFP4 |= dict(scale_dtype="torch.float8_e4m3fn")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

# The packer, the quantization_config, and how inputs are quantised, of each format.
FORMATS = {
    "gptq": (gptq(4, 32), GPTQ | {"checkpoint_format": "gptq"}, None),
    "gptq-rows": (gptq(4, -1), GPTQ | {"group_size": -1}, None),
    "gptq-8-bits": (gptq(8, 64), GPTQ | {"bits": 8, "group_size": 64}, None),
    "gptq-v2": (gptq(4, 32, less_one=False), GPTQ | {"checkpoint_format": "gptq_v2"}, None),
    "gptq-desc-act": (gptq(4, 32, ordered=True), GPTQ | {"desc_act": True}, None),
    "awq": (awq(32), AWQ, None),
    "int4": (*compressed("pack-quantized", INT4), None),
    "int4-zeros": (*compressed("pack-quantized", INT4 | {"symmetric": False}), None),
    "int8-rows": (
        *compressed(
            "pack-quantized",
            dict(num_bits=8, type="int", symmetric=True, strategy="channel"),
        ),
        None,
    ),
    "nvfp4": (*compressed("nvfp4-pack-quantized", NVFP4), None),
    "fp8-weights": (*compressed("float-quantized", FLOAT8 | {"strategy": "channel"}), None),
    "fp8-channels": (
        *compressed("float-quantized", FLOAT8 | {"strategy": "channel"}, TOKEN),
        "token",
    ),
    "fp8-tensors": (
        *compressed("float-quantized", FLOAT8 | {"strategy": "tensor"}, TOKEN),
        "token",
    ),
    "fp8-static": (
        *compressed(
            "float-quantized",
            FLOAT8 | {"strategy": "tensor"},
            FLOAT8 | {"strategy": "tensor", "dynamic": False},
            static_input=0.02,
        ),
        "tensor",
    ),
    "fp8-compressed-blocks": (
        *compressed(
            "float-quantized",
            BLOCK,
            FLOAT8 | {"strategy": "group", "group_size": 32, "dynamic": True},
        ),
        "group",
    ),
    "fp8-blocks": (fp8_blocks(16, 32), FP8 | {"weight_block_size": [16, 32]}, "group"),
    "fp8-bfloat16-scales": (
        fp8_blocks(24, 32, torch.bfloat16),
        FP8 | {"weight_block_size": [24, 32]},
        "group",
    ),
    "ministral": (
        fp8_tensor,
        FP8 | {"activation_scheme": "static", "weight_block_size": None},
        "tensor",
    ),
}
WEIGHTS_ALONE = [name for name, (_, _, inputs) in FORMATS.items() if inputs is None]


def build(folder, group=ParallelGroup(), wanted=None, reads_plain=False):
    config = load_model_config(folder)
    quantization = read_quantization(config.quantization_config, wanted)
    assert quantization is not None
    exchange = partial(use_quantised_layers, quantization=quantization, reads_plain=reads_plain)
    return build_model(config, group, exchange_layers=exchange)


def load(folder, group=ParallelGroup(), wanted=None):
    model = build(folder, group, wanted)
    load_weights(model, folder)
    return model


def logits_of(model):
    """Of a prompt in two chunks, and of tokens that follow."""
    driver = Driver(model, 1, 32)
    parts = [driver.step({}, {0: TOKENS[:9]}), driver.step({}, {0: TOKENS[9:15]})]
    return torch.cat(parts + [driver.step({0: token}, {}) for token in TOKENS[15:]])


def assert_close(logits, want, inputs):
    """Assert that logits are equal, but for inputs that lie between two numbers of FP8.

    A sum of another order may round such an input to the other number. Tokens before it are equal.
    """
    if inputs is not None:
        torch.testing.assert_close(logits, want, rtol=0, atol=0.5)
        logits, want = logits[:3], want[:3]
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def rounded_inputs(x, how, packed, name, columns=32):
    """Round the inputs of a module to FP8 as a format says it."""

    def round_to(x, scale):
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale

    if how == "tensor":
        scale = packed.get(f"{name}.input_scale", packed.get(f"{name}.activation_scale"))
        return round_to(x, scale)
    width = x.shape[-1] if how == "token" else columns
    parts = [round_to(part, part.abs().amax(-1, True) / 448) for part in x.split(width, -1)]
    return torch.cat(parts, dim=-1)


def quantise_inputs(reference, how, packed):
    """Let the linear layers of a reference round their inputs to FP8."""
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            module.register_forward_pre_hook(
                lambda _, args, name=name: (rounded_inputs(args[0], how, packed, name),)
            )


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_transformers_with_the_weights_that_a_checkpoint_stands_for(
    name, tmp_path
):
    pack, config, inputs = FORMATS[name]
    plain, packed = make_pair(tmp_path, DENSE, pack, config)
    reference = reference_of(plain)
    if inputs:
        quantise_inputs(reference, inputs, tensors_of(packed))
    want = expected_logits(reference, TOKENS)
    logits = logits_of(load(packed))
    assert_close(logits, want, inputs)


@pytest.mark.parametrize(
    "name, size", [(name, 2) for name in FORMATS] + [("awq", 4), ("fp8-channels", 4)]
)
def test_logits_do_not_depend_on_the_number_of_ranks(name, size, tmp_path):
    pack, config, inputs = FORMATS[name]
    # 48 columns of 96 end within a group, and blocks of 24 rows within a share.
    width = 128 if inputs == "group" or name == "gptq-8-bits" else 96
    sizes = SIZES | dict(hidden_size=128, head_dim=32, intermediate_size=width)
    _, packed = make_pair(tmp_path, Qwen3Config(**sizes), pack, config)
    want = logits_of(load(packed))
    parts = on_ranks(size, lambda group: logits_of(load(packed, group)))
    assert_close(torch.cat(parts, dim=1), want, inputs)


@pytest.mark.parametrize("name", ["gptq", "gptq-desc-act", "awq", "int4-zeros", "nvfp4"])
def test_experts_compute_what_transformers_does(name, tmp_path):
    pack, config, _ = FORMATS[name]
    if "ignore" in config:
        config = config | {"ignore": ["lm_head", "re:.*mlp.gate$"]}
    plain, packed = make_pair(tmp_path, EXPERTS, pack, config)
    want = expected_logits(reference_of(plain), TOKENS)
    torch.testing.assert_close(logits_of(load(packed)), want, rtol=1e-4, atol=1e-4)
    parts = on_ranks(2, lambda group: logits_of(load(packed, group)))
    torch.testing.assert_close(torch.cat(parts, dim=1), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8-channels", "fp8-static", "fp8-blocks"])
def test_experts_with_quantised_inputs_do_not_depend_on_the_number_of_ranks(name, tmp_path):
    """Each expert's part is what its own linear layers compute."""
    pack, config, inputs = FORMATS[name]
    if "ignore" in config:
        config = config | {"ignore": ["lm_head", "re:.*mlp.gate$"]}
    _, packed = make_pair(tmp_path, EXPERTS, pack, config | {"modules_to_not_convert": []})
    model = load(packed)
    want = logits_of(model)
    parts = on_ranks(2, lambda group: logits_of(load(packed, group)))
    assert_close(torch.cat(parts, dim=1), want, inputs)
    experts, x = model.model.layers[1].mlp.experts, torch.randn(7, 64)
    files = tensors_of(packed)

    def project(x, kind):
        name = f"model.layers.1.mlp.experts.3.{kind}"
        scale = files.get(f"{name}.weight_scale", files.get(f"{name}.weight_scale_inv"))
        if inputs == "group":
            scale = scale.repeat_interleave(16, 0).repeat_interleave(32, 1)
        weight = files[f"{name}.weight"].double() * scale.double()
        return rounded_inputs(x, inputs, files, name) @ weight.T

    gate, up = (project(x.double(), f"{kind}_proj") for kind in ("gate", "up"))
    want = project(torch.nn.functional.silu(gate) * up, "down_proj")
    error = experts.run(3, x).double() - want
    assert error.abs().max() < 0.02 * want.abs().max() and error.median().abs() < 1e-4


def single_experts(folder):
    """Replace tensors that hold all experts of a layer by one for each expert and projection."""
    tensors = {}
    for name, tensor in tensors_of(folder).items():
        path, _, kind = name.rpartition(".")
        if not path.endswith(".experts"):
            tensors[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for i, one in enumerate(tensor):
            parts = zip(names, one.chunk(len(names)))
            tensors |= {f"{path}.{i}.{part}.weight": values for part, values in parts}
    rewrite(folder, tensors)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "awq"])
def test_experts_of_gemma_4_are_quantised_as_those_of_other_families(name, tmp_path):
    """Its checkpoints hold all experts of a layer in two tensors, or each by itself if packed."""
    plain, singles, packed = (tmp_path / part for part in ("plain", "singles", "packed"))
    make_checkpoint(plain, GEMMA4)
    assert any(key.endswith(".experts.gate_up_proj") for key in tensors_of(plain))
    shutil.copytree(plain, singles)
    single_experts(singles)
    if name in ("fp8", "int8"):
        logits, want = (logits_of(load(folder, wanted=name)) for folder in (plain, singles))
        parts = on_ranks(2, lambda group: logits_of(load(plain, group, wanted=name)))
    else:
        pack, config, _ = FORMATS[name]
        pack_checkpoint(singles, packed, pack, config)
        logits, want = logits_of(load(packed)), logits_of(load_plain(singles))
        parts = on_ranks(2, lambda group: logits_of(load(packed, group)))
    assert_close(logits, want, None)
    assert_close(torch.cat(parts, dim=1), want, "token" if name == "fp8" else None)


@pytest.mark.parametrize("name", ["int4", "fp8-channels", "nvfp4"])
def test_projections_of_gemma_4s_own_inputs_of_layers_are_read_packed(name, tmp_path):
    """Checkpoints whose linear layers are all quantised quantise these projections, too."""
    pack, config, inputs = FORMATS[name]
    modules = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")
    plain, packed = make_pair(
        tmp_path, GEMMA4_OWN_INPUTS, pack, config, modules=(*PROJECTIONS, *modules)
    )
    reference = reference_of(plain)
    if inputs:
        quantise_inputs(reference, inputs, tensors_of(packed))
        own = reference.model.per_layer_model_projection
        own.register_forward_pre_hook(lambda _, args: (rounded_inputs(args[0], inputs, {}, ""),))
    want = expected_logits(reference, TOKENS)
    model = load(packed)
    assert_close(logits_of(model), want, inputs)
    assert isinstance(model.model.layers[1].per_layer_projection, Quantised)
    parts = on_ranks(2, lambda group: logits_of(load(packed, group)))
    assert_close(torch.cat(parts, dim=1), want, inputs)


TOKENS_OF = dict(temperature=0, max_tokens=12, ignore_eos=True)


def greedy(folder, **options):
    options = dict(device="cpu", num_kvcache_blocks=8, max_model_len=64) | options
    with LLM(str(folder), **options) as llm:
        (output,) = llm.generate([TOKENS], SamplingParams(**TOKENS_OF), use_tqdm=False)
    return output["token_ids"]


def greedy_of(reference):
    ids = torch.tensor([TOKENS])
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    return reference.generate(ids, **options)[0, len(TOKENS) :].tolist()


@pytest.mark.parametrize("name", WEIGHTS_ALONE)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    pack, config, _ = FORMATS[name]
    plain, packed = make_pair(tmp_path, DENSE, pack, config)
    assert greedy(packed) == greedy_of(reference_of(plain))


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("fp8-channels", "weight"),
        ("fp8-channels", "weight_scale"),
        ("ministral", "activation_scale"),
        ("nvfp4", "weight_scale"),
        ("nvfp4", "weight_global_scale"),
        ("awq", "scales"),
    ],
)
def test_a_part_of_a_quantised_weight_that_is_no_number_is_named(name, tensor, tmp_path):
    pack, config, _ = FORMATS[name]
    _, folder = make_pair(tmp_path, DENSE, pack, config)
    tensors = tensors_of(folder)
    part = f"model.layers.1.self_attn.q_proj.{tensor}"
    tensors[part] = torch.full_like(tensors[part].float(), torch.nan).to(tensors[part].dtype)
    rewrite(folder, tensors)
    with pytest.raises(ValueError, match=f"{part} has NaN or infinite numbers: download the model"):
        load(folder)


@pytest.mark.parametrize("name", ["ministral", "gptq-desc-act", "nvfp4"])
def test_rows_may_be_dequantised_in_any_parts(name, tmp_path, monkeypatch):
    pack, config, _ = FORMATS[name]
    _, folder = make_pair(tmp_path, DENSE, pack, config)
    model = load(folder)
    want = logits_of(model)
    monkeypatch.setattr(packed, "CHUNK", 64 * 24)
    weight = model.model.layers[0].self_attn.qkv_proj.packed["weight"]
    assert [rows.stop - rows.start for _, rows in weight.chunks] == [24, 24, 16, 24, 8, 24, 8]
    assert_close(logits_of(model), want, "")


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-channels", "int4", "nvfp4"])
def test_transformers_reads_the_same_weights_from_the_same_files(name, tmp_path):
    """The packers are right: transformers computes with what it dequantises itself."""
    pack, config, inputs = FORMATS[name]
    plain, packed = make_pair(tmp_path, DENSE, pack, config)
    kind = CompressedTensorsConfig
    if name == "fp8-blocks":
        kind, config = FineGrainedFP8Config, config | {"weight_block_size": (16, 32)}
    options = {key: value for key, value in config.items() if key != "quant_method"}
    theirs = reference_of(packed, quantization_config=kind(**options, dequantize=True))
    ours = reference_of(plain).state_dict()
    for path, tensor in theirs.state_dict().items():
        # They round what NVFP4 stands for to bfloat16.
        close = dict(rtol=5e-3, atol=0) if name == "nvfp4" else dict(rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(tensor, ours[path], **close)


def fp8_rows(weight, name):
    """What quantization="fp8" makes: a scale a row."""
    tensors, plain = fp8_blocks(1, weight.shape[1])(weight, name)
    return tensors, plain


@pytest.mark.parametrize("config", [DENSE, PHI], ids=["qwen3", "phi3"])
def test_a_plain_checkpoint_is_quantised_to_fp8_by_rows_while_it_is_loaded(config, tmp_path):
    make_checkpoint(tmp_path / "plain", config)
    shutil.copytree(tmp_path / "plain", tmp_path / "copy")
    pack_checkpoint(tmp_path / "copy", tmp_path / "packed", fp8_rows, {})
    reference = reference_of(tmp_path / "copy")
    quantise_inputs(reference, "token", {})
    want = expected_logits(reference, TOKENS)
    model = load(tmp_path / "plain", wanted="fp8")
    assert_close(logits_of(model), want, "token")
    held = sum(p.nbytes for name, p in model.named_parameters() if "packed" in name)
    assert held < 1.2 * sum(p.numel() for name, p in model.named_parameters() if "codes" in name)


@pytest.mark.parametrize("name", ["int4-zeros", "gptq-desc-act", "fp8-bfloat16-scales"])
def test_stacked_projections_are_read_packed(name, tmp_path):
    """Phi-3 has q, k and v in one tensor, and gate and up in another."""
    pack, config, inputs = FORMATS[name]
    plain, packed = make_pair(tmp_path, PHI, pack, config)
    reference = reference_of(plain)
    if inputs:
        quantise_inputs(reference, inputs, {})
    want = expected_logits(reference, TOKENS)
    assert_close(logits_of(load(packed)), want, inputs)
    parts = on_ranks(2, lambda group: logits_of(load(packed, group)))
    assert_close(torch.cat(parts, dim=1), want, inputs)


def mixture():
    """Return a packer and the configuration of FP8 in one projection, and INT4 in all others."""
    pack_int4, config = FORMATS["int4"][:2]
    pack_fp8, of_fp8 = FORMATS["fp8-weights"][:2]
    group = of_fp8["config_groups"]["group_0"] | dict(targets=["re:.*down_proj"])
    formats = config["config_groups"] | {"fp8": group | dict(format="float-quantized")}

    def pack(weight, name):
        return (pack_fp8 if "down_proj" in name else pack_int4)(weight, name)

    return pack, config | dict(config_groups=formats, ignore=[])


@pytest.mark.parametrize("name", ["config_groups", "gptq"])
def test_a_head_that_the_config_names_and_a_mixture_of_formats_are_read_packed(name, tmp_path):
    pack, config = mixture() if name == "config_groups" else (gptq(4, 32), GPTQ | {"lm_head": True})
    model_config = Qwen3Config(**SIZES | dict(vocab_size=88))  # two ranks cut a word of zeros
    plain, packed = make_pair(tmp_path, model_config, pack, config, modules=(*PROJECTIONS, *HEAD))
    want = expected_logits(reference_of(plain), TOKENS)
    model = load(packed)
    assert_close(logits_of(model), want, None)
    parts = on_ranks(2, lambda group: logits_of(load(packed, group)))
    assert_close(torch.cat(parts, dim=1), want, None)
    assert greedy(packed) == greedy_of(reference_of(plain))
    layer = model.model.layers[0].mlp
    held = [module.packed["weight"].scheme for module in (model.lm_head, layer.down_proj)]
    assert (held[0] == held[1]) == (name == "gptq")


@pytest.mark.parametrize("name", [*FORMATS, "made-here"])
def test_dummy_weights_of_a_format_do_not_depend_on_the_number_of_ranks(name, tmp_path):
    make_checkpoint(tmp_path, DENSE)
    wanted, inputs = "fp8", "token"
    if name != "made-here":
        _, config, inputs = FORMATS[name]
        change_config(tmp_path, quantization_config=config)
        wanted = None

    def logits(group=ParallelGroup()):
        model = build(tmp_path, group, wanted, reads_plain=True)
        init_dummy_weights(model)
        return logits_of(model)

    whole = logits()
    assert whole.isfinite().all() and whole.std() > 0
    assert_close(torch.cat(on_ranks(2, logits), dim=1), whole, inputs)


@pytest.mark.parametrize("name", FORMATS)
def test_quantising_a_weight_makes_the_nearest_numbers_of_its_format(name, tmp_path):
    """The error is at most half of the widest gap between numbers of the format."""
    make_checkpoint(tmp_path, DENSE)
    change_config(tmp_path, quantization_config=FORMATS[name][1])
    model = build(tmp_path, reads_plain=True)
    load_weights(model, tmp_path)
    weight = model.model.layers[0].mlp.down_proj.packed["weight"]
    want = tensors_of(tmp_path)["model.layers.0.mlp.down_proj.weight"]
    found = torch.cat([weight.dequantise(rows, number, None) for number, rows in weight.chunks])
    gap = {"int8": 1 / 127, "gptq-8-bits": 1 / 127, "fp8": 1 / 14}
    gap = next((gap[key] for key in gap if name.startswith(key)), 0)
    gap = gap or {"ministral": 1 / 14, "nvfp4": 1 / 2.5}.get(name, 1 / 7)
    largest = weight.grouped(want).abs().amax(-1, keepdim=True)
    error = (weight.grouped(found) - weight.grouped(want)).abs()
    assert (error <= largest * gap * 0.55).all() and error.max() > 0


@pytest.mark.parametrize("name", [None, "gptq", "fp8-static"])
def test_new_plain_weights_are_quantised_anew(name, tmp_path):
    old, new = tmp_path / "plain", tmp_path / "new"
    make_checkpoint(new, DENSE, seed=7)
    rewrite(new, {name: tensor.bfloat16() for name, tensor in tensors_of(new).items()})
    options = dict(quantization="fp8")
    folder = old
    if name is None:
        make_checkpoint(old, DENSE)
        want = logits_of(load(new, wanted="fp8"))
    else:
        pack, config, _ = FORMATS[name]
        _, folder = make_pair(tmp_path, DENSE, pack, config)
        change_config(new, quantization_config=config)
        model, options = build(new, reads_plain=True), {}
        load_weights(model, new)
        for layer in model.modules():
            for kept in getattr(layer, "kept", ()):  # the checkpoint's scales of inputs stay
                layer.get_parameter(kept).fill_(torch.tensor(0.02))
        want = logits_of(model)
    options |= dict(device="cpu", num_kvcache_blocks=8, max_model_len=64, kernels="plain")
    with LLM(str(folder), **options) as llm:
        if name == "gptq":
            with pytest.raises(
                ValueError, match=r"weights has .*\.(qweight|qzeros|g_idx), .* plain"
            ):
                llm.update_weights(tensors_of(folder).items())
        llm.update_weights(tensors_of(new).items())
        assert_close(logits_of(llm.engine.runner.model), want, "")
        llm.sleep(1)
        llm.wake_up()
        if name == "fp8-static":
            llm.sleep(2)
            with pytest.raises(ValueError, match="sleep has dropped these: call wake_up first"):
                llm.update_weights(tensors_of(new).items())
            llm.wake_up()
            assert_close(logits_of(llm.engine.runner.model), logits_of(load(folder)), "")
