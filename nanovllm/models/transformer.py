"""The decoder that all families share: pre-norm layers of attention and MLP on a residual stream.

A family is a subclass of CausalLM. Its `build_layer` says what a layer consists of.

T tokens of any number of sequences pass at once, packed one after the other. The step's metadata
(layers/context.py) says which token attends to which; only attention reads it.
"""

from typing import Any

from torch import Tensor, nn

from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.context import current_metadata
from nanovllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.mlp import ACTIVATIONS, GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.model_config import ModelConfig


class DecoderLayer(nn.Module):
    """A pre-norm layer of attention and MLP: [T, hidden] -> [T, hidden]."""

    def __init__(
        self,
        config: ModelConfig,
        self_attn: nn.Module,
        mlp: nn.Module,
        norm: type[RMSNorm] = RMSNorm,
    ):
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class LinearAttentionLayer(nn.Module):
    """A pre-norm layer whose attention is a recurrent layer, `linear_attn`."""

    def __init__(self, config, linear_attn: nn.Module, mlp: nn.Module, norm: type[RMSNorm]):
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.linear_attn = linear_attn
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.linear_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The embedding, the layers and the last norm: token ids [T] -> hidden states [R, hidden].

    R is the number of tokens whose logits are wanted.
    """

    def __init__(
        self, embed_tokens: VocabParallelEmbedding, layers: list[nn.Module], norm: RMSNorm
    ):
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)  # [T] -> [T, hidden]
        for layer in self.layers:
            x = layer(x, positions)
        indices = current_metadata().logits_indices
        if indices is not None:
            x = x[indices]  # [T, hidden] -> [R, hidden]
        return self.norm(x)


class CausalLM(nn.Module):
    """A decoder and its head. `config` is an object of the family's `config_class`."""

    # A family overrides those in which it differs.
    config_class: type[ModelConfig] = ModelConfig
    norm: type[RMSNorm] = RMSNorm
    rotary: type[RotaryEmbedding] = RotaryEmbedding
    stacks_experts = False  # whether experts are read from tensors that hold all of a layer
    checkpoint_names: dict[str, str] = {}  # name of a module here -> its name in checkpoints
    left_out: tuple[str, ...] = ()  # parts of checkpoints that are not run, such as a vision tower
    unread_suffixes: tuple[str, ...] = ()  # ends of names of tensors that checkpoints may have, too
    weight_format = ""  # of quantised weights, in words for users
    kv_format = ""  # of the KV cache, in words for users; "": that of dtype
    num_parameters: int  # of this rank's part, each counted once however few bits it is held in

    # A subclass says `config: GraniteConfig`, which a type checker allows where this says Any.
    def __init__(self, config: Any, group: ParallelGroup, max_model_len: int | None = None):
        """Build the layers, without weights.

        `max_model_len`: positions that will be asked for; None: all that the model supports.
        """
        super().__init__()
        self.config = config
        kinds = config.layer_types[: config.num_hidden_layers]
        rotaries = {
            kind: self.rotary.from_settings(
                config.rope_settings(kind), config.head_dim_of(kind), max_model_len
            )
            for kind in dict.fromkeys(kinds)
        }
        layers = [
            self.build_layer(config, i, rotaries[kind], group) for i, kind in enumerate(kinds)
        ]
        self.model = self.build_decoder(config, layers, group)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group, tied_to=tied_to)

    def build_decoder(self, config: Any, layers: list[nn.Module], group: ParallelGroup) -> Decoder:
        norm = self.norm(config.hidden_size, config.rms_norm_eps)
        return Decoder(self.build_embedding(config, group), layers, norm)

    def build_embedding(self, config: Any, group: ParallelGroup) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)

    def build_layer(
        self, config: Any, index: int, rotary: RotaryEmbedding, group: ParallelGroup
    ) -> nn.Module:
        """Build layer `index`: a module that takes hidden states [T, hidden] and positions [T]."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the hidden states [R, hidden] of the tokens whose logits are wanted.

        input_ids and positions are [T] int64.
        """
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, V] of hidden states; of several ranks, this rank's shard of V."""
        return self.lm_head(hidden)


def build_attention(
    config: ModelConfig,
    index: int,
    rotary: RotaryEmbedding,
    group: ParallelGroup,
    *,
    bias: bool = False,
    qk_norm: type[RMSNorm] | None = None,
    kind: type[SelfAttention] = SelfAttention,
    **options: Any,
) -> SelfAttention:
    """Build the self-attention of layer `index`, with the sizes and the window of `config`.

    Args:
        bias: whether all projections have a bias.
        qk_norm: the norm of each head of q and k before it is rotated; None: no norm.
        kind: the class of the layer.
        options: further arguments of SelfAttention.
    """
    layer_type = config.layer_types[index]
    size = config.head_dim_of(layer_type)
    q_norm, k_norm = (qk_norm(size, config.rms_norm_eps) if qk_norm else None for _ in "qk")
    return kind(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.kv_heads_of(layer_type),
        head_dim=size,
        rotary=rotary,
        group=group,
        q_norm=q_norm,
        k_norm=k_norm,
        window=config.window_of(index),
        **dict(qkv_bias=bias, output_bias=bias) | options,
    )


def build_mlp(config: ModelConfig, group: ParallelGroup, **options: Any) -> GatedMLP:
    """Build the gated MLP, with the sizes and the activation of `config`.

    `options`: further arguments of GatedMLP.
    """
    activation = ACTIVATIONS[config.hidden_act]
    return GatedMLP(
        config.hidden_size, config.intermediate_size, group, activation=activation, **options
    )
