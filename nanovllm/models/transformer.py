"""The decoder that the families share: a stack of pre-norm blocks of attention and MLP on a residual stream.

A family is its own layer class, which picks the blocks and their options, and a CausalLM that names that class.

T tokens of any number of sequences go through at once, packed one after the other. Which token attends to which is the
step's metadata, and only attention reads it.
"""

from copy import copy

from torch import Tensor, nn

from nanovllm.layers.activation import SiluGatedLinear
from nanovllm.layers.attention import Attention
from nanovllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.linear import QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.layers.context import current_metadata
from nanovllm.distributed.collectives import RowParts, UnfinishedSum, whole
from nanovllm.layers.parallel import ParallelGroup


class SelfAttention(nn.Module):
    """Attention with rotary positions, H query heads and G key-value heads of size D."""

    def __init__(
        self,
        config,
        rotary: RotaryEmbedding,
        group: ParallelGroup,
        *,
        qk_norm: bool = False,  # norm each head of q and k before it is rotated
        qkv_bias: bool = False,
        output_bias: bool = False,
    ):
        super().__init__()
        hidden, head_dim = config.hidden_size, head_size(config)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(hidden, heads, kv_heads, head_dim, group, bias=qkv_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if qk_norm else None
        self.attn = Attention(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, rotary)
        self.o_proj = RowParallelLinear(heads * head_dim, hidden, group, bias=output_bias)

    def forward(self, x: Tensor | RowParts, positions: Tensor, wanted: Tensor | None = None) -> Tensor | UnfinishedSum:
        qkv = self.qkv_proj(x)  # [T, hidden] -> [T, (H + 2G) D]
        heads = self.attn(qkv, positions, self.q_norm, self.k_norm)  # [T, H D]
        if wanted is not None:
            return self.o_proj(heads[wanted])  # [R, H D] -> [R, hidden]
        return self.o_proj(heads, spare=x)  # [T, H D] -> [T, hidden]


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, group: ParallelGroup, *, bias: bool = False):
        super().__init__()
        self.gate_up_proj = SiluGatedLinear(
            hidden_size, intermediate_size, group, names=("gate_proj", "up_proj"), bias=bias
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group, bias=bias)

    def forward(self, x: Tensor | RowParts) -> Tensor | UnfinishedSum:
        return self.down_proj(self.gate_up_proj(x), spare=x)


class DecoderLayer(nn.Module):
    """x = x + attention(norm(x)), then x = x + mlp(norm(x)).

    With several ranks, a norm may take an UnfinishedSum, and give attention and mlp RowParts: who does not pass them on to the
    layers of `layers/linear.py` makes one tensor of them by `whole`.
    """

    def __init__(self, config, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, x: Tensor | UnfinishedSum, residual: Tensor | None, positions: Tensor, wanted: Tensor | None = None
    ) -> tuple[Tensor | UnfinishedSum, Tensor]:
        """`wanted` [R]: the tokens that go on after attention, in the last layer; None: all."""
        # What a block adds to the residual stream is left to the next norm, which does both in one pass.
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, positions, wanted)
        if wanted is not None:
            residual = residual[wanted]
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    def __init__(self, config, group: ParallelGroup, layer_class: type[DecoderLayer]):
        super().__init__()
        rotary = RotaryEmbedding.from_config(config, head_size(config))
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(layer_class(config, i, rotary, group) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None  # [T] -> [T, hidden]
        *layers, last = self.layers
        for layer in layers:
            x, residual = layer(x, residual, positions)
        # No token attends to the last layer's result: only what is wanted of it need be computed.
        x, residual = last(x, residual, positions, current_metadata().wanted)
        x, _ = self.norm(x, residual)
        return whole(x)


class CausalLM(nn.Module):
    layer_class: type[DecoderLayer]  # called with (config, layer index, rotary, group)

    def __init__(self, config, group: ParallelGroup):
        super().__init__()
        self.model = Decoder(config, group, self.layer_class)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group, tied_to=tied_to)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and their positions, [T] each -> hidden states of all, or of the R wanted: [T or R, hidden]."""
        return self.model(input_ids, positions)

    def outline(self) -> "CausalLM":
        """This model's first and last layer alone, with the same weights: most models launch no other kernels."""
        model, decoder = copy(self), copy(self.model)
        layers = nn.ModuleList([decoder.layers[0], decoder.layers[-1]])
        decoder._modules = decoder._modules | {"layers": layers}
        model._modules = model._modules | {"model": decoder}
        return model

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[B, hidden] -> [B, V]; on several ranks, this one's part of the vocabulary."""
        return self.lm_head(hidden)


def head_size(config) -> int:
    """Given by newer configurations, derived in older ones."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
