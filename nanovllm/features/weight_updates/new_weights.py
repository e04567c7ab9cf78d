"""Give a model new weights, all of them or none.

They come one by one, maybe from a generator whose next tensor takes the place of the last. So each
rank first collects its part of them, in a plain model in the CPU's memory. Once that is filled, as
a checkpoint fills a model, it is copied into the model that runs, where its weights lie: whatever
knows their addresses goes on with the new ones.
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

from nanovllm.checks import shown
from nanovllm.engine.dtype import tensors_default_to
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.models import build_model
from nanovllm.models.transformer import CausalLM
from nanovllm.weights.loader import (
    check_coverage,
    checkpoint_name,
    left_out,
    model_weight_slices,
    some_of,
    tied_heads,
)
from nanovllm.weights.weight_slice import WeightSlice

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Kept:
    """What is kept for a runner."""

    arriving: "NewWeights | None" = None
    waiting: CausalLM | None = None  # the weights for a model that has none as it is asleep


_kept: WeakKeyDictionary[ModelRunner, Kept] = WeakKeyDictionary()


def kept(runner: ModelRunner) -> Kept:
    return _kept.setdefault(runner, Kept())


class NewWeights:
    """New weights, one by one, in a plain `model` that they fill."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        slices = list(model_weight_slices(model))
        check_coverage(model, slices)
        self._slices: dict[str, list[WeightSlice]] = {}
        for part in slices:
            self._slices.setdefault(part.name, []).append(part)
        # A tied head may come too. It must be the embedding, which may come after it.
        self._heads: dict[str, tuple[Any, WeightSlice]] = {}
        for path, head in tied_heads(model):
            embedding = next(part for part in slices if part.destination is head.weight)
            self._heads[f"{checkpoint_name(model, path)}.weight"] = head, embedding
        self._seen: set[str] = set()
        self._head_values: dict[str, Tensor] = {}

    @torch.inference_mode()
    def add(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError if the tensor has no place in the model, not its shape or dtype, or has
        come before.
        """
        name = self._name_in_checkpoint(name)
        if name in self._seen:
            raise ValueError(f"weights has {name} twice: give each tensor once")
        parts = self._slices.get(name, [])
        if name in self._heads:
            parts = [self._heads[name][1]]
        elif not parts:
            if name.endswith("rotary_emb.inv_freq") or left_out(self.model, [name]):
                return
            raise ValueError(
                f"weights has {name}, for which this model has no place: give the names of its "
                "checkpoint"
            )
        if tuple(tensor.shape) != parts[0].shape:
            raise ValueError(
                f"weights has {name} of shape {tuple(tensor.shape)}, not {parts[0].shape}: shapes "
                "must be those of the model that was loaded"
            )
        if tensor.dtype not in FLOATS:
            raise ValueError(
                f"weights has {name} in {tensor.dtype}, not one of {', '.join(map(str, FLOATS))}: "
                "convert it"
            )
        for part in parts:
            if name in self._heads:
                # A copy in any case: the caller may reuse the tensor's memory.
                values = torch.empty_like(part.destination)
                self._head_values[name] = values.copy_(tensor[part.index])
            else:
                part.destination.copy_(tensor[part.index])
        self._seen.add(name)

    def _name_in_checkpoint(self, name: str) -> str:
        """transformers has other names than checkpoints for parts of a model that also sees."""
        if name in self._slices or name in self._heads:
            return name
        if name.startswith("model.language_model."):
            other = name.replace("model.language_model.", "language_model.model.", 1)
        else:
            other = name.removeprefix("model.")
            if other == name:
                other = f"language_model.{name}"
        is_known = other in self._slices or other in self._heads or left_out(self.model, [other])
        return other if is_known else name

    def finish(self) -> None:
        """Raises ValueError unless all have come, and a tied head is the embedding."""
        if missing := self._slices.keys() - self._seen:
            raise ValueError(
                f"weights lacks {some_of(missing)}: give all tensors of the checkpoint"
            )
        for name, values in self._head_values.items():
            head, embedding = self._heads[name]
            if not torch.equal(values, head.weight):
                raise ValueError(
                    f"weights has {name} that is not {embedding.name}, to which this model ties "
                    "it: make a new LLM of a checkpoint with them"
                )


def update_weights(engine: LLMEngine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """See `LLM.update_weights`. The engine must have nothing to do."""
    runner = engine.runner
    runner.on_all_ranks(begin)
    try:
        for name, tensor in each_tensor(weights, engine.model_class):
            runner.on_all_ranks(add, name, tensor.dtype, tuple(tensor.shape), as_bytes(tensor))
        runner.on_all_ranks(finish)
        if engine.has_unfinished():  # the caller's iterable may use the LLM
            raise ValueError(
                "weights added requests that are unfinished: let them end, or add them later"
            )
    except BaseException:
        runner.on_all_ranks(discard)
        raise
    engine.reset()  # the prefix cache holds what the old weights computed
    runner.on_all_ranks(put_in_place)


def each_tensor(weights: Any, model_class: type[CausalLM]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the caller's iterable, as a checkpoint has them. Checks what they are."""
    remedy = "give pairs of name and tensor, such as model.state_dict().items()"
    try:
        pairs = iter(weights)
    except TypeError:
        raise TypeError(f"weights is {shown(weights)}: {remedy}") from None
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
            raise TypeError(f"weights has {shown(pair)}: {remedy}")
        name, tensor = pair
        if hasattr(tensor, "full_tensor"):
            raise TypeError(f"weights has {name} in shards: give its full_tensor()")
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"weights has {name} without plain values: give a dense tensor")
        if model_class.stacks_experts:
            yield name, tensor.detach()
        else:
            yield from unstacked(name, tensor.detach())


