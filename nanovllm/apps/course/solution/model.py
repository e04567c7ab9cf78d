"""The model: a Qwen3 of four layers, whose attention the caller provides.

This file is complete: no piece is missing here. T tokens pass through all layers together. Only
attention looks from one token to another, so only attention must know which sequence a token
belongs to. The model therefore calls `attend(layer, q, k, v)` and leaves the rest to it.

Shapes: T tokens, H query heads, G key-value heads, D head size, V vocabulary entries.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from nanovllm import TINY_MODEL

# attend(layer, q [T, H, D], k [T, G, D], v [T, G, D]) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Model:
    """The tiny model that comes with nanovllm, in float32 on the CPU."""

    def __init__(self, folder: str | Path = TINY_MODEL) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        self.num_layers = config["num_hidden_layers"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.end_token = config["eos_token_id"]
        self.weights = {
            name.removeprefix("model."): weight.float()
            for name, weight in load_file(Path(folder) / "model.safetensors").items()
        }
        pairs = torch.arange(0, self.head_dim, 2) / self.head_dim
        self.frequencies = config["rope_theta"] ** -pairs

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute the hidden states [T, hidden] of tokens [T] that stand at positions [T]."""
        x = F.embedding(token_ids, self.weights["embed_tokens.weight"])
        for i in range(self.num_layers):
            name = f"layers.{i}"
            y = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (self.heads(y, f"{name}.self_attn.{part}_proj") for part in "qkv")
            q = self.rotate(self.norm(q, f"{name}.self_attn.q_norm"), positions)
            k = self.rotate(self.norm(k, f"{name}.self_attn.k_norm"), positions)
            out = attend(i, q, k, v)  # [T, H, D]
            x = x + self.linear(out.flatten(1), f"{name}.self_attn.o_proj")
            y = self.norm(x, f"{name}.post_attention_layernorm")
            x = x + self.mlp(y, f"{name}.mlp")
        return self.norm(x, "norm")

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [T, V] of the tokens that may follow hidden states [T, hidden]."""
        return hidden @ self.weights["embed_tokens.weight"].T

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self.linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def heads(self, x: Tensor, name: str) -> Tensor:
        return self.linear(x, name).unflatten(1, (-1, self.head_dim))

    def norm(self, x: Tensor, name: str) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
        return x * self.weights[f"{name}.weight"]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate q or k by angles that grow with the position, so that scores see distances."""
        angles = positions[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
