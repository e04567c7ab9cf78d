"""LFM2: a Llama with short convolutions in most layers, in the place of attention.

It differs from a Llama in these points:

- Layers whose kind is conv multiply two projections of a token, convolve the product over the last
  few tokens, and multiply the result by a third projection.
- Attention norms each head of q and k before it is rotated.
- Checkpoints give modules and tensors other names.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear, Shard
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.short_conv import ShortConvolution
from nanovllm.models.model_config import ModelConfig, json_field
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ModelConfig):
    layer_kinds: ClassVar = ("full_attention", "conv")

    intermediate_size: int = json_field(names=("block_ff_dim", "intermediate_size"))
    rms_norm_eps: float = json_field(1e-5, names=("norm_eps",), ge=0, lt=1)
    rope_theta: float = 1e6
    tie_word_embeddings: bool = json_field(True, names=("tie_embedding", "tie_word_embeddings"))
    full_attn_idxs: tuple[int, ...] | None = None
    conv_bias: bool = False
    conv_L_cache: int = 3
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256

    def default_layer_types(self) -> tuple[str, ...]:
        layers = range(self.num_hidden_layers)
        full = layers if self.full_attn_idxs is None else self.full_attn_idxs
        return tuple(["full_attention" if index in full else "conv" for index in layers])

    @property
    def mlp_size(self) -> int:
        """The width of the MLPs, which config.json may give for an MLP without gates."""
        size = self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return size
        size = int(2 * size / 3)
        if self.block_ffn_dim_multiplier is None:
            return size
        size = int(self.block_ffn_dim_multiplier * size)
        return -(-size // self.block_multiple_of) * self.block_multiple_of


class GatedConvolution(nn.Module):
    """A short convolution between two gates: [T, hidden] -> [T, hidden].

    The ranks share the channels evenly.
    """

    def __init__(self, size: int, width: int, group: ParallelGroup, *, bias: bool):
        super().__init__()
        names = ("gate_in", "gate_out", "value")  # a checkpoint stacks them in this order
        self.in_proj = MergedColumnParallelLinear(
            size, size, group, names=names, bias=bias, stacked=True
        )
        count = group.shard(size, "hidden_size")
        channels = Shard(None, size, group.rank * count, count)
        self.conv = ShortConvolution([channels], width, bias=bias)
        self.out_proj = RowParallelLinear(size, size, group, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate_in, gate_out, value = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(gate_out * self.conv(gate_in * value))


class ConvolutionLayer(nn.Module):
    """A pre-norm layer with a convolution in the place of attention."""

    def __init__(self, config: Lfm2Config, mlp: nn.Module, group: ParallelGroup):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.conv = GatedConvolution(
            config.hidden_size, config.conv_L_cache, group, bias=config.conv_bias
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.conv(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Lfm2ForCausalLM(CausalLM):
    config_class = Lfm2Config
    checkpoint_names = {
        "norm": "embedding_norm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "o_proj": "out_proj",
        "mlp": "feed_forward",
        "down_proj": "w2",
    }

    def build_layer(self, config: Lfm2Config, index, rotary, group):
        mlp = GatedMLP(config.hidden_size, config.mlp_size, group, names=("w1", "w3"))
        if config.layer_types[index] == "conv":
            return ConvolutionLayer(config, mlp, group)
        attention = build_attention(config, index, rotary, group, qk_norm=RMSNorm)
        return DecoderLayer(config, attention, mlp)
