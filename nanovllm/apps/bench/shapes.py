"""The shapes of known models, which are measured with random weights and without a download."""

import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from nanovllm import TINY_MODEL

VOCAB = 151936


class Shape(NamedTuple):
    """The sizes of a Qwen3 model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # size of one expert if there are several
    experts: int = 1
    experts_per_token: int = 1
    tied: bool = False  # whether the head shares the weights of the embedding


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, tied=True),
    "qwen3-1.7b": Shape(2048, 28, 16, 8, 128, 6144, tied=True),
    "qwen3-4b": Shape(2560, 36, 32, 8, 128, 9728, tied=True),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12288),
    "qwen3-32b": Shape(5120, 64, 64, 8, 128, 25600),
    "qwen3-30b-a3b": Shape(2048, 48, 32, 4, 128, 768, experts=128, experts_per_token=8),
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
    if quantization in QUANTIZED:
        config["quantization_config"] = QUANTIZED[quantization]
        name = f"{name}-{quantization}"
    folder = Path(tempfile.gettempdir()) / f"nanovllm-bench-{os.getuid()}" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), True


def model_config(shape: Shape) -> dict:
    """Return the content of the config.json of a model with this shape."""
    config = dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=VOCAB,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        tie_word_embeddings=shape.tied,
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
    return config
