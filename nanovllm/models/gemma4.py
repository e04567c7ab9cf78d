"""Gemma 4, the text model.

It differs from Gemma 3 in these points:

- Layers without a window have larger heads, and may have fewer key-value heads. Their values may be
  their keys, before they are normed and rotated. Only a part of each of their heads turns.
- Norms multiply by their weight. Values are normed, too, without a weight. Scores are not scaled.
- The last layers may attend to the keys and values of earlier ones (layers/shared_kv.py).
- Each layer may add an input of its own: an embedding of the token for this layer, joined with a
  projection of the embedding that all layers share.
- Each layer multiplies its result by a number.
- Layers may have experts beside their MLP.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.context import current_metadata
from nanovllm.layers.embedding import ScaledEmbedding, VocabParallelEmbedding
from nanovllm.layers.linear import ReplicatedLinear, SensitiveLinear, Shard, empty_parameter
from nanovllm.layers.mlp import ACTIVATIONS, GatedMLP, gelu_tanh
from nanovllm.layers.moe import Experts
from nanovllm.layers.norm import RMSNorm, WideRMSNorm, normalize
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.shared_kv import SharedKVAttention
from nanovllm.models.gemma3 import Gemma3ForCausalLM
from nanovllm.models.model_config import ModelConfig, json_field, refuse_later_tokens
from nanovllm.models.post_norm import SandwichNormLayer
from nanovllm.models.transformer import Decoder, build_attention
from nanovllm.weights.loader import checkpoint_name
from nanovllm.weights.weight_slice import WeightSlice


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(ModelConfig):
    activations: ClassVar = ("gelu_pytorch_tanh",)
    has_windows: ClassVar = True
    default_rope: ClassVar = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    }

    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 131_072
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    sliding_window: int | None = 512
    full_attention_interval: int | None = 6
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None  # "vision" concerns images alone

    # Layers without a window.
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None  # None: num_key_value_heads
    attention_k_eq_v: bool = False
    # The sizes of these layers as transformers writes them, by index; it wins over the two above.
    per_layer_config: dict | None = None

    num_kv_shared_layers: int = json_field(0, ge=0)  # the last layers, which share K and V
    use_double_wide_mlp: bool = False  # whether those have MLPs of twice the width
    hidden_size_per_layer_input: int = json_field(256, ge=0)  # 0: layers have no own inputs
    vocab_size_per_layer_input: int = 262_144

    enable_moe_block: bool = False
    num_experts: int = json_field(computed=lambda config: 0, ge=0)
    num_experts_per_tok: int | None = json_field(None, names=("top_k_experts",))
    moe_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        # The last layer sees all tokens, whatever layer_types says, as in transformers.
        kinds = self.layer_types or self.default_layer_types()
        object.__setattr__(self, "layer_types", (*kinds[:-1], "full_attention"))
        super().__post_init__()

    @property
    def sizes_of_full_attention(self) -> dict[str, int]:
        """The head_dim and the num_key_value_heads of layers without a window."""
        sizes = dict(head_dim=self.head_dim, num_key_value_heads=self.num_key_value_heads)
        if self.per_layer_config is not None:
            return sizes | next(iter(self.per_layer_config.values()), {})
        if self.attention_k_eq_v and self.num_global_key_value_heads is not None:
            sizes["num_key_value_heads"] = self.num_global_key_value_heads
        return sizes | dict(head_dim=self.global_head_dim)

    def head_dim_of(self, kind: str) -> int:
        is_full = kind == "full_attention"
        return self.sizes_of_full_attention["head_dim"] if is_full else self.head_dim

    def kv_heads_of(self, kind: str) -> int:
        is_full = kind == "full_attention"
        key = "num_key_value_heads"
        return self.sizes_of_full_attention[key] if is_full else self.num_key_value_heads

    def kv_source_of(self, index: int) -> int | None:
        """Return the layer whose keys and values layer `index` shares; None: it has its own.

        This is the last layer of its kind among those that have their own.
        """
        own = self.num_hidden_layers - self.num_kv_shared_layers
        if index < own:
            return None
        kind = self.layer_types[index]
        return max(i for i in range(own) if self.layer_types[i] == kind)

    def check(self) -> None:
        super().check()
        if self.use_bidirectional_attention not in (None, "vision"):
            refuse_later_tokens("use_bidirectional_attention", self.use_bidirectional_attention)
        self._check_heads()
        self._check_sharing()
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            raise ValueError(
                f"config.json: vocab_size_per_layer_input is {self.vocab_size_per_layer_input}, "
                f"vocab_size is {self.vocab_size}: each token needs inputs of layers, so the first "
                "must be at least the second"
            )
        if self.enable_moe_block:
            count, picked = self.num_experts, self.num_experts_per_tok
            size = self.moe_intermediate_size
            if not count or picked is None or size is None or picked > count:
                raise ValueError(
                    f"config.json: enable_moe_block is set, num_experts is {count}, top_k_experts "
                    f"{picked}, moe_intermediate_size {size}: give all three, and no more "
                    "top_k_experts than num_experts"
                )

    def _check_heads(self) -> None:
        given = self.per_layer_config
        if given is not None:
            full = {i for i, kind in enumerate(self.layer_types) if kind == "full_attention"}
            # transformers writes "05" where there are ten layers or more.
            layers = {int(key) if key.isdecimal() else -1 for key in given}
            sizes = list(given.values())
            is_known = all(
                isinstance(one, dict)
                and one == sizes[0]
                and one.keys() <= {"head_dim", "num_key_value_heads"}
                and all(type(size) is int and size > 0 for size in one.values())
                for one in sizes
            )
            if not is_known or layers not in (full, set()):
                raise ValueError(
                    f"config.json: per_layer_config is {given}: only head_dim and "
                    "num_key_value_heads may differ, and only in the layers without a window, in "
                    "all of them alike"
                )
        heads, sizes_here = self.num_attention_heads, self.sizes_of_full_attention
        if heads % sizes_here["num_key_value_heads"] or sizes_here["head_dim"] % 2:
            raise ValueError(
                f"config.json: layers without a window have {sizes_here}: head_dim must be even, "
                f"and num_key_value_heads divide num_attention_heads, which is {heads}"
            )

    def _check_sharing(self) -> None:
        own = self.num_hidden_layers - self.num_kv_shared_layers
        kinds = set(self.layer_types[: self.num_hidden_layers])
        if self.num_kv_shared_layers and kinds != set(self.layer_types[: max(own, 0)]):
            raise ValueError(
                f"config.json: num_kv_shared_layers is {self.num_kv_shared_layers} of "
                f"{self.num_hidden_layers}: the other layers must be of all kinds, which are "
                f"{', '.join(sorted(kinds))}"
            )


class NormedValuesAttention(SelfAttention):
    """Self-attention that also norms values [T, G, D], without a weight."""

    k_norm: RMSNorm

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.split_heads(self.qkv_proj(x))
        v = normalize(v, self.k_norm.eps).to(v.dtype)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        return self.o_proj(self.attend(q, k, v).flatten(1))


class KeysAsValuesAttention(NormedValuesAttention):
    """Self-attention whose values are its keys, before these are normed and rotated."""

    projections = ("q_proj", "k_proj")

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        heads = qkv.view(len(qkv), -1, self.head_dim)
        q, k = heads.split([self.num_heads, self.num_kv_heads], dim=1)
        return q, k, k


class Gemma4Router(nn.Module):
    """The router: it picks each token's experts, and says how much each of them counts."""

    def __init__(self, config: Gemma4Config):
        super().__init__()
        assert config.num_experts_per_tok is not None
        self.top_k, self.eps = config.num_experts_per_tok, config.rms_norm_eps
        self.proj = ReplicatedLinear(config.hidden_size, config.num_experts)
        self.scale = empty_parameter(config.hidden_size)
        self.per_expert_scale = empty_parameter(config.num_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and experts, each [T, K]."""
        x = normalize(x, self.eps).to(x.dtype) * self.scale * x.shape[1] ** -0.5
        probs = self.proj(x).softmax(dim=-1, dtype=torch.float32)  # [T, experts]
        weights, experts = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.per_expert_scale[experts], experts

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        for name in ("scale", "per_expert_scale"):
            values = self.get_parameter(name)
            yield WeightSlice(f"{path}.{name}", values, (slice(None),), tuple(values.shape))


class GeGLU:
    """The gating gelu(gate) * up."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return gelu_tanh(gate) * up


def build_projection(in_features: int, out_features: int) -> SensitiveLinear:
    """Build a projection of layers' own inputs, which is whole on every rank.

    Unlike a router, it is quantised in checkpoints that quantise all linear layers.
    """
    shard = Shard(None, out_features, 0, out_features)
    return SensitiveLinear(in_features, [shard], bias=False)


class Gemma4Layer(SandwichNormLayer):
    def __init__(
        self, config: Gemma4Config, self_attn: nn.Module, mlp: nn.Module, group: ParallelGroup
    ):
        super().__init__(config, self_attn, mlp, WideRMSNorm)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        size = config.hidden_size_per_layer_input
        self.group = group
        self.layer_scalar = empty_parameter(1)
        self.has_own_input, self.has_experts = size > 0, config.enable_moe_block
        if self.has_own_input:
            self.per_layer_input_gate = build_projection(hidden, size)
            self.per_layer_projection = build_projection(size, hidden)
            self.post_per_layer_input_norm = WideRMSNorm(hidden, eps)
        if self.has_experts:
            assert config.moe_intermediate_size is not None
            self.router = Gemma4Router(config)
            sizes = hidden, config.moe_intermediate_size, config.num_experts
            self.experts = Experts(*sizes, group, gating=GeGLU())
            self.pre_feedforward_layernorm_2 = WideRMSNorm(hidden, eps)
            self.post_feedforward_layernorm_1 = WideRMSNorm(hidden, eps)
            self.post_feedforward_layernorm_2 = WideRMSNorm(hidden, eps)

    def forward(self, x: Tensor, positions: Tensor, own_input: Tensor | None = None) -> Tensor:
        """Run the layer. `own_input` [T, P]: its own inputs, if layers have some."""
        x = x + self.attention_output_norm(self.self_attn(self.input_layernorm(x), positions))
        result = self.mlp(self.post_attention_layernorm(x))
        if self.has_experts:
            result = self.post_feedforward_layernorm_1(result) + self.run_experts(x)
        x = x + self.mlp_output_norm(result)
        if own_input is not None:
            own_input = gelu_tanh(self.per_layer_input_gate(x)) * own_input
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(own_input))
        return x * self.layer_scalar

    def run_experts(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x)
        result = self.experts(self.pre_feedforward_layernorm_2(x), weights, experts)
        return self.post_feedforward_layernorm_2(self.group.all_reduce(result))

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        yield WeightSlice(f"{path}.layer_scalar", self.layer_scalar, (slice(None),), (1,))


