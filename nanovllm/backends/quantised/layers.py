"""The exchange of a model's layers for quantised ones, before any weight has memory.

A quantised layer differs from its plain layer in the weight alone. The plain weight stays as a
tensor without memory, so the plain layer's `weight_slices` still say which part of which projection
the rank holds. Its packed weight turns each of these slices into slices of packed tensors.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from nanovllm.backends.quantised.config import Fp4, Fp8, Int8, Integers, Quantization, Scheme
from nanovllm.backends.quantised.fp4 import Fp4Weight
from nanovllm.backends.quantised.fp8 import Fp8Weight
from nanovllm.backends.quantised.int8 import Int8Weight
from nanovllm.backends.quantised.integers import IntegerWeight
from nanovllm.backends.quantised.packed import PackedWeight, piece_of
from nanovllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import (
    RowParallelLinear,
    SensitiveLinear,
    StackedLinear,
)
from nanovllm.layers.moe import Experts
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models.transformer import CausalLM
from nanovllm.weights.loader import checkpoint_name
from nanovllm.weights.weight_slice import WeightSlice

FORMATS: dict[type, Callable[..., PackedWeight]] = {
    Fp8: Fp8Weight,
    Integers: IntegerWeight,
    Fp4: Fp4Weight,
    Int8: Int8Weight,
}


class Quantised(nn.Module):
    """A mixin that stands before the class of a layer whose weights are packed."""

    packed: nn.ModuleDict  # the packed weights, by the names of the plain ones
    # Whether weights are made of plain tensors instead of read as they are packed.
    reads_plain: bool

    def multiply(
        self, name: str, x: Tensor, bias: Tensor | None, expert: int | None = None
    ) -> Tensor:
        """Multiply inputs [T, K] by the packed weight that is called `name`."""
        weight = self.packed[name]
        assert isinstance(weight, PackedWeight)
        return weight(x, bias, expert)

    def packed_of(self, part: WeightSlice) -> PackedWeight | None:
        """Return the packed weight that a slice of the plain layer belongs to."""
        if not part.destination.is_meta:
            return None  # a bias
        name = name_of_weight(self, part)
        weight = self.packed[name]
        assert isinstance(weight, PackedWeight)
        return weight

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        for part in super().weight_slices(path):  # type: ignore[misc]
            weight = self.packed_of(part)
            if weight is None:
                yield part
            elif self.reads_plain:
                yield from weight.plain_slices(part)
            else:
                yield from weight.packed_slices(piece_of(part, weight.plain))

    def unread_tensors(self, path: str) -> Iterator[tuple[str, Callable[[Tensor], Any] | None]]:
        """Yield the tensors that a checkpoint may have and that fill no parameter.

        Each comes with a check of its values, which raises ValueError; None: any values will do.
        """
        parts: list[WeightSlice] = list(super().weight_slices(path))  # type: ignore[misc]
        read = {part.name for part in parts}  # such as a bias of the layer
        for part in parts:
            if weight := self.packed_of(part):
                tensors = weight.unread(piece_of(part, weight.plain))
                yield from (one for one in tensors if one[0] not in read)


class QuantisedLinear(Quantised, StackedLinear):
    """Projections of one input, whose weight is packed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply("weight", x, self.bias)


