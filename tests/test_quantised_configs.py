"""A quantization_config says which format each weight has, and what is not run is named."""

import re
from itertools import permutations

import pytest
import torch
from model_helpers import expected_logits, make_checkpoint
from quantised_helpers import (
    PROJECTIONS,
    change_config,
    make_pair,
    reference_of,
    rewrite,
    tensors_of,
)
from test_quantised import (
    AWQ,
    DENSE,
    EXPERTS,
    FLOAT8,
    FORMATS,
    FP8,
    GPTQ,
    INT4,
    NVFP4,
    SIZES,
    TOKEN,
    TOKENS,
    assert_close,
    load,
    logits_of,
)
from transformers import Qwen2Config, Qwen3MoeConfig

from nanovllm import LLM
from nanovllm.backends.quantised.config import Fp8, Integers, read_quantization

Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def groups(*pairs, **values):
    """A configuration of compressed-tensors with a group for each pair of targets and weights."""
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"} | values
    of_pairs = [dict(targets=targets, weights=weights) for targets, weights in pairs]
    return config | {"config_groups": {f"group_{i}": one for i, one in enumerate(of_pairs)}}


LINEAR = (["Linear"], INT4)
BY_ROWS = INT4 | dict(strategy="channel", group_size=None)


@pytest.mark.parametrize(
    "config, packed, plain",
    [
        (FP8 | {"modules_to_not_convert": ["model.layers.1"]}, ["model.layers.10.mlp"], [Q, DOWN]),
        (FP8 | {"modules_to_not_convert": ["layers.1.mlp"]}, [Q, "model.layers.1.mlpx.up"], [DOWN]),
        (FP8 | {"modules_to_not_convert": ["self_attn"]}, [DOWN], [Q]),
        (FP8 | {"modules_to_not_convert": ["model.layers.*.self_attn"]}, [DOWN], [Q]),
        (FP8 | {"modules_to_not_convert": None}, [Q, DOWN], []),
        (FP8 | {"ignored_layers": ["model.layers.1.self_attn"]}, [DOWN], [Q]),
        (FP8 | {"modules_to_not_convert": [r"model\.layers\.(0|1)"]}, ["model.layers.10.x"], [Q]),
        (GPTQ | {"modules_in_block_to_quantize": [["mlp.down_proj"]]}, [DOWN], [Q]),
        (AWQ | {"modules_to_not_convert": ["gate"]}, ["mlp.gate_proj"], ["mlp.gate", "gate.x"]),
        (GPTQ | {"dynamic": {r"-:.*\.self_attn\..*": {}}}, [DOWN], [Q]),
        (GPTQ | {"dynamic": {r"-:model\.layers\.1\.": {}}}, ["model.layers.0.x"], [Q, DOWN]),
        (groups(LINEAR, ignore=["re:.*self_attn.*"]), [DOWN], [Q]),
        (groups(LINEAR, ignore=[Q]), [DOWN, Q + "x"], [Q]),
        (groups((["re:.*down_proj$"], INT4)), [DOWN], [Q]),
        (
            FP8 | {"modules_to_not_convert": ["model.language_model.layers.1.mlp"]},
            ["language_model.model.layers.1.self_attn"],
            ["language_model.model.layers.1.mlp.up_proj"],
        ),
        (groups(LINEAR, ignore=["re:lm_head"]), [Q], ["lm_head", "language_model.lm_head"]),
        (groups((["re:^lm_head$"], INT4)), ["lm_head", "language_model.lm_head"], [Q]),
    ],
)
def test_names_prefixes_and_patterns_choose_modules(config, packed, plain):
    quantization = read_quantization(config, None)
    assert all(quantization.scheme_of(name) is not None for name in packed)
    assert all(quantization.scheme_of(name) is None for name in plain)


