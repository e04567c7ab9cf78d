"""Fused layers, which compute the same as a model's plain layers by fewer and faster kernels.

They differ from the plain layers in two ways. A layer's small operations are fused into Triton
kernels. And attention and MLPs do not add their results to the residual stream: the kernel of the
next norm sums them over the ranks, adds them and norms the total. Layers that a model family
defines in its own way stay plain, and the layers around them are fused. fused_quantised.py holds
the linear layers whose weights are packed.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.backends.cuda.attention_backends import AttentionBackend
from nanovllm.backends.cuda.cuda_graph import SIZES, size_for
from nanovllm.backends.cuda.fused_fp4 import FusedFp4Weight
from nanovllm.backends.cuda.fused_quantised import (
    FusedQuantised,
    joins,
    matrix_of,
    packed_experts,
    use_packed_kernels,
)
from nanovllm.backends.cuda.fused_recurrent import (
    FUSED_RECURRENT,
    FusedGatedConvolution,
    FusedGatedDeltaNet,
)
from nanovllm.backends.cuda.products import FASTEST, Products
from nanovllm.backends.cuda.triton import moe, router
from nanovllm.backends.cuda.triton.allreduce_norm import sum_add_rms_norm
from nanovllm.backends.cuda.triton.decode_attention import NormRopeStore, takes_qkv
from nanovllm.backends.cuda.triton.dispatch import MAX_ROWS
from nanovllm.backends.cuda.triton.elementwise import (
    add_rms_norm,
    embed_and_norm,
    multiply_by_sigmoid,
    norm_add_norm,
    qk_norm_rope_store,
    rms_norm,
)
from nanovllm.backends.cuda.triton.fp8_inputs import Rows, empty_rows, norm_and_quantise
from nanovllm.backends.cuda.triton.prefill_attention import TiledPrefill
from nanovllm.backends.cuda.triton.unnormed import Unnormed
from nanovllm.backends.quantised.layers import Quantised, QuantisedExperts
from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.context import AttentionMetadata, current_metadata
from nanovllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.gated_attention import GatedSelfAttention
from nanovllm.layers.gated_delta import GatedDeltaNet
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    SensitiveLinear,
    StackedLinear,
)
from nanovllm.layers.mlp import GatedMLP, gelu_tanh
from nanovllm.layers.moe import (
    ClampedSwiGLU,
    Experts,
    MixtureOfExperts,
    SharedExpertMixture,
    swiglu,
)
from nanovllm.layers.norm import RMSNorm, ShardedRMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.partial_rotary import (
    InterleavedRotaryEmbedding,
    NoRotaryEmbedding,
    PartialRotaryEmbedding,
)
from nanovllm.layers.rotary import QueryScalingRotaryEmbedding, RotaryEmbedding
from nanovllm.models.granite import GraniteLayer
from nanovllm.models.lfm2 import ConvolutionLayer, GatedConvolution
from nanovllm.models.post_norm import PostNormLayer, SandwichNormLayer
from nanovllm.models.transformer import Decoder, DecoderLayer, LinearAttentionLayer

MAX_HEAD_DIM = 256  # of the attention kernels: larger heads were not tried


def fuse(model: nn.Module, backend: AttentionBackend, products: Products = FASTEST) -> None:
    """Turn the model's layers into fused ones, where their class and options are known here.

    products: the products of linear layers whose weights are plain. Whether they are invariant
        decides on the kernels of packed weights, experts and sums over ranks, too.
    """
    for module in reversed(list(model.modules())):  # children before their parents
        use_packed_kernels(module, products.is_invariant)
        fused = fused_class(type(module))
        if fused is not None and (not hasattr(fused, "suits") or fused.suits(module)):
            module.__class__ = fused
            if isinstance(module, FusedSelfAttention):
                module.backend = backend
            if isinstance(module, (FusedLayer, FusedMixtureOfExperts)):
                module.prepare()
            if isinstance(module, TAKES_PRODUCTS):
                module.products = products


def fused_class(plain: type[nn.Module]) -> type[nn.Module] | None:
    """Return the fused class of a plain or quantised layer's class; None: the layer stays."""
    if not issubclass(plain, Quantised):
        return FUSED.get(plain)
    fused = FUSED.get(plain.__mro__[plain.__mro__.index(Quantised) + 1])
    if fused is None or not issubclass(fused, (FusedLinear, FusedRowParallelLinear)):
        return None
    if plain not in _fused_quantised:
        name = f"Fused{plain.__name__}"
        _fused_quantised[plain] = type(name, (FusedQuantised, fused, plain), {})
    return _fused_quantised[plain]


