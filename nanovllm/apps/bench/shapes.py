"""The shapes of known models, which are measured with random weights and without a download."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from nanovllm import TINY_MODEL

VOCAB, VOCAB_3_5 = 151936, 248320


class Shape(NamedTuple):
    """The sizes of a Qwen3; with `value_heads`, of a Qwen3.5; with `window`, of a gpt-oss."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # size of one expert if there are several
    experts: int = 1
    experts_per_token: int = 1
    tied: bool = False  # whether the head shares the weights of the embedding
    # Of Gated DeltaNet, which three of four layers have instead of attention; 0: none has it.
    value_heads: int = 0
    # How many tokens attention sees in every second layer; 0: every layer sees all of them.
    window: int = 0
    expert_format: str | None = None  # of the experts' weights in the published checkpoint
    vocab: int = VOCAB

    @property
    def attention_layers(self) -> int:
        return self.layers // 4 if self.value_heads else self.layers

    @property
    def attention_spans(self) -> dict[float, int]:
        """The number of layers whose attention sees at most so many tokens; inf: all tokens."""
        if self.window:
            return {math.inf: self.layers // 2, self.window: self.layers // 2}
        return {math.inf: self.attention_layers}

    @property
    def recurrent_layers(self) -> int:
        return self.layers - self.attention_layers

    @property
    def channels(self) -> int:
        """The width of q, k and v together in Gated DeltaNet."""
        return (2 * KEY_HEADS + self.value_heads) * LINEAR_DIM

    @property
    def state_size(self) -> int:
        """The number of elements in the state of a Gated DeltaNet, without its convolution."""
        return self.value_heads * LINEAR_DIM**2


# Of Gated DeltaNet in each Qwen3.5: heads of keys, the size of a key and of a value, and how many
# tokens the convolution sees.
KEY_HEADS, LINEAR_DIM, CONV_WIDTH = 16, 128, 4

SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, tied=True),
    "qwen3-1.7b": Shape(2048, 28, 16, 8, 128, 6144, tied=True),
    "qwen3-4b": Shape(2560, 36, 32, 8, 128, 9728, tied=True),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12288),
    "qwen3-32b": Shape(5120, 64, 64, 8, 128, 25600),
    "qwen3-30b-a3b": Shape(2048, 48, 32, 4, 128, 768, experts=128, experts_per_token=8),
    "qwen3.5-0.8b": Shape(1024, 24, 8, 2, 256, 3584, tied=True, value_heads=16, vocab=VOCAB_3_5),
    "qwen3.5-9b": Shape(4096, 32, 16, 4, 256, 12288, value_heads=32, vocab=VOCAB_3_5),
    "qwen3.5-35b-a3b": Shape(
        hidden=2048,
        layers=40,
        heads=16,
        kv_heads=2,
        head_dim=256,
        intermediate=512,
        experts=256,
        experts_per_token=8,
        value_heads=32,
        vocab=VOCAB_3_5,
    ),
    "gpt-oss-20b": Shape(
        hidden=2880,
        layers=24,
        heads=64,
        kv_heads=8,
        head_dim=64,
        intermediate=2880,
        experts=32,
        experts_per_token=4,
        window=128,
        expert_format="mxfp4",
        vocab=201088,
    ),
}


# Formats of 4-bit weights that a shape may have, by their quantization_config.
QUANTIZED: dict[str, dict] = {
    "gptq": dict(quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True),
    "awq": dict(quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm"),
}


def model_folder(name: str, quantization: str | None = None) -> tuple[str, bool]:
    """Find the model that `--model` names; for a shape, write a folder with a config.json.

    quantization: the format of a shape's weights.
    Returns the folder or hub id to load, and whether to use random weights.
    """
    if name == "tiny":
        return str(TINY_MODEL), False
    if name not in SHAPES:
        return name, False
    config = model_config(SHAPES[name])
    # A shape that is quantised keeps its format: engines refuse another one.
    if quantization in QUANTIZED and "quantization_config" not in config:
        config["quantization_config"] = QUANTIZED[quantization]
        name = f"{name}-{quantization}"
    folder = Path(tempfile.gettempdir()) / f"nanovllm-bench-{os.getuid()}" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), True