class QuantisedRowParallelLinear(Quantised, RowParallelLinear):
    """A linear layer, split over the ranks by input, whose weight is packed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.multiply("weight", x, self.bias_of_this_rank))


class QuantisedExperts(Quantised, Experts):
    """The experts of a layer, whose weights are packed."""

    def run(self, expert: int, x: Tensor) -> Tensor:
        gate_up_bias, down_bias = (
            None if bias is None else bias[expert] for bias in self.biases_of_this_rank
        )
        gate, up = self.multiply("gate_up_proj", x, gate_up_bias, expert).chunk(2, dim=-1)
        return self.multiply("down_proj", self.gating(gate, up), down_bias, expert)


class QuantisedLMHead(Quantised, ParallelLMHead):
    """A head whose weight is packed.

    A tied head shares its parameter `weight` with the embedding, which looks up rows. Its packed
    weight is made of the embedding's tensor in the checkpoint.
    """

    embedding: str  # the name of the embedding in the checkpoint, if the head is tied

    def untie(self) -> None:
        self.tied = False
        free_weight(self, "weight")

    def forward(self, hidden: Tensor) -> Tensor:
        return self.multiply("weight", hidden, None)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        if not self.tied:
            yield from super().weight_slices(path)
            return
        weight = self.packed["weight"]
        assert isinstance(weight, PackedWeight)
        for part in VocabParallelEmbedding.weight_slices(self, self.embedding):
            yield from weight.plain_slices(part)


# The layers that are exchanged, and the names of their weights. A ReplicatedLinear is a
# StackedLinear, too, but stays plain, because `is_never_quantised` is set.
KINDS: tuple[tuple[type[nn.Module], type[Quantised], tuple[str, ...]], ...] = (
    (RowParallelLinear, QuantisedRowParallelLinear, ("weight",)),
    (StackedLinear, QuantisedLinear, ("weight",)),
    (Experts, QuantisedExperts, ("gate_up_proj", "down_proj")),
    (ParallelLMHead, QuantisedLMHead, ("weight",)),
)

# The subclass made for each class of a plain layer.
_quantised: dict[type, type] = {}


def name_of_weight(layer: nn.Module, part: WeightSlice) -> str:
    """Return the name of the plain weight that a slice of the plain layer belongs to."""
    if not isinstance(layer, Experts):
        return "weight"
    return "down_proj" if "down_proj" in part.name.split(".") else "gate_up_proj"


def use_quantised_layers(
    model: CausalLM, quantization: Quantization, *, reads_plain: bool = False
) -> None:
    """Replace the layers of a model whose weights are quantised, in place.

    The model has no weights yet. `reads_plain`: weights will be made of plain tensors.
    Raises ValueError for a layer whose projections have several formats, or one that cannot be
    split over the ranks.
    """
    model.weight_format = quantization.description
    if quantization.has_kv_scales:
        model.kv_format = "(the checkpoint has scales for kv_cache_dtype='fp8')"
        model.unread_suffixes = (".k_scale", ".v_scale")
    for path, module in list(model.named_modules()):
        for kind, quantised, names in KINDS:
            if not isinstance(module, kind) or getattr(module, "is_never_quantised", False):
                continue
            if quantization.is_made_here and isinstance(module, SensitiveLinear):
                continue
            if isinstance(module, ParallelLMHead) and module.tied:
                continue  # it has no weight of its own: see below
            layer: Any = module
            weights: dict[str, list[WeightSlice]] = {name: [] for name in names}
            for part in layer.weight_slices(checkpoint_name(model, path)):
                if not part.name.endswith("bias"):
                    weights[name_of_weight(layer, part)].append(part)
            scheme = common_scheme(
                [part for parts in weights.values() for part in parts], quantization
            )
            if scheme is not None:
                exchange(
                    layer, quantised, weights, scheme, reads_plain or quantization.is_made_here
                )
    head: Any = model.lm_head
    scheme = quantization.scheme_of("lm_head")
    if head.tied and isinstance(scheme, Int8):
        parts = list(VocabParallelEmbedding.weight_slices(head, "lm_head"))
        exchange(head, QuantisedLMHead, {"weight": parts}, scheme, reads_plain=True)
        head.embedding = checkpoint_name(model, "model.embed_tokens")


def common_scheme(parts: list[WeightSlice], quantization: Quantization) -> Scheme | None:
    """Return the format of all projections of a layer. Raises ValueError if it is not the same."""
    schemes = {
        part.name: quantization.scheme_of(part.name.removesuffix(".weight")) for part in parts
    }
    first, *others = schemes
    for other in others:
        if schemes[other] != schemes[first]:
            raise ValueError(
                f"config.json: quantization_config gives {first} and {other} different formats: "
                "they are one layer here; choose another checkpoint of the model"
            )
    scheme = schemes[first]
    is_stacked = len(parts[0].index) == 3
    is_mxfp4 = isinstance(scheme, Fp4) and not scheme.is_nvidia
    if scheme is not None and not quantization.is_made_here and is_stacked != is_mxfp4:
        raise ValueError(
            f"config.json: quantization_config gives {first} the format {scheme.description}: "
            "experts that a checkpoint holds in one tensor are read in MXFP4 alone, and no other "
            "weights are read in MXFP4; choose another checkpoint of the model"
        )
    return scheme


def exchange(
    layer: Any,
    quantised: type[Quantised],
    weights: dict[str, list[WeightSlice]],
    scheme: Scheme,
    reads_plain: bool,
) -> None:
    """Turn a plain layer without memory into a quantised one."""
    plain = type(layer)
    if plain not in _quantised:
        _quantised[plain] = type(f"Quantised{plain.__name__}", (quantised, plain), {})
    layer.__class__ = _quantised[plain]
    layer.reads_plain = reads_plain
    layer.packed = nn.ModuleDict()
    for name, parts in weights.items():
        weight = getattr(layer, name).detach()
        if not getattr(layer, "tied", False):
            free_weight(layer, name)
        layer.packed[name] = FORMATS[type(scheme)](
            weight, parts, scheme, getattr(layer, "group", ParallelGroup())
        )


def free_weight(layer: Any, name: str) -> None:
    """Replace a parameter of a layer by a tensor of its shape, which has no memory."""
    weight = getattr(layer, name).detach().to("meta")
    delattr(layer, name)
    # Code that takes the tensor for a weight fails at once, because it is on the meta device.
    setattr(layer, name, weight)
