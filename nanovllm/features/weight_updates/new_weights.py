"""New weights for a running model, all of them or none.

The tensors come one by one, perhaps from a generator that writes each into the memory of the one
before it. So each rank first collects its part of the weights in a plain model in the CPU's memory.
New weights fill the plain model as a checkpoint does. Once it is full, its weights are copied to
where those of the running model lie, so everything that knows their addresses, such as CUDA graphs,
stays valid.
"""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.checks import short_repr
from nanovllm.engine.dtype import tensors_default_to
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.attention import SelfAttention
from nanovllm.models import build_model
from nanovllm.models.transformer import CausalLM
from nanovllm.weights.loader import (
    check_coverage,
    checkpoint_name,
    left_out,
    model_weight_slices,
    some_of,
    take_plain_weights,
    tied_heads,
)
from nanovllm.weights.weight_slice import WeightSlice, are_finite

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class PendingWeights:
    """The new weights of a runner that are not in its model yet."""

    incoming: "NewWeights | None" = None  # the weights of an update that is under way
    # The plain model of an update during sleep at level 2, when the runner's model has no weights.
    for_wake_up: CausalLM | None = None


_pending: WeakKeyDictionary[ModelRunner, PendingWeights] = WeakKeyDictionary()


def pending(runner: ModelRunner) -> PendingWeights:
    """Return the object that holds a runner's new weights; make an empty one if there is none."""
    return _pending.setdefault(runner, PendingWeights())


class NewWeights:
    """New weights that come one by one, and the plain `model` that they fill."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        slices = list(model_weight_slices(model))
        check_coverage(model, slices)
        self._slices: dict[str, list[WeightSlice]] = {}
        for part in slices:
            self._slices.setdefault(part.name, []).append(part)
        # A tied head may come, too. It must equal the embedding, which may come after it. So its
        # values are kept until the end.
        self._heads: dict[str, tuple[Any, WeightSlice]] = {}
        for path, head in tied_heads(model):
            embedding = next(part for part in slices if part.destination is head.weight)
            self._heads[f"{checkpoint_name(model, path)}.weight"] = head, embedding
        self._seen: set[str] = set()
        self._head_values: dict[str, Tensor] = {}

    @torch.inference_mode()
    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into its place in the plain model.

        Raises ValueError if the model has no place for the tensor, if its shape or dtype is wrong,
        if it has come before, or if it has NaN or infinite numbers.
        """
        name = self._name_in_checkpoint(name)
        if name in self._seen:
            raise ValueError(f"weights has {name} twice: give each tensor once")
        parts = self._slices.get(name, [])
        if name in self._heads:
            parts = [self._heads[name][1]]
        elif not parts:
            unread = ("rotary_emb.inv_freq", *self.model.unread_suffixes)
            if name.endswith(unread) or left_out(self.model, [name]):
                return
            raise ValueError(
                f"weights has {name}, for which this model has no place: give the names of its "
                "checkpoint, and plain tensors, which are quantised here if the model is"
            )
        is_number = parts[0].shape == () and tensor.numel() == 1
        if tuple(tensor.shape) != parts[0].shape and not is_number:
            raise ValueError(
                f"weights has {name} of shape {tuple(tensor.shape)}, not {parts[0].shape}: shapes "
                "must be those of the model that was loaded"
            )
        if tensor.dtype not in FLOATS:
            raise ValueError(
                f"weights has {name} in {tensor.dtype}, not one of {', '.join(map(str, FLOATS))}: "
                "convert it"
            )
        if parts[0].must_be_finite and not are_finite(tensor):
            raise ValueError(
                f"weights has {name} with NaN or infinite numbers: look for the training step that "
                "made them, and give the weights from before it"
            )
        for part in parts:
            if name in self._heads:
                # Always copy, because the caller may reuse the tensor's memory.
                values = torch.empty_like(part.destination)
                self._head_values[name] = values.copy_(tensor[part.index])
            else:
                part.fill(tensor[part.index])
        self._seen.add(name)

    def _name_in_checkpoint(self, name: str) -> str:
        """Return the name that the checkpoint has for a tensor of transformers.

        The names differ in models that take images as well as text.
        """
        others = [name]
        # The prefixes of the text model: those that transformers and that checkpoints have.
        prefixes = ("model.language_model.", "language_model.model.", "model.")
        if (prefix := next(filter(name.startswith, prefixes), None)) is not None:
            others += [other + name.removeprefix(prefix) for other in prefixes]
            others.append(name.removeprefix("model."))
        else:
            others.append(f"language_model.{name}")
        for other in others:
            if other in self._slices or other in self._heads or left_out(self.model, [other]):
                return other
        return name

    def finish(self) -> None:
        """Raise ValueError unless all tensors have come, and a tied head equals the embedding."""
        needed = {name for name, parts in self._slices.items() if parts[0].default is None}
        if missing := needed - self._seen:
            raise ValueError(
                f"weights lacks {some_of(missing)}: give all tensors of the checkpoint"
            )
        for name, values in self._head_values.items():
            head, embedding = self._heads[name]
            if not torch.equal(values, head.weight):
                raise ValueError(
                    f"weights has {name} with other values than {embedding.name}, but this model "
                    "ties the two: make a new LLM of a checkpoint that holds both"
                )


