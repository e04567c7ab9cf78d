"""Sleep, in which an engine that has nothing to do gives its device's memory back until it wakes.

Level 1 keeps the weights in the CPU's memory; on a CPU they stay where they are. Level 2 drops the
weights, and `wake_up` loads the model again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checks import as_integer, short_repr
from nanovllm.engine.errors import AsleepError
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.features.weight_updates.new_weights import (
    call_without_interrupt,
    copy_weights,
    is_empty,
    pending,
    to_cpu,
)


def sleep(engine: LLMEngine, level: Any) -> None:
    """Put an engine that has nothing to do to sleep; see `LLM.sleep`."""
    number = as_integer(level)
    if number is None:
        raise TypeError(f"level is {short_repr(level)}: use 1 or 2")
    if number not in (1, 2):
        raise ValueError(
            f"level is {short_repr(level)}: use 1 to keep the weights, or 2 to forget them"
        )
    if engine.is_asleep:
        raise AsleepError
    engine.reset()  # the prefix cache goes with the KV cache
    engine.is_asleep = True
    engine.runner.on_all_ranks(release, number)


def wake_up(engine: LLMEngine) -> None:
    """Wake an engine up; see `LLM.wake_up`. This does nothing if the engine is awake."""
    if engine.is_asleep:
        engine.runner.on_all_ranks(restore)
        engine.is_asleep = False


# Each rank calls the following functions with its runner.


def release(runner: ModelRunner, level: int) -> None:
    """Give the memory of the weights and of the KV cache back."""
    call_without_interrupt(_release, runner, level)


def _release(runner: ModelRunner, level: int) -> None:
    runner.synchronize()
    if level == 2:
        forget_weights(runner.model)
    else:
        move_weights(runner, to_cpu)
    runner.release()


def restore(runner: ModelRunner) -> None:
    """Bring the weights back and allocate the KV cache. After an error the runner sleeps on."""
    if runner.kv_cache.numel():
        return  # the runner is awake: an interrupt came after an earlier call had restored it
    level = 2 if is_empty(runner.model) else 1
    new = pending(runner).for_wake_up
    try:
        if level == 2:
            runner.load(partial(copy_weights, new) if new is not None else runner.read_weights)
        else:
            move_weights(runner, lambda tensor: tensor.to(runner.device))
        runner.allocate()
    except BaseException:
        release(runner, level)
        raise
    pending(runner).for_wake_up = None


def forget_weights(model: nn.Module) -> None:
    """Replace each parameter of a model by one of the same shape that has no memory.

    The scales of the KV cache wait in the CPU's memory, because an update may leave them out.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name == "kv_scales":
                parameter.data = to_cpu(parameter.data)
                continue
            nothing = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            setattr(module, name, nn.Parameter(nothing, requires_grad=False))


def move_weights(runner: ModelRunner, moved: Callable[[Tensor], Tensor]) -> None:
    """Replace the values of each parameter by `moved(values)`.

    The parameters stay the same objects, because layers may share a parameter.
    """
    # Tensors made in inference mode could not become the data of parameters.
    with torch.inference_mode(False):
        for parameter in runner.model.parameters():
            parameter.data = moved(parameter.data)