def model_config(shape: Shape) -> dict:
    """Return the content of the config.json of a model with this shape."""
    if shape.window:
        return gpt_oss_config(shape)
    config = sizes(shape) | dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=1000000,
        max_position_embeddings=40960,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=None,
        initializer_range=0.02,
        torch_dtype="bfloat16",
        bos_token_id=151643,
        eos_token_id=151645,
    )
    if shape.experts > 1:
        config |= dict(
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            moe_intermediate_size=shape.intermediate,
            num_experts=shape.experts,
            num_experts_per_tok=shape.experts_per_token,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    return qwen3_5_config(shape, config) if shape.value_heads else config


def sizes(shape: Shape) -> dict:
    """Return the sizes in a config.json, which have the same names in Qwen3 and in gpt-oss."""
    return dict(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        tie_word_embeddings=shape.tied,
    )


def qwen3_5_config(shape: Shape, config: dict) -> dict:
    """Make the config.json of a Qwen3.5 from that of a Qwen3 with the same sizes.

    The text model stands within a model that sees, as in published checkpoints: vLLM knows no
    other form. The vision part is as small as can be.
    """
    of_qwen3 = {"architectures", "rope_theta", "use_sliding_window", "sliding_window"}
    of_qwen3 |= {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "torch_dtype"}
    kind, name = "qwen3_5", "Qwen3_5ForConditionalGeneration"
    text = {key: value for key, value in config.items() if key not in of_qwen3}
    if shape.experts > 1:
        kind, name = "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"
        text |= dict(shared_expert_intermediate_size=shape.intermediate)
        del text["intermediate_size"]
    layers = ["linear_attention"] * 3 + ["full_attention"]
    text |= dict(
        model_type=f"{kind}_text",
        dtype="bfloat16",
        max_position_embeddings=262144,
        attn_output_gate=True,
        full_attention_interval=4,
        layer_types=layers * (shape.layers // 4),
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=shape.value_heads,
        linear_key_head_dim=LINEAR_DIM,
        linear_value_head_dim=LINEAR_DIM,
        linear_conv_kernel_dim=CONV_WIDTH,
        mamba_ssm_dtype="float32",
        rope_parameters=dict(
            rope_type="default",
            rope_theta=10000000,
            partial_rotary_factor=0.25,
            mrope_interleaved=True,
            mrope_section=[11, 11, 10],
        ),
        bos_token_id=None,
        eos_token_id=248044,
    )
    vision = dict(
        model_type=kind,
        depth=1,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        in_channels=3,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=shape.hidden,
        num_position_embeddings=64,
        hidden_act="gelu_pytorch_tanh",
        deepstack_visual_indexes=[],
    )
    return dict(
        architectures=[name],
        model_type=kind,
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=shape.tied,
        image_token_id=248056,
        video_token_id=248057,
        vision_start_token_id=248053,
        vision_end_token_id=248054,
    )


def gpt_oss_config(shape: Shape) -> dict:
    """Return the content of the config.json of a gpt-oss with this shape."""
    config = sizes(shape) | dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        experts_per_token=shape.experts_per_token,
        layer_types=["sliding_attention", "full_attention"] * (shape.layers // 2),
        sliding_window=shape.window,
        attention_bias=True,
        attention_dropout=0.0,
        hidden_act="silu",
        swiglu_limit=7.0,
        rms_norm_eps=1e-5,
        rope_theta=150000,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position_embeddings=4096,
            truncate=False,
        ),
        initial_context_length=4096,
        max_position_embeddings=131072,
        initializer_range=0.02,
        torch_dtype="bfloat16",
        pad_token_id=199999,
        eos_token_id=200002,
    )
    if shape.expert_format:
        config["quantization_config"] = dict(
            quant_method=shape.expert_format,
            modules_to_not_convert=[
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        )
    return config