def test_plain_names_of_a_long_list_are_compared_at_once():
    """A name is looked up for each weight of each expert, of which a model may have 100,000."""
    names = [f"model.layers.{i}.mlp.gate" for i in range(500)] + [r"re:.*self_attn\.o_proj"]
    quantization = read_quantization(FP8 | {"modules_to_not_convert": names}, None)
    assert len(quantization.rules) == 3
    plain = ["model.layers.499.mlp.gate", "model.layers.7.self_attn.o_proj"]
    packed = ["model.layers.500.mlp.gate", "model.layers.7.mlp.gate_proj", Q]
    assert all(quantization.scheme_of(name) is None for name in plain)
    assert all(quantization.scheme_of(name) is not None for name in packed)


def test_modules_may_have_formats_of_their_own():
    dynamic = {r"+:.*down_proj": {"bits": 8, "group_size": -1}, r".*o_proj": {"desc_act": True}}
    gptq = read_quantization(GPTQ | {"dynamic": dynamic}, None)
    four = Integers("gptq", 4, 32, has_zeros=True, zeros_less_one=True)
    assert gptq.scheme_of(Q) == four
    assert gptq.scheme_of(DOWN) == Integers("gptq", 8, 0, has_zeros=True, zeros_less_one=True)
    assert gptq.scheme_of("model.layers.0.self_attn.o_proj").has_g_idx
    # A name counts before the class that all linear layers have.
    mixed = read_quantization(groups(LINEAR, (["re:.*down_proj"], BY_ROWS)), None)
    assert mixed.scheme_of(Q).group == 32 and mixed.scheme_of(DOWN).group == 0
    assert mixed.description == "INT4 weights (a scale a row), INT4 weights (groups of 32)"
    fp8 = groups((["re:.*down_proj"], FLOAT8 | {"strategy": "channel"}))
    fp8["config_groups"]["group_0"] |= dict(format="float-quantized", input_activations=TOKEN)
    fp8["config_groups"]["group_1"] = dict(targets=["Linear"], weights=INT4)
    fp8 = read_quantization(fp8, None)
    assert fp8.description.startswith(
        "FP8 weights (a scale a row) and inputs (a scale a token), INT4 weights ("
    )
    static = read_quantization(FORMATS["ministral"][1], None)
    assert static.description == "FP8 weights (a scale a tensor) and inputs (a static scale)"
    assert fp8.scheme_of(DOWN) == Fp8(1, 0, "token") and fp8.scheme_of(Q).bits == 4


def test_of_several_targets_the_one_that_the_makers_library_takes_counts():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.utils import match_targets

    of_targets = {
        "Linear": INT4 | dict(group_size=8),
        "re:.*proj": INT4 | dict(group_size=16),
        "re:.*mlp.*": INT4 | dict(group_size=24),
        DOWN: INT4 | dict(group_size=40),
    }
    for order in permutations(of_targets):
        pairs = [([target], of_targets[target]) for target in order]
        quantization = read_quantization(groups(*pairs), None)
        for name in (Q, DOWN, "model.layers.1.mlp.gate", "x"):
            target = match_targets(name, torch.nn.Linear(1, 1), order)[0]
            assert quantization.scheme_of(name).group == of_targets[target]["group_size"]
    # Of two groups with the same target, the last counts.
    pairs = [(["Linear"], INT4), (["Linear"], BY_ROWS)]
    assert read_quantization(groups(*pairs), None).scheme_of(Q).group == 0


def test_a_layer_left_plain_is_read_as_it_is(tmp_path):
    pack, config, _ = FORMATS["int4"]
    config = config | {"ignore": ["lm_head", "re:.*layers.0.self_attn.*", DOWN]}
    plain, packed = make_pair(
        tmp_path, DENSE, pack, config, left_plain=["layers.0.self_attn.", f"{DOWN}."]
    )
    model = load(packed)
    kinds = [type(layer).__name__ for layer in (model.model.layers[1].mlp.down_proj, model.lm_head)]
    assert kinds == ["RowParallelLinear", "ParallelLMHead"]
    of_checkpoint = tensors_of(plain)[f"{DOWN}.weight"]
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, of_checkpoint)


