"""Give the memory of a device back while an engine has nothing to do, and take it again.

Level 1 keeps the weights in the CPU's memory; on a CPU they stay where they are. Level 2 leaves the
model without any, and `wake_up` builds a new one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checks import as_integer, shown
from nanovllm.engine.errors import AsleepError
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.features.weight_updates.new_weights import (
    copy_weights,
    is_empty,
    kept,
    to_cpu,
    undisturbed,
)


def sleep(engine: LLMEngine, level: Any) -> None:
    """See `LLM.sleep`. The engine must have nothing to do."""
    number = as_integer(level)
    if number is None:
        raise TypeError(f"level is {shown(level)}: use 1 or 2")
    if number not in (1, 2):
        raise ValueError(f"level is {shown(level)}: use 1 to keep the weights, or 2 to forget them")
    if engine.is_asleep:
        raise AsleepError
    engine.reset()  # the prefix cache goes with the KV cache
    engine.is_asleep = True
    engine.runner.on_all_ranks(release, number)


def wake_up(engine: LLMEngine) -> None:
    """See `LLM.wake_up`. Does nothing if the engine is awake."""
    if engine.is_asleep:
        engine.runner.on_all_ranks(restore)
        engine.is_asleep = False


# What each rank does with its runner.


def release(runner: ModelRunner, level: int) -> None:
    undisturbed(_release, runner, level)


def _release(runner: ModelRunner, level: int) -> None:
    runner.synchronize()
    if level == 2:
        forget_weights(runner.model)
    else:
        move_weights(runner, to_cpu)
    runner.release()


def restore(runner: ModelRunner) -> None:
    """An error leaves it as it was."""
    if runner.kv_cache.numel():
        return  # an interrupt came when this had been done
    level = 2 if is_empty(runner.model) else 1
    new = kept(runner).waiting
    try:
        if level == 2:
            runner.load(partial(copy_weights, new) if new is not None else runner.read_weights)
        else:
            move_weights(runner, lambda tensor: tensor.to(runner.device))
        runner.allocate()
    except BaseException:
        release(runner, level)
        raise
    kept(runner).waiting = None


def forget_weights(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            nothing = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            setattr(module, name, nn.Parameter(nothing, requires_grad=False))


def move_weights(runner: ModelRunner, moved: Callable[[Tensor], Tensor]) -> None:
    """The parameters stay the same objects: layers may share one."""
    # Tensors made in inference mode could not take the place of others.
    with torch.inference_mode(False):
        for parameter in runner.model.parameters():
            parameter.data = moved(parameter.data)