def update_weights(engine: LLMEngine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the weights of an engine that has nothing to do; see `LLM.update_weights`."""
    runner = engine.runner
    runner.on_all_ranks(begin)
    try:
        for name, tensor in checkpoint_tensors(weights, engine.model_class):
            runner.on_all_ranks(add, name, tensor.dtype, tuple(tensor.shape), as_bytes(tensor))
        runner.on_all_ranks(finish)
        if engine.has_unfinished():  # the caller's iterable may have used the LLM
            raise ValueError(
                "weights added requests that are unfinished: let them end, or add them later"
            )
    except BaseException:
        runner.on_all_ranks(discard)
        raise
    engine.reset()  # the prefix cache holds K and V that the old weights computed
    runner.on_all_ranks(put_in_place)


def checkpoint_tensors(weights: Any, model_class: type[CausalLM]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the caller's iterable, each as a checkpoint holds it.

    Raises TypeError for items that are not pairs of a name and a tensor, and for shards of a
    tensor; ValueError for tensors that are not dense.
    """
    remedy = "give pairs of name and tensor, such as model.state_dict().items()"
    try:
        pairs = iter(weights)
    except TypeError:
        raise TypeError(f"weights is {short_repr(weights)}: {remedy}") from None
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
            raise TypeError(f"weights has {short_repr(pair)}: {remedy}")
        name, tensor = pair
        if hasattr(tensor, "full_tensor"):
            raise TypeError(f"weights has {name} in shards: give its full_tensor()")
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"weights has {name} without plain values: give a dense tensor")
        if model_class.stacks_experts:
            yield name, tensor.detach()
        else:
            yield from unstack_experts(name, tensor.detach())