_fused_quantised: dict[type, type] = {}


class FusedRMSNorm(RMSNorm):
    """An RMSNorm in one kernel."""

    zero_centered = False

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


class FusedZeroCenteredRMSNorm(FusedRMSNorm, ZeroCenteredRMSNorm):
    """A norm that multiplies by 1 + weight, in one kernel."""

    zero_centered = True


class FusedShardedRMSNorm(ShardedRMSNorm):
    """A norm over all heads of a token, in one kernel if one rank has them all."""

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size > 1:
            return super().forward(x)
        return rms_norm(x.flatten(1).contiguous(), self.weight, self.eps).view(x.shape)


class FusedLinear(StackedLinear):
    """The products of fused linear layers. In its subclasses it comes before the plain layer."""

    products = FASTEST

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Multiply x [T, K] by the weight -> [T, N]. `out`: memory that the result may take."""
        return self.products.linear(x, self.weight, bias, out)


class FusedReplicatedLinear(FusedLinear, ReplicatedLinear):
    pass


class FusedSensitiveLinear(FusedLinear, SensitiveLinear):
    pass


class FusedMergedColumnParallelLinear(FusedLinear, MergedColumnParallelLinear):
    def gated(self, x: Tensor, gelu: bool, reader: nn.Module | None = None) -> Tensor:
        """Compute silu(gates) * ups, or with gelu: x [T, K] -> [T, N]. The weight is [2 N, K].

        reader: the layer that takes the result.
        """
        return self.products.gated_linear(x, self.weight, self.bias, gelu)

    def warmup_gated(self, gelu: bool, reader: nn.Module | None) -> None:
        """Launch the kernels of `gated` that only steps with prompts launch."""
        self.products.warmup_gated_linear(self.weight, self.bias, gelu)


class FusedQKVParallelLinear(FusedLinear, QKVParallelLinear):
    pass


class FusedRowParallelLinear(RowParallelLinear):
    """A row-parallel linear layer whose sum over the ranks can be left to the next norm."""

    products = FASTEST
    multiplier: float | None = None  # multiplies the result; None: 1

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.partial(x))

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Multiply x [T, K] by the weight -> [T, N]. `out`: memory that the result may take."""
        return self.products.linear(x, self.weight, bias, out)

    def partial(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute this rank's part of the sum. `out`: memory that the result may take."""
        result = self.product(x, self.bias_of_this_rank, out)
        return result if self.multiplier is None else result.mul_(self.multiplier)


class FusedLMHead(ParallelLMHead):
    """A head that pads its rows to the number of rows of a decode step."""

    products = FASTEST

    def forward(self, hidden: Tensor) -> Tensor:
        # cuBLAS has a kernel for every few numbers of rows, and took 20 to 40 ms to load one on an
        # H200. The kernels for decode steps are loaded already.
        rows = len(hidden)
        padding = (size_for(rows, SIZES) or rows) - rows
        if padding:
            hidden = F.pad(hidden, (0, 0, 0, padding))
        return self.products.linear(hidden, self.weight, None)[:rows]


class FusedSelfAttention(SelfAttention):
    """Self-attention that norms and rotates q and k and stores k and v in one kernel.

    The kernel does not know all norms: others are applied before it. In decode steps of few rows,
    the kernel of attention does its work, too.
    """

    backend: AttentionBackend
    o_proj: FusedRowParallelLinear

    @staticmethod
    def suits(plain: SelfAttention) -> bool:
        """Tell whether the kernels know the rotary embedding and heads of this size.

        Layers of a subclass are not in FUSED, and stay plain: those that norm values, whose values
        are their keys, or that share the keys and values of another layer.
        """
        return type(plain.rotary) in ROTARIES and plain.head_dim <= MAX_HEAD_DIM

    @property
    def output_proj(self) -> FusedRowParallelLinear:
        return self.o_proj

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.o_proj(self.mix(self.project(x), positions))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.qkv_proj(x),)

    def mix(self, projected: tuple[Tensor, ...], positions: Tensor) -> Any:
        (qkv,) = projected
        return self.heads(qkv, positions)

    def heads(self, qkv: Tensor, positions: Tensor) -> Any:
        """Compute the heads' results from qkv, overwriting it: [T, (H + 2G) D] -> [T, H D].

        They may be quantised for `heads_reader`.
        """
        metadata = current_metadata()
        q_weight, k_weight, eps, zero_centered = None, None, 0.0, False
        q_norm, k_norm = self.q_norm, self.k_norm
        if isinstance(q_norm, FusedRMSNorm) and type(k_norm) is type(q_norm):
            q_weight, k_weight, eps = q_norm.weight, k_norm.weight, q_norm.eps
            zero_centered = q_norm.zero_centered
        elif not type(q_norm) is type(k_norm) is nn.Identity:
            q, k, v = self.split_heads(qkv)
            qkv = torch.cat((q_norm(q), k_norm(k), v), dim=1).flatten(1)
        how = NormRopeStore(
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            cos_sin=self.rotary.cos_sin,
            positions=positions,
            slot_mapping=metadata.slot_mapping,
            zero_centered=zero_centered,
            interleaved=isinstance(self.rotary, InterleavedRotaryEmbedding),
        )
        is_decode = metadata.prefill is None and metadata.logits_indices is None
        rows = self.room_for_codes(qkv) if is_decode else None
        if (decode := self.backend.decode_qkv) and self.decodes_from_qkv(metadata, how):
            heads = decode(qkv, self.decode_kv(metadata), self.options, how, out=rows)
            return heads.flatten(1) if rows is None else rows
        q, k, v = qk_norm_rope_store(
            qkv,
            head_dim=self.head_dim,
            num_kv_heads=self.num_kv_heads,
            cache=self.kv_cache,
            **how._asdict(),
        )
        q = self.rotary.scale_queries(q, positions)
        if rows is not None:
            kv, prefix = self.decode_kv(metadata), metadata.shared_prefix_len
            return self.backend.decode(q, kv, self.options, shared_prefix_len=prefix, out=rows)
        return self.attend_stored(q, k, v, metadata).flatten(1)  # [T, H, D] -> [T, H D]

    @property
    def heads_reader(self) -> nn.Module | None:
        """The layer that takes the heads' results as they are; None: there is none."""
        return self.o_proj

    def room_for_codes(self, qkv: Tensor) -> Rows | None:
        """Make room for the results of a decode step in FP8; None: they are not quantised.

        The kernel of attention quantises them if `heads_reader` wants a scale for each head. On an
        H200, a layer of 160 rows with a KV cache in FP8 then took 1 to 2 us more. A product that
        adds to the residual stream quantises its row itself.
        """
        width = self.num_heads * self.head_dim
        most = MAX_ROWS if self.kv_cache.scales is None else 128
        if not self.backend.quantises or len(qkv) > most:
            return None
        reader: Any = self.heads_reader
        heads = qkv[:, :width]
        matrix = matrix_of(reader, heads)
        if matrix is None or matrix.sharing != self.head_dim:
            return None
        if reader.packed["weight"].can_add(heads):
            return None
        return empty_rows(len(qkv), width, matrix)

    def decodes_from_qkv(self, metadata: AttentionMetadata, how: NormRopeStore) -> bool:
        """Tell whether the kernel of attention may norm, rotate and store, too."""
        return (
            metadata.prefill is None
            and metadata.shared_prefix_len is None
            and not isinstance(self.rotary, QueryScalingRotaryEmbedding)
            and takes_qkv(
                metadata.num_decodes, self.num_heads // self.num_kv_heads, self.kv_cache, how
            )
        )

    def attend_stored(self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        decodes, prefill = metadata.num_decodes, metadata.prefill
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes:
            rows = slice(decodes)
            self.backend.decode(
                q[rows],
                self.decode_kv(metadata),
                self.options,
                shared_prefix_len=metadata.shared_prefix_len,
                out=out[rows],
            )
        if prefill is not None:
            # A TiledPrefill counts from the step's first token, the others from their own first.
            rows = slice(0 if isinstance(prefill, TiledPrefill) else decodes, None)
            kv = self.prefill_kv(k[rows], v[rows], prefill)
            self.backend.prefill(q[rows], kv, prefill, self.options, out=out[rows])
        return out


class FusedGatedSelfAttention(FusedSelfAttention, GatedSelfAttention):
    """Fused self-attention that multiplies its heads' results by gates in one more kernel."""

    heads_reader = None

    def mix(self, projected: tuple[Tensor, ...], positions: Tensor) -> Tensor:
        (qkv_and_gate,) = projected  # [T, (2H + 2G) D]
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        qkv, gate = qkv_and_gate.tensor_split([width], dim=1)
        return multiply_by_sigmoid(self.heads(qkv, positions), gate)


class FusedGatedMLP(GatedMLP):
    """A gated MLP that computes its activation in one kernel, or within the first product's."""

    gate_up_proj: FusedMergedColumnParallelLinear
    down_proj: FusedRowParallelLinear

    @staticmethod
    def suits(plain: GatedMLP) -> bool:
        """Tell whether the kernels know the activation and the products."""
        return (
            plain.activation in (F.silu, gelu_tanh)
            and isinstance(plain.gate_up_proj, FusedMergedColumnParallelLinear)
            and isinstance(plain.down_proj, FusedRowParallelLinear)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.group.all_reduce(self.partial(x))

    def partial(self, x: Any) -> Tensor:
        """Compute this rank's part of the sum. The result may take the memory of x."""
        return self.down_proj.partial(self.hidden(x), out=x if isinstance(x, Tensor) else None)

    def hidden(self, x: Any) -> Any:
        """Compute what down_proj multiplies."""
        return self.gate_up_proj.gated(x, self.activation is gelu_tanh, self.down_proj)

    def warmup(self) -> None:
        """Launch the kernels that only steps with prompts launch."""
        self.gate_up_proj.warmup_gated(self.activation is gelu_tanh, self.down_proj)


class FusedRouter(FusedReplicatedLinear):
    """The router of a FusedMixtureOfExperts. Its logits may come in parts."""

    def forward(self, x: Tensor) -> Any:
        if not self.products.is_invariant and router.suits(x, self.weight):
            return router.partial_logits(x, self.weight, self.bias)
        return super().forward(x)


class FusedMixtureOfExperts(MixtureOfExperts):
    """A mixture of experts in the kernels of triton/moe.py. The experts may be quantised."""

    products = FASTEST

    @staticmethod
    def suits(plain: MixtureOfExperts) -> bool:
        """Tell whether the kernels know the experts' gating and compute as their class does."""
        experts, kind = plain.experts, type(plain.experts)
        if isinstance(experts, QuantisedExperts):
            runs_plainly = kind.run is QuantisedExperts.run
            is_known = all(packed_experts(weight) for weight in experts.packed.values())
        else:
            runs_plainly, is_known = kind.run is Experts.run, True
        is_known &= experts.gating is swiglu or type(experts.gating) is ClampedSwiGLU
        return is_known and runs_plainly and kind.forward is Experts.forward

    def prepare(self) -> None:
        """Let the router hand on parts. Called once, when it has become a fused layer."""
        if type(self.gate) is FusedReplicatedLinear:
            self.gate.__class__ = FusedRouter

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """Compute this rank's part of the sum. The result does not take the memory of x."""
        return self.sum_experts(x)

    def sum_experts(self, x: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Compute this rank's part of the experts' sum.

        added: gates [T, 1] and a result [T, N]; sigmoid(gates) * result is added to the sum.
        """
        experts = self.experts
        gate_up_bias, down_bias = experts.biases_of_this_rank
        weights: dict[str, Any] = dict(gate_up=experts.gate_up_proj, down=experts.down_proj)
        if isinstance(experts, QuantisedExperts):
            weights["gate_up"] = packed_experts(experts.packed["gate_up_proj"])
            weights["down"] = packed_experts(experts.packed["down_proj"])
        return moe.moe(
            x,
            self.gate(x),
            **weights,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            top_k=self.top_k,
            renormalize=self.renormalize,
            clamped=experts.gating if isinstance(experts.gating, ClampedSwiGLU) else None,
            added=added,
            is_invariant=self.products.is_invariant,
        )

    def warmup(self, most: int) -> None:
        """Launch the kernels of woven experts for steps of up to `most` tokens.

        Those of other experts are compiled when a step first needs them.
        """
        experts = self.experts
        weight = experts.packed["gate_up_proj"] if isinstance(experts, QuantisedExperts) else None
        if isinstance(weight, FusedFp4Weight) and weight.is_woven:
            count, _, width = experts.gate_up_proj.shape
            for tokens in moe.woven_experts.warmup_sizes(count, self.top_k, most):
                dtype, device = weight.plain.dtype, weight.codes.device
                self.partial(torch.zeros(tokens, width, dtype=dtype, device=device))


class FusedSharedExpertMixture(FusedMixtureOfExperts, SharedExpertMixture):
    """A mixture of experts with a shared expert, which is a fused MLP."""

    shared_expert: FusedGatedMLP

    @staticmethod
    def suits(plain: MixtureOfExperts) -> bool:
        """Tell whether the kernels know the shared expert, and the others."""
        assert isinstance(plain, SharedExpertMixture)
        return type(plain.shared_expert) is FusedGatedMLP and FusedMixtureOfExperts.suits(plain)

    def warmup(self, most: int) -> None:
        super().warmup(most)
        # A shared expert's results are quantised by a kernel of their own.
        shared = self.shared_expert
        shared.gate_up_proj.warmup_gated(shared.activation is gelu_tanh, None)

    def partial(self, x: Tensor) -> Tensor:
        shared = self.shared_expert
        hidden = shared.gate_up_proj.gated(x, shared.activation is gelu_tanh)
        added = self.shared_expert_gate(x), shared.down_proj.partial(hidden)
        return self.sum_experts(x, added)


class FusedLayer(nn.Module):
    """A layer that FusedDecoder runs part by part. Its own forward is the plain layer's.

    Its mixer is the part in which tokens meet others: attention, or a layer with a state. A mixer
    has three parts: `project` computes each token by itself; `mix` takes the projections of all
    tokens; then comes `output_proj`.
    """

    mixer_name = "self_attn"
    mlp: Any  # FusedGatedMLP or FusedMixtureOfExperts

    # The names of the norms before attention, after attention, before the MLP and after the MLP.
    # None: the layer has no norm there.
    norm_names: tuple[str | None, ...]
    norms: tuple[FusedRMSNorm | None, ...]  # the norms of these names

    @classmethod
    def suits(cls, plain: nn.Module) -> bool:
        """Tell whether the layer's parts are fused and its norms are of one kind."""
        norms = [getattr(plain, name) for name in cls.norm_names if name]
        mixer = getattr(plain, cls.mixer_name)
        return (
            isinstance(mixer, (FusedSelfAttention, *FUSED_RECURRENT))
            and isinstance(mixer.output_proj, FusedRowParallelLinear)
            and isinstance(plain.mlp, (FusedGatedMLP, FusedMixtureOfExperts))
            and all(isinstance(norm, FusedRMSNorm) for norm in norms)
            and len({(norm.eps, norm.zero_centered) for norm in norms}) == 1
        )

    @property
    def mixer(self) -> Any:
        """A FusedSelfAttention, or one of FUSED_RECURRENT."""
        return getattr(self, self.mixer_name)

    @property
    def reader(self) -> nn.Module | None:
        """The layer that alone takes the input of the mixer; None: there may be several."""
        return self.mixer.qkv_proj if isinstance(self.mixer, FusedSelfAttention) else None

    def prepare(self) -> None:
        """Collect the norms. Called once, when the layer and its parts have become fused ones."""
        self.norms = tuple([getattr(self, name) if name else None for name in self.norm_names])


class FusedDecoderLayer(FusedLayer, DecoderLayer):
    """A pre-norm layer."""

    norm_names = ("input_layernorm", None, "post_attention_layernorm", None)


class FusedLinearAttentionLayer(FusedLayer, LinearAttentionLayer):
    """A pre-norm layer with a recurrent layer in the place of attention."""

    mixer_name = "linear_attn"
    norm_names = FusedDecoderLayer.norm_names


class FusedConvolutionLayer(FusedLayer, ConvolutionLayer):
    """A pre-norm layer with a convolution in the place of attention."""

    mixer_name = "conv"
    norm_names = FusedDecoderLayer.norm_names


class FusedGraniteLayer(FusedLayer, GraniteLayer):
    """A pre-norm layer whose output projections multiply their results."""

    norm_names = FusedDecoderLayer.norm_names
    forward = DecoderLayer.forward

    def prepare(self) -> None:
        super().prepare()
        self.mixer.output_proj.multiplier = self.mlp.down_proj.multiplier = self.multiplier


class FusedSandwichNormLayer(FusedLayer, SandwichNormLayer):
    """A layer with norms before and after attention and MLP."""

    norm_names = (
        "input_layernorm",
        "attention_output_norm",
        "post_attention_layernorm",
        "mlp_output_norm",
    )


class FusedPostNormLayer(FusedLayer, PostNormLayer):
    """A layer with norms after attention and MLP alone."""

    norm_names = (None, "attention_output_norm", None, "mlp_output_norm")


class FusedDecoder(Decoder):
    """A decoder that leaves additions to the residual stream to the norms.

    From one part to the next it passes two tensors: the last part's result, not yet summed over the
    ranks, and the residual stream without that result.
    """

    norm: FusedRMSNorm
    products = FASTEST
    # Whether a forward pass runs only the layers of `outline`, which launch every kernel of the
    # decoder.
    dry_run = False

    @staticmethod
    def suits(plain: Decoder) -> bool:
        """Tell whether the layers and the last norm are fused."""
        return isinstance(plain.norm, FusedRMSNorm) and all(
            isinstance(layer, FusedLayer) for layer in plain.layers
        )

    @property
    def fused_layers(self) -> list[FusedLayer]:
        """The layers that a forward pass runs."""
        if self.dry_run:
            return self.outline
        return [layer for layer in self.layers if isinstance(layer, FusedLayer)]

    @cached_property
    def outline(self) -> list[FusedLayer]:
        """The layers that a dry run runs, found once, because that takes milliseconds."""
        return layers_of_dry_run([layer for layer in self.layers if isinstance(layer, FusedLayer)])

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        indices = current_metadata().logits_indices
        layers = self.fused_layers
        x, residual = self.embed(input_ids, layers)
        for layer, next_norm, next_layer in zip(
            layers, self.following_norms(layers), [*layers[1:], None]
        ):
            mixed = layer.mixer.mix(layer.mixer.project(x), positions)
            if layer is layers[-1] and indices is not None:
                # No token attends to the last layer's result, so only the wanted rows are computed.
                x, residual = self.finish_layer(layer, mixed[indices], residual[indices], next_norm)
            else:
                reader = None if next_layer is None else next_layer.reader
                x, residual = self.finish_layer(layer, mixed, residual, next_norm, reader, out=x)
        return x

    def embed(self, input_ids: Tensor, layers: Sequence[FusedLayer]) -> tuple[Tensor, Tensor]:
        """Return (normed, residual), from which the first layer starts: [T] -> [T, hidden] each."""
        embedding, norm = self.embed_tokens, layers[0].norms[0]
        is_plain = type(embedding) is VocabParallelEmbedding and embedding.group.size == 1
        is_able = is_plain and len(input_ids) <= MAX_ROWS
        # Prompts of more tokens must get the same bits in this mode.
        if norm is not None and is_able and not self.products.is_invariant:
            return embed_and_norm(
                input_ids, embedding.weight, norm.weight, norm.eps, norm.zero_centered
            )
        residual = embedding(input_ids)
        return self.first_norm(layers)(residual), residual

    def first_norm(self, layers: Sequence[FusedLayer]) -> Callable[[Tensor], Tensor]:
        """Return the norm before the first layer's attention, or a copy function if it has none."""
        return layers[0].norms[0] or torch.clone

    def following_norms(self, layers: Sequence[FusedLayer]) -> list[FusedRMSNorm | None]:
        """List the norm that reads the residual stream after each layer."""
        return [*(layer.norms[0] for layer in layers[1:]), self.norm]

    def finish_layer(
        self,
        layer: FusedLayer,
        mixed: Tensor,
        residual: Tensor,
        next_norm: FusedRMSNorm | None,
        reader: nn.Module | None = None,
        out: Any = None,
    ) -> tuple[Any, Tensor]:
        """Run what follows a layer's `mix`, from its result on. Returns (normed, residual).

        reader: the layer that takes the normed result.
        out: [T, hidden], memory that intermediate results may take, if it is a tensor.
        """
        _, after_attention, before_mlp, after_mlp = layer.norms
        projection, mlp = layer.mixer.output_proj, layer.mlp
        if not isinstance(mlp, FusedGatedMLP):
            x = projection.partial(mixed, out if isinstance(out, Tensor) else None)
            x, residual = self.add_and_norm(x, residual, after_attention, before_mlp)
            return self.add_and_norm(mlp.partial(x), residual, after_mlp, next_norm, reader)
        x, residual = self.project_and_norm(
            *(projection, mixed, residual, after_attention, before_mlp, mlp.gate_up_proj), out=out
        )
        return self.project_and_norm(
            *(mlp.down_proj, mlp.hidden(x), residual, after_mlp, next_norm, reader), out=x
        )

    def project_and_norm(
        self,
        projection: FusedRowParallelLinear,
        x: Any,
        residual: Tensor,
        after: FusedRMSNorm | None,
        norm: FusedRMSNorm | None,
        reader: nn.Module | None,
        *,
        out: Any,
    ) -> tuple[Any, Tensor]:
        """Return what add_and_norm does of the projection of x.

        out: [T, hidden], memory that intermediate results may take, if it is a tensor.
        """
        if after is None and norm is not None and joins(projection, x, residual, reader):
            product: Any = projection
            stream = product.add(x, residual)
            return Unnormed(stream, norm.weight, norm.eps, norm.zero_centered), stream.total
        x = projection.partial(x, out if isinstance(out, Tensor) else None)
        return self.add_and_norm(x, residual, after, norm, reader)

    def add_and_norm(
        self,
        x: Tensor,
        residual: Tensor,
        after: FusedRMSNorm | None,
        norm: FusedRMSNorm | None,
        reader: nn.Module | None = None,
    ) -> tuple[Any, Tensor]:
        """Return (norm(total), total), where total = residual + after(sum of the ranks' x).

        A norm that is None changes nothing. The results may overwrite x and residual.
        reader: the layer that takes norm(total), which may be quantised for it.
        """
        # A group of several ranks has methods that ParallelGroup lacks: see
        # tensor_parallel/collectives.py.
        group: Any = self.embed_tokens.group
        if group.size > 1:
            # One kernel sums over the ranks, adds the residual and norms, but takes few rows alone,
            # and rounds the sum only with the residual. So a row's bits depend on whether it is
            # used, and thus on the number of rows.
            may_fuse = not self.products.is_invariant and after is None
            if may_fuse and norm is not None and not norm.zero_centered:
                if (rows := group.shared_rows(x)) is not None:
                    return sum_add_rms_norm(
                        x, residual, weight=norm.weight, eps=norm.eps, shared=rows
                    )
            x = group.all_reduce(x)
        if after is None and norm is not None and (matrix := matrix_of(reader, x)) is not None:
            rows = norm_and_quantise(
                x,
                residual,
                matrix,
                weight=norm.weight,
                eps=norm.eps,
                zero_centered=norm.zero_centered,
            )
            return rows, residual
        return add_summed_and_norm(x, residual, after, norm)


def add_summed_and_norm(
    x: Tensor, residual: Tensor, after: FusedRMSNorm | None, norm: FusedRMSNorm | None
) -> tuple[Tensor, Tensor]:
    """Compute FusedDecoder.add_and_norm of an x that is summed over the ranks already."""
    if after is None:
        assert norm is not None, "a layer norms what it reads or what it adds"
        return add_rms_norm(
            x, residual, weight=norm.weight, eps=norm.eps, zero_centered=norm.zero_centered
        )
    return norm_add_norm(
        x,
        residual,
        after=after.weight,
        weight=None if norm is None else norm.weight,
        eps=after.eps,
        zero_centered=after.zero_centered,
    )


def layers_of_dry_run(layers: list[FusedLayer]) -> list[FusedLayer]:
    """List the first layer of each kind, and the last layer, in their order.

    If quantised layers of other formats meet in the model than in this list, list all layers.
    """
    first: dict[tuple, FusedLayer] = {}
    for layer in layers:
        first.setdefault((kind_of(layer.mixer), formats_of(layer)), layer)
    outline = list(dict.fromkeys([*first.values(), layers[-1]]))
    return outline if meetings(outline) >= meetings(layers) else layers


def meetings(layers: list[FusedLayer]) -> set[tuple]:
    """Return the formats of each MLP and of the quantised layer that reads what follows the MLP.

    Both decide which kernels launch between two layers: see `joins` and `matrix_of`.
    """
    readers = [layer.reader for layer in layers[1:]]
    return {
        (formats_of(layer.mlp), formats_of(reader))  # type: ignore[arg-type]
        for layer, reader in zip(layers, readers)
        if isinstance(reader, FusedQuantised)
    }


def formats_of(module: nn.Module) -> tuple:
    """Return what decides, beside options, which kernels the parts of a module launch: their
    classes, and the formats and sizes of their weights.

    A checkpoint may have layers in several formats.
    """
    formats = []
    for part in module.modules():
        weights = [(weight.shape, weight.dtype) for weight in part.parameters(recurse=False)]
        formats.append((type(part), getattr(part, "scheme", None), *weights))
    return tuple(formats)


def kind_of(mixer: Any) -> tuple:
    """Return what decides, in one model, which kernels a layer's mixer launches."""
    if isinstance(mixer, FUSED_RECURRENT):
        return (type(mixer),)
    options = mixer.options
    has_sinks = options.sinks is not None
    sizes = mixer.head_dim, mixer.num_kv_heads
    return *sizes, options.window, options.softcap, has_sinks, type(mixer.rotary)


ROTARIES = (
    RotaryEmbedding,
    QueryScalingRotaryEmbedding,
    PartialRotaryEmbedding,
    InterleavedRotaryEmbedding,
    NoRotaryEmbedding,
)
TAKES_PRODUCTS = (
    FusedLinear,
    FusedRowParallelLinear,
    FusedLMHead,
    FusedMixtureOfExperts,
    FusedDecoder,
)
FUSED: dict[type[nn.Module], type[nn.Module]] = {
    RMSNorm: FusedRMSNorm,
    ZeroCenteredRMSNorm: FusedZeroCenteredRMSNorm,
    ShardedRMSNorm: FusedShardedRMSNorm,
    StackedLinear: FusedLinear,
    ReplicatedLinear: FusedReplicatedLinear,
    SensitiveLinear: FusedSensitiveLinear,
    MergedColumnParallelLinear: FusedMergedColumnParallelLinear,
    QKVParallelLinear: FusedQKVParallelLinear,
    RowParallelLinear: FusedRowParallelLinear,
    ParallelLMHead: FusedLMHead,
    SelfAttention: FusedSelfAttention,
    GatedSelfAttention: FusedGatedSelfAttention,
    GatedDeltaNet: FusedGatedDeltaNet,
    GatedConvolution: FusedGatedConvolution,
    GatedMLP: FusedGatedMLP,
    MixtureOfExperts: FusedMixtureOfExperts,
    SharedExpertMixture: FusedSharedExpertMixture,
    DecoderLayer: FusedDecoderLayer,
    LinearAttentionLayer: FusedLinearAttentionLayer,
    ConvolutionLayer: FusedConvolutionLayer,
    GraniteLayer: FusedGraniteLayer,
    SandwichNormLayer: FusedSandwichNormLayer,
    PostNormLayer: FusedPostNormLayer,
    Decoder: FusedDecoder,
}
