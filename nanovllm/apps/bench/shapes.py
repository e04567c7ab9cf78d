"""Shapes of known models, whose weights are made up."""

import json
import os
import tempfile
from pathlib import Path

from nanovllm import TINY_MODEL

# hidden, layers, heads, KV heads, head size, intermediate (of an expert), experts, experts of a
# token, tied head
SHAPES = {
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 1, 1, True),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 1, 1, True),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12288, 1, 1, False),
    "qwen3-32b": (5120, 64, 64, 8, 128, 25600, 1, 1, False),
    "qwen3-30b-a3b": (2048, 48, 32, 4, 128, 768, 128, 8, False),
}

VOCAB = 151936


def model_folder(name: str) -> tuple[str, bool]:
    """The folder or hub id to load, and whether its weights are made up."""
    if name == "tiny":
        return str(TINY_MODEL), False
    if name not in SHAPES:
        return name, False
    hidden, layers, heads, kv_heads, head_dim, intermediate, experts, active, tied = SHAPES[name]
    config = dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
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
    if experts > 1:
        config |= dict(
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            moe_intermediate_size=intermediate,
            num_experts=experts,
            num_experts_per_tok=active,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    folder = Path(tempfile.gettempdir()) / f"nanovllm-bench-{os.getuid()}" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), True
