"""Qwen3.5 as it is published in FP8 and in GPTQ-Int4, by transformers with dequantised weights.

The checkpoints are small, and have the names, dtypes, blocks and configurations of published ones.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from model_helpers import expected_logits
from quantised_helpers import fp8_blocks, gptq, on_ranks
from safetensors.torch import save_file
from test_quantised import TOKENS, assert_close, load, logits_of, rounded_inputs
from torch.overrides import TorchFunctionMode
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from nanovllm import LLM, SamplingParams
from nanovllm.models import MODELS
from nanovllm.weights.loader import check_num_layers

# Two ranks have whole blocks of 128 of each projection.
TEXT = dict(
    vocab_size=83,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=128,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    max_position_embeddings=64,
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
)
VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    out_hidden_size=256,
    num_position_embeddings=16,
)
KINDS = {
    "dense": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, TEXT),
    "experts": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, TEXT | EXPERTS),
}
MLP = ("gate_proj", "up_proj", "down_proj")
IN_FP8 = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", *MLP)
PLAIN_IN_FP8 = ("linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b")
PLAIN_IN_FP8 += ("mlp.gate", "mlp.shared_expert_gate")
FP8 = dict(
    quant_method="fp8",
    activation_scheme="dynamic",
    fmt="e4m3",
    weight_block_size=[128, 128],
    modules_to_not_convert=[
        *("lm_head", "model.language_model.embed_tokens", "model.visual.merger.linear_fc1"),
        *(f"model.language_model.layers.{i}.{name}" for i in range(4) for name in PLAIN_IN_FP8),
        *("mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"),
    ],
)
GPTQ = dict(
    quant_method="gptq",
    bits=4,
    group_size=128,
    sym=True,
    desc_act=False,
    checkpoint_format="gptq",
    pack_dtype="int32",
    lm_head=False,
    meta=dict(damp_percent=0.05),
    dynamic={
        "lm_head": {},
        "model.language_model.embed_tokens": {},
        "-:.*attn.*": {},
        "-:.*shared_expert.*": {},
        "-:.*mtp.*": {},
        "-:.*visual.*": {},
    },
)


def is_packed(name, kind):
    """Tell whether published checkpoints hold a module of the text model in FP8, or in GPTQ."""
    last = name.rpartition(".")[2]
    if kind == "fp8":
        return last in IN_FP8
    return last in MLP and ".mlp." in name and "shared_expert" not in name


def publish(folder, kind, of):
    """Save a random checkpoint as Qwen publishes it.

    Returns transformers' model with the weights that it stands for, and the packed tensors.
    """
    config_class, model_class, text = KINDS[of]
    config = config_class(text_config=text, vision_config=VISION)
    torch.manual_seed(0)
    reference = model_class(config).eval()
    reference.config.text_config._experts_implementation = "eager"
    pack = fp8_blocks(128, 128, torch.bfloat16) if kind == "fp8" else gptq(4, 128, symmetric=True)
    tensors, packed = {"mtp.fc.weight": torch.zeros(4, 4)}, {}
    for key, tensor in reference.state_dict().items():
        is_matrix = tensor.dim() > 1
        tensor.normal_(0.0, 0.15 if is_matrix else 0.3)
        path, _, last = key.rpartition(".")
        if not path.endswith("mlp.experts"):
            singles = {path: tensor} if last == "weight" else {}
        elif last == "down_proj":
            singles = {f"{path}.{i}.{last}": one for i, one in enumerate(tensor)}
        else:
            halves = [zip(("gate_proj", "up_proj"), one.chunk(2)) for one in tensor]
            singles = {f"{path}.{i}.{n}": one for i, two in enumerate(halves) for n, one in two}
        for name, one in singles.items():
            if name.startswith("model.language_model.layers") and is_packed(name, kind):
                parts, plain = pack(one.float(), name)
                one.copy_(plain)
                packed |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
            elif path.endswith("experts"):
                raise AssertionError(f"{name} is packed in each of these formats")
            else:
                one.copy_(one.bfloat16())  # what the checkpoint holds
                tensors[key] = one if key.endswith("linear_attn.norm.weight") else one.bfloat16()
        if not singles:  # A_log and dt_bias, which have no module
            tensors[key] = tensor.clone()
    mtp = "mtp.layers.0.mlp.up_proj"
    tensors |= {
        f"{mtp}.{suffix}": part for suffix, part in pack(torch.ones(128, 128), mtp)[0].items()
    }
    save_file(
        {name: x.contiguous().clone() for name, x in (tensors | packed).items()},
        folder / "model.safetensors",
    )
    values = json.loads(config.to_json_string()) | dict(architectures=[model_class.__name__])
    values |= dict(quantization_config=FP8 if kind == "fp8" else GPTQ, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(values))
    return reference, packed


class RoundedInputs(TorchFunctionMode):
    """Rounds the inputs of all products with packed weights to FP8, in groups of 128."""

    def __init__(self, reference):
        self.weights = set()
        for name, weight in reference.named_parameters():
            if "language_model.layers" not in name:
                continue
            if ".mlp.experts." in name:
                self.weights |= {one.data_ptr() for one in weight}
            elif is_packed(name.removesuffix(".weight"), "fp8"):
                self.weights.add(weight.data_ptr())
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and args[1].data_ptr() in self.weights:
            self.count += 1
            args = (rounded_inputs(args[0], "group", {}, "", columns=128), *args[1:])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("kind", ["fp8", "gptq"])
def test_published_checkpoints_compute_what_their_numbers_stand_for(kind, of, tmp_path, caplog):
    reference, packed = publish(tmp_path, kind, of)
    inputs = "group" if kind == "fp8" else None
    if inputs:
        with RoundedInputs(reference) as rounded:
            want = expected_logits(reference, TOKENS)
        # 3 products of each MLP or shared expert, 4 of attention, 3 of each Gated DeltaNet, and
        # those of the experts that tokens choose.
        assert rounded.count == 25 if of == "dense" else rounded.count > 25
    else:
        want = expected_logits(reference, TOKENS)
    model = load(tmp_path)
    assert_close(logits_of(model), want, inputs)
    kept = {name for name, one in model.named_modules() if type(one).__name__ == "SensitiveLinear"}
    assert len(kept) == 3, "in_proj_b and in_proj_a of each Gated DeltaNet are plain"
    parts = on_ranks(2, lambda group: logits_of(load(tmp_path, group)))
    assert_close(torch.cat(parts, dim=1), want, inputs)
    with caplog.at_level("INFO", "nanovllm"):
        check_num_layers(4, tmp_path, MODELS[type(reference).__name__])
    assert "model.visual, mtp left out" in caplog.text


@pytest.mark.parametrize("of", KINDS)
def test_an_llm_runs_a_published_gptq_checkpoint(of, tmp_path):
    reference, _ = publish(tmp_path, "gptq", of)
    tokens = list(TOKENS)
    for _ in range(12):
        logits = expected_logits(reference, tokens)[-1]
        first, second = logits.topk(2).values
        assert first - second > 1e-3, "a near tie: choose another prompt"
        tokens.append(int(logits.argmax()))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(tmp_path, device="cpu", num_kvcache_blocks=8, max_model_len=64) as llm:
        (output,) = llm.generate([TOKENS], params, use_tqdm=False)
        assert llm.engine.runner.info.weight_format == "GPTQ INT4 weights (groups of 128)"
    assert output["token_ids"] == tokens[len(TOKENS) :]