def unstack_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split a tensor that stacks all experts of a layer; yield any other tensor unchanged.

    transformers holds the experts of a layer in two tensors, gate_up_proj [E, 2 I, N] and down_proj
    [E, N, I]. Most checkpoints have three tensors for each expert.
    """
    path, _, kind = name.rpartition(".")
    if not path.endswith(".experts") or tensor.ndim != 3:
        yield name, tensor
    elif kind == "gate_up_proj" and tensor.shape[1] % 2 == 0:
        for expert, both in enumerate(tensor):
            gate, up = both.chunk(2)
            yield f"{path}.{expert}.gate_proj.weight", gate
            yield f"{path}.{expert}.up_proj.weight", up
    else:
        for expert, one in enumerate(tensor):
            yield f"{path}.{expert}.{kind}.weight", one


def as_bytes(tensor: Tensor) -> np.ndarray:
    """Return a tensor's values as bytes in the CPU's memory, which can go to another process.

    NumPy does not have all dtypes, so the values go as bytes. Of a view of a large tensor, only the
    values of the view go.
    """
    return to_cpu(tensor).contiguous().view(-1).view(torch.uint8).numpy()


def to_cpu(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU's memory; from a GPU, to pinned memory.

    A GPU copies to other memory by way of pinned memory, and the system provides that other memory
    page by page. PyTorch rounds the size of pinned memory up to a power of 2, and keeps the memory
    for the next tensor of this size.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


# Each rank calls the following functions with its runner.


def begin(runner: ModelRunner) -> None:
    """Begin an update with a plain model that is empty but for the scales of the KV cache."""
    new = NewWeights(plain_model(runner))
    keep_kv_scales(runner.model, new.model)
    pending(runner).incoming = new


def add(
    runner: ModelRunner, name: str, dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray
) -> None:
    """Add a tensor, given as the bytes of its values, to the update."""
    incoming(runner).add(name, torch.from_numpy(data).view(dtype).view(shape))


def finish(runner: ModelRunner) -> None:
    """Check that the update is complete."""
    incoming(runner).finish()
    keep_scales(runner.model, incoming(runner).model)


@torch.inference_mode()
def keep_scales(old: nn.Module, new: nn.Module) -> None:
    """Copy the parameters that plain weights do not determine, such as scales of inputs."""
    for path, layer in new.named_modules():
        for name in getattr(layer, "kept", ()):
            kept = old.get_submodule(path).get_parameter(name)
            if kept.is_meta:
                raise ValueError(
                    "weights are those of a model whose inputs are quantised with scales of its "
                    "checkpoint, and sleep has dropped these: call wake_up first"
                )
            layer.get_parameter(name).copy_(kept)


@torch.inference_mode()
def keep_kv_scales(old: nn.Module, new: nn.Module) -> None:
    """Copy the scales of the KV cache, which the tensors of an update may leave out."""
    for path, layer in new.named_modules():
        if isinstance(layer, SelfAttention) and layer.kv_scales is not None:
            layer.kv_scales.copy_(old.get_submodule(path).get_parameter("kv_scales"))


def discard(runner: ModelRunner) -> None:
    """Drop the update."""
    pending(runner).incoming = None


def put_in_place(runner: ModelRunner) -> None:
    """Copy the new weights into the runner's model, or keep them until the model wakes up."""
    new = incoming(runner).model
    if is_empty(runner.model):
        pending(runner).for_wake_up = new
    else:
        runner.synchronize()
        call_without_interrupt(copy_weights, new, runner.model)
        runner.synchronize()
    pending(runner).incoming = None


def call_without_interrupt(function: Callable[..., None], *args: Any) -> None:
    """Call a function, and put Ctrl-C off until it has returned, so that it never ends half-way."""
    before = signal.getsignal(signal.SIGINT)
    # Python handles Ctrl-C in the main thread alone, so other threads need no protection.
    if threading.current_thread() is not threading.main_thread() or before is None:
        function(*args)
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        function(*args)
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


def incoming(runner: ModelRunner) -> NewWeights:
    """Return the weights of the update that is under way."""
    new = pending(runner).incoming
    assert new is not None, "an update begins before anything is added"
    return new


def plain_model(runner: ModelRunner) -> CausalLM:
    """Build the runner's model on the CPU, neither filled with weights nor transformed."""
    with tensors_default_to(runner.dtype, torch.device("cpu")):
        model = build_model(
            runner.model_config, runner.group, runner.max_model_len, runner.exchange_layers
        )
    if model.lm_head.tied and not runner.model.lm_head.tied:
        model.lm_head.untie()  # the checkpoint that was loaded has a head of its own
    take_plain_weights(model)
    return model.eval().requires_grad_(False)


def is_empty(model: nn.Module) -> bool:
    """Return whether a model has no weights, as it has none during sleep at level 2."""
    return next(model.parameters()).is_meta


@torch.inference_mode()
def copy_weights(source: CausalLM, target: CausalLM) -> None:
    """Copy the weights of a plain model into another model, which may have been transformed."""
    if target.lm_head.tied and not source.lm_head.tied:
        target.lm_head.untie()
    for path, plain in source.named_modules():
        layer: Any = target.get_submodule(path)
        if hasattr(layer, "take_weights"):  # the layer keeps its weights in a form of its own
            layer.take_weights(plain)
            continue
        for name, parameter in plain.named_parameters(recurse=False):
            layer.get_parameter(name).copy_(parameter)