def unstacked(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """transformers holds all experts of a layer in two tensors, [E, 2 I, N] and [E, N, I], of which
    most checkpoints have three for each expert.
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
    """The values, in the CPU's memory, in a form that crosses to another process: NumPy does not
    have all dtypes. Of a view of a large tensor, only its own.
    """
    return to_cpu(tensor).contiguous().view(-1).view(torch.uint8).numpy()


def to_cpu(tensor: Tensor) -> Tensor:
    """From a GPU, to pinned memory: other memory is copied to by way of that, and comes page by
    page. PyTorch rounds its size up to a power of 2, and keeps it for the next tensor of this size.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


# What each rank does with its runner.


def begin(runner: ModelRunner) -> None:
    kept(runner).arriving = NewWeights(plain_model(runner))


def add(
    runner: ModelRunner, name: str, dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray
) -> None:
    arriving(runner).add(name, torch.from_numpy(data).view(dtype).view(shape))


def finish(runner: ModelRunner) -> None:
    arriving(runner).finish()


def discard(runner: ModelRunner) -> None:
    kept(runner).arriving = None


def put_in_place(runner: ModelRunner) -> None:
    new = arriving(runner).model
    if is_empty(runner.model):
        kept(runner).waiting = new
    else:
        runner.synchronize()
        undisturbed(copy_weights, new, runner.model)
        runner.synchronize()
    kept(runner).arriving = None


def undisturbed(function: Callable[..., None], *args: Any) -> None:
    """Call a function. Ctrl-C is held back until it is done, so that it is never done by half."""
    before = signal.getsignal(signal.SIGINT)
    # Ctrl-C reaches the main thread alone.
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


def arriving(runner: ModelRunner) -> NewWeights:
    new = kept(runner).arriving
    assert new is not None, "an update begins before anything is added"
    return new


def plain_model(runner: ModelRunner) -> CausalLM:
    """The runner's model, on the CPU, as it is before anything fills and transforms it."""
    with tensors_default_to(runner.dtype, torch.device("cpu")):
        model = build_model(runner.hf_config, runner.group, runner.max_model_len)
    if model.lm_head.tied and not runner.model.lm_head.tied:
        model.lm_head.untie()  # the checkpoint that was loaded has a head of its own
    return model.eval().requires_grad_(False)


def is_empty(model: nn.Module) -> bool:
    """Whether it is asleep and has no weights."""
    return next(model.parameters()).is_meta


@torch.inference_mode()
def copy_weights(source: CausalLM, target: CausalLM) -> None:
    """Copy those of a plain model to where another one's lie, which may have been transformed."""
    if target.lm_head.tied and not source.lm_head.tied:
        target.lm_head.untie()
    for path, plain in source.named_modules():
        layer: Any = target.get_submodule(path)
        if hasattr(layer, "take_weights"):  # it keeps them in a form of its own
            layer.take_weights(plain)
            continue
        for name, parameter in plain.named_parameters(recurse=False):
            layer.get_parameter(name).copy_(parameter)