def test_static_fp8_of_autofp8_is_read_by_its_own_names(tmp_path):
    """The tensors are those of compressed-tensors."""
    pack, config, _ = FORMATS["fp8-static"]
    _, packed = make_pair(tmp_path, DENSE, pack, config)
    want = logits_of(load(packed))
    autofp8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    change_config(packed, quantization_config=autofp8)
    assert torch.equal(logits_of(load(packed)), want)


W8A8 = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
INT8_INPUTS = groups(LINEAR)
INT8_INPUTS["config_groups"]["group_0"]["input_activations"] = W8A8
MIXED_WITH_W8A8 = groups(LINEAR, (["re:.*down_proj"], W8A8 | {"strategy": "channel"}))
MIXED_WITH_W8A8["config_groups"]["group_1"] |= dict(format="int-quantized", input_activations=W8A8)
STATIC_IN_QUOTES = groups((["Linear"], FLOAT8 | {"strategy": "channel"}), format="float-quantized")
STATIC_IN_QUOTES["config_groups"]["group_0"]["input_activations"] = TOKEN | {"dynamic": "false"}
FP8_STATIC_BLOCKS = FP8 | {"activation_scheme": "static", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'"),
        ({}, "quantization is 'gptq', but the checkpoint is not quantised: use 'fp8' or"),
        ({"bits": 4}, "quant_method is None: this library runs fp8, compressed-tensors"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0': scales must be float32"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]: it must be two"),
        (FP8_STATIC_BLOCKS, "activation_scheme is 'static': blocks of weights need dynamic"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        (GPTQ | {"bits": 3}, "bits is 3: use 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"lm_head": 1}, "lm_head is 1: use true or false"),
        (AWQ | {"lm_head": True}, "lm_head is True: AWQ leaves the head as it is"),
        (GPTQ | {"group_size": 100}, "group_size is 100: it must be a multiple of 8"),
        (GPTQ | {"dynamic": {"-:(": {}}}, r"dynamic is '\(': it is no regular expression"),
        (FP8 | {"modules_to_not_convert": ["(a"]}, r"modules_to_not_convert is '\(a': it is no"),
        ({"quant_method": "awq"}, " bits is None: use 4"),
        ({"quant_method": "awq", "w_bit": 3}, " w_bit is 3: use 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv': only gemm"),
        (AWQ | {"bits": 8}, "bits is 8: use 4"),
        (groups(LINEAR, format="int-quantized"), "format is 'int-quantized': this library runs"),
        (groups(LINEAR, (["x"], {"num_bits": 2})), "num_bits is 2|type is None"),
        (MIXED_WITH_W8A8, "format is 'int-quantized': this library runs float-quantized"),
        (INT8_INPUTS, "input_activations is .*: inputs are not quantised with integer weights"),
        (STATIC_IN_QUOTES, "input_activations is .*'dynamic': 'false'.*: inputs may have dynamic"),
        (groups(LINEAR, format="nvfp4-pack-quantized"), " type is 'int': use float for NVFP4"),
        (
            groups((["Linear"], NVFP4 | {"num_bits": 8}), format="nvfp4-pack-quantized"),
            " num_bits is 8: use 4 for NVFP4",
        ),
        (groups(LINEAR, sparsity_config={"format": "sparse-24"}), "sparsity_config is"),
        (groups(LINEAR, ignore="lm_head"), "ignore is 'lm_head': it must be a list of names"),
        (groups(), "config_groups is {}"),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        read_quantization(config, None if config else "gptq")


def test_the_option_takes_the_checkpoints_own_format_and_no_other(tmp_path):
    _, packed = make_pair(tmp_path, DENSE, *FORMATS["awq"][:2])
    options = dict(device="cpu", num_kvcache_blocks=8, max_model_len=64)
    for name in ("awq", "awq_marlin"):
        LLM(str(packed), quantization=name, **options).close()
    for name in ("fp8", "int8", "gptq", "mxfp4"):
        message = f"quantization is '{name}', but the checkpoint is in awq: leave the option out"
        message += (
            "$" if name == "int8" else f", or give a checkpoint in {name}$"
        )  # none is in int8
        with pytest.raises(ValueError, match=message):
            LLM(str(packed), quantization=name, **options)
    with pytest.raises(ValueError, match="quantization is 'exl2': use None or one of 'fp8', "):
        LLM(str(packed), quantization="exl2", **options)


def test_the_ready_line_names_the_format_and_scales_for_a_kv_cache(tmp_path, caplog):
    pack, config, _ = FORMATS["int4"]
    _, packed = make_pair(tmp_path, DENSE, pack, config | {"kv_cache_scheme": {"num_bits": 8}})
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.ones(1) for i in (0, 1) for x in "kv"}
    rewrite(packed, tensors_of(packed) | scales)
    with caplog.at_level("INFO", "nanovllm"):
        LLM(str(packed), device="cpu", num_kvcache_blocks=8, max_model_len=64).close()
        options = dict(num_kvcache_blocks=8, max_model_len=64, kv_cache_dtype="fp8")
        LLM(str(packed), device="cpu", **options).close()
    assert "tokens in FP8 with the checkpoint's scales (" in caplog.messages[-1]
    line = next(x for x in caplog.messages if "ready in" in x)
    assert "INT4 weights (groups of 32), float32" in line
    assert "tokens (the checkpoint has scales for kv_cache_dtype='fp8') (" in line
    assert "0.1 M parameters" in line


def changed(name, change):
    return lambda tensors: tensors | {name: change(tensors[name])}


@pytest.mark.parametrize(
    "name, change, message",
    [
        (
            "gptq",
            changed(f"{DOWN}.qweight", lambda x: x.long()),
            f"{DOWN}.qweight is I64, but by config.json it is I32: check both files",
        ),
        (
            "gptq",
            changed(f"{DOWN}.scales", lambda x: x[:3]),
            rf"{DOWN}.scales has shape \(3, 64\), but by config.json it is \(4, 64\)",
        ),
        (
            "gptq",
            changed(f"{DOWN}.g_idx", lambda x: x.flip(0)),
            f"{DOWN}.g_idx says another order of groups than desc_act false means, which is "
            "neighbouring columns in groups of 32: check both files",
        ),
        (
            "gptq-desc-act",
            changed(f"{DOWN}.g_idx", lambda x: x + 1),
            f"{DOWN}.g_idx must hold numbers of groups, from 0 to 3: check its config.json",
        ),
        (
            "gptq",
            changed(f"{DOWN}.g_idx", lambda x: (0 * x).to(torch.float8_e4m3fn)),
            f"{DOWN}.g_idx says another order of groups",
        ),
        (
            "gptq",
            lambda tensors: tensors | {f"{DOWN}.bias": torch.ones(64).to(torch.float8_e4m3fn)},
            f"{DOWN}.bias is not zero, but by config.json the layer has no bias",
        ),
        (
            "int4",
            changed(f"{Q}.weight_shape", lambda x: x.flip(0) + 1),
            rf"{Q}.weight_shape is \[65, 65\], but by config.json it is \[64, 64\]",
        ),
        (
            "fp8-blocks",
            changed(f"{Q}.weight", lambda x: x.float()),
            f"{Q}.weight is F32, but by config.json it is F8_E4M3",
        ),
        (
            "fp8-blocks",
            changed(f"{Q}.weight_scale_inv", lambda x: x.to(torch.float8_e8m0fnu)),
            f"{Q}.weight_scale_inv is F8_E8M0, but by config.json it is F64 or F32 or",
        ),
        (
            "ministral",
            changed(f"{Q}.activation_scale", lambda x: x.repeat(2)),
            rf"{Q}.activation_scale has shape \(2,\), but by config.json it is \(\)",
        ),
        (
            "ministral",
            changed(f"{Q}.activation_scale", lambda x: -x),
            rf"{Q}.activation_scale is -0\.\d*, which is no scale",
        ),
        (
            "nvfp4",
            changed(f"{Q}.weight_global_scale", lambda x: 0 * x),
            f"{Q}.weight_global_scale is 0.0, which is no scale",
        ),
        (
            "gptq",
            lambda tensors: tensors | {f"{DOWN}.bias": torch.full((64,), 0.1)},
            f"{DOWN}.bias is not zero, but by config.json the layer has no bias: check both files",
        ),
        (
            "int4",
            lambda tensors: tensors | {f"{Q}.weight_zero_point": torch.zeros(8, 2).int()},
            f"the model has no place for {Q}.weight_zero_point",
        ),
        (
            "awq",
            lambda tensors: {n: x for n, x in tensors.items() if n != f"{Q}.qzeros"},
            f"no file has {Q}.qzeros",
        ),
    ],
)
def test_a_tensor_that_is_not_what_the_config_says_is_named(name, change, message, tmp_path):
    _, packed = make_pair(tmp_path, DENSE, *FORMATS[name][:2])
    rewrite(packed, change(tensors_of(packed)))
    with pytest.raises(ValueError, match=message):
        load(packed)


ROUTED = Qwen3MoeConfig(
    **SIZES, num_experts=32, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
)


ROUTER, EMBEDDING = "model.layers.0.mlp.gate", "model.embed_tokens"


@pytest.mark.parametrize(
    "name, layer",
    [
        *((name, ROUTER) for name in ("gptq", "awq", "int4", "nvfp4", "fp8-static", "fp8-blocks")),
        *((name, EMBEDDING) for name in ("int4", "nvfp4", "fp8-static", "fp8-blocks")),
    ],
)
def test_a_router_or_an_embedding_that_is_quantised_is_named(name, layer, tmp_path):
    """Both stay plain, whatever the config says of them."""
    pack, config, _ = FORMATS[name]
    _, packed = make_pair(
        tmp_path, ROUTED, pack, config, modules=(*PROJECTIONS, layer.rpartition(".")[2])
    )
    message = f"{re.escape(layer)} is quantised, and an embedding or a router .* choose another"
    with pytest.raises(ValueError, match=message):
        load(packed)


def test_biases_of_zeros_that_autogptq_adds_are_left_out(tmp_path):
    """Layers that have a bias, as q, k and v of Qwen2 do, keep it."""
    config = Qwen2Config(**{name: SIZES[name] for name in SIZES if name != "head_dim"})
    plain, packed = make_pair(tmp_path, config, *FORMATS["gptq"][:2])
    tensors = tensors_of(packed)
    zeros = {
        f"{name.removesuffix('.qweight')}.bias": torch.zeros(x.shape[1])
        for name, x in tensors.items()
        if name.endswith(".qweight")
    }
    assert tensors[f"{Q}.bias"].any() and f"{DOWN}.bias" not in tensors
    rewrite(packed, zeros | tensors)
    assert_close(logits_of(load(packed)), expected_logits(reference_of(plain), TOKENS), None)


def test_a_share_that_cuts_what_cannot_be_cut_is_refused_with_its_sizes(tmp_path):
    from nanovllm.layers.parallel import ParallelGroup

    sizes = vars(DENSE) | dict(intermediate_size=96)
    make_checkpoint(tmp_path, type(DENSE)(**{k: sizes[k] for k in SIZES_OF}))
    change_config(tmp_path, quantization_config=FP8 | {"weight_block_size": [32, 32]})
    message = "down_proj.weight has 96 columns, of which each of 2 ranks takes 48, .* groups of 32"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, ParallelGroup(1, 2))


SIZES_OF = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
SIZES_OF += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")


@pytest.mark.parametrize("kind", [DENSE, EXPERTS])
def test_projections_of_one_layer_with_two_formats_are_refused(kind, tmp_path):
    make_checkpoint(tmp_path, kind)
    which = "v_proj" if kind is DENSE else "experts.1.up_proj"
    config = groups(LINEAR, ignore=["lm_head", f"re:.*{which}$"])
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match=f"and .*{which}.weight different formats: they are one"):
        load(tmp_path)
