"""The decoder that the families share: a stack of pre-norm blocks of attention and MLP on a
residual stream.

A family is a CausalLM that says, in `build_layer`, which blocks a layer has and with which options.

T tokens of any number of sequences go through at once, packed one after the other. Which token
attends to which is the step's metadata (layers/context.py), and only attention reads it.
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
from nanovllm.models.config_fields import activation_name, head_size, layer_kind, window_of


class DecoderLayer(nn.Module):
    def __init__(self, config, self_attn: nn.Module, mlp: nn.Module, norm: type[RMSNorm] = RMSNorm):
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
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
    """A decoder and its head. `config` has the fields of a Hugging Face config.json."""

    # What a family may have instead.
    norm: type[RMSNorm] = RMSNorm
    rotary: type[RotaryEmbedding] = RotaryEmbedding
    activations: tuple[str, ...] = ("silu", "swish")  # that a configuration may ask for
    has_windows = False  # whether a configuration may give layers a sliding window
    # Of checkpoints that are dequantised while they are loaded, the quant_method.
    quantizations: tuple[str, ...] = ()
    # Whether checkpoints have all experts of a layer in one tensor, as transformers does.
    stacks_experts = False
    # What a checkpoint calls modules that have another name here.
    checkpoint_names: dict[str, str] = {}
    # Parts of checkpoints that are not run here, such as a vision tower.
    left_out: tuple[str, ...] = ()

    def __init__(self, config, group: ParallelGroup, max_model_len: int | None = None):
        """`max_model_len`: positions that will be asked for; None: all that the model supports."""
        super().__init__()
        self.config = config
        kinds = [layer_kind(config, i) for i in range(config.num_hidden_layers)]
        rotaries = {
            kind: self.rotary.from_config(config, head_size(config), max_model_len, kind)
            for kind in dict.fromkeys(kinds)
        }
        layers = [
            self.build_layer(config, i, rotaries[kind], group) for i, kind in enumerate(kinds)
        ]
        embed_tokens = self.build_embedding(config, group)
        norm = self.norm(config.hidden_size, config.rms_norm_eps)
        self.model = Decoder(embed_tokens, layers, norm)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group, tied_to=tied_to)

    @classmethod
    def check(cls, config) -> None:
        """Raise ValueError for what a configuration of the family says and the family does not
        do.
        """

    def build_embedding(self, config, group: ParallelGroup) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)

    def build_layer(
        self, config, index: int, rotary: RotaryEmbedding, group: ParallelGroup
    ) -> nn.Module:
        """Layer `index`: a module that takes hidden states [T, hidden] and positions [T]."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and their positions, [T] each -> hidden states of the R tokens whose logits
        are wanted.
        """
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V]; on several ranks, this one's shard of the vocabulary."""
        return self.lm_head(hidden)


def build_attention(
    config,
    index: int,
    rotary: RotaryEmbedding,
    group: ParallelGroup,
    *,
    bias: bool = False,
    qk_norm: type[RMSNorm] | None = None,
    **options: Any,
) -> SelfAttention:
    """Layer `index`'s self-attention, of the sizes and with the window that `config` gives.

    `bias`: whether all projections have one. `qk_norm`: norms each head of q and k before it is
    rotated; None: nothing does. `options`: SelfAttention's.
    """
    size = head_size(config)
    q_norm, k_norm = (qk_norm(size, config.rms_norm_eps) if qk_norm else None for _ in "qk")
    return SelfAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        size,
        rotary,
        group,
        q_norm=q_norm,
        k_norm=k_norm,
        window=window_of(config, index),
        **dict(qkv_bias=bias, output_bias=bias) | options,
    )


def build_mlp(config, group: ParallelGroup, **options: Any) -> GatedMLP:
    """The gated MLP, of the sizes and with the activation that `config` gives.

    `options`: GatedMLP's.
    """
    activation = ACTIVATIONS[activation_name(config)]
    return GatedMLP(
        config.hidden_size, config.intermediate_size, group, activation=activation, **options
    )