class Gemma4Decoder(Decoder):
    """A decoder whose layers have inputs of their own, of P elements a token."""

    def __init__(
        self,
        config: Gemma4Config,
        embed_tokens: VocabParallelEmbedding,
        layers: list[nn.Module],
        norm: RMSNorm,
        group: ParallelGroup,
    ):
        super().__init__(embed_tokens, layers, norm)
        self.size = size = config.hidden_size_per_layer_input
        width = len(layers) * size
        self.embed_tokens_per_layer = ScaledEmbedding(
            config.vocab_size_per_layer_input, width, group, scale=size**0.5
        )
        self.per_layer_model_projection = build_projection(config.hidden_size, width)
        self.per_layer_projection_norm = WideRMSNorm(size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)  # [T] -> [T, hidden]
        inputs = self.inputs_of_layers(input_ids, x)
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, inputs[:, index])
        indices = current_metadata().logits_indices
        if indices is not None:
            x = x[indices]  # [T, hidden] -> [R, hidden]
        return self.norm(x)

    def inputs_of_layers(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Compute each layer's own inputs from tokens [T] and their embeddings: [T, layers, P]."""
        projected = self.per_layer_model_projection(x) * x.shape[1] ** -0.5
        projected = self.per_layer_projection_norm(projected.unflatten(1, (-1, self.size)))
        embedded = self.embed_tokens_per_layer(input_ids).unflatten(1, (-1, self.size))
        return (projected + embedded) * 2**-0.5


class Gemma4ForCausalLM(Gemma3ForCausalLM):
    config_class = Gemma4Config
    norm = WideRMSNorm

    def __init__(self, config: Any, group: ParallelGroup, max_model_len: int | None = None):
        super().__init__(config, group, max_model_len)
        # Checkpoints may hold what layers that share K and V would need if they did not.
        for path, module in self.named_modules():
            if isinstance(module, SharedKVAttention):
                name = checkpoint_name(self, path)
                self.left_out += (f"{name}.k_proj", f"{name}.v_proj", f"{name}.k_norm")

    def build_decoder(self, config: Gemma4Config, layers, group):
        norm = self.norm(config.hidden_size, config.rms_norm_eps)
        embed_tokens = self.build_embedding(config, group)
        for index, layer in enumerate(layers):
            source = config.kv_source_of(index)
            if source is not None:
                layer.self_attn.share_kv_of(layers[source].self_attn)
        if config.hidden_size_per_layer_input == 0:
            return Decoder(embed_tokens, layers, norm)
        return Gemma4Decoder(config, embed_tokens, layers, norm, group)

    def build_layer(self, config: Any, index, rotary, group):
        kind: type[SelfAttention] = NormedValuesAttention
        width = config.intermediate_size
        if config.kv_source_of(index) is not None:
            kind, width = SharedKVAttention, width * (2 if config.use_double_wide_mlp else 1)
        elif config.attention_k_eq_v and config.layer_types[index] == "full_attention":
            kind = KeysAsValuesAttention
        attention = build_attention(
            config,
            index,
            rotary,
            group,
            bias=config.attention_bias,
            qk_norm=WideRMSNorm,
            kind=kind,
            scale=1.0,
        )
        activation = ACTIVATIONS[config.hidden_act]
        mlp = GatedMLP(config.hidden_size, width, group, activation=activation)
        return Gemma4Layer(config, attention, mlp, group)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text model within a checkpoint that also sees and hears."""

    checkpoint_names = {**Gemma4ForCausalLM.checkpoint_names, "model": "model.language_model"}
    left_out = (
        "model.vision_tower",
        "model.embed_vision",
        "model.audio_tower",
        "model.embed_audio",
    )
