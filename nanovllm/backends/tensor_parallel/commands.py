"""The commands of the engine to its ranks, and the bytes that carry them.

Commands are pickled, because they hold functions and objects of any class. Only a rank unpickles
commands, and only those of the engine's process, which started the rank: they come over a socket
pair that no other process can open. The engine trusts its ranks' answers less; see answers.py.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, LogitsEdits
from nanovllm.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Start:
    """The first command to every rank: join the other ranks and build the runner.

    Every rank answers with Ready.
    """

    size: int  # the number of ranks
    store_path: str  # the path of the file through which the ranks find each other
    build_runner: Callable[..., Any]
    config: Config
    model_config: ModelConfig
    folder: str


@dataclass(frozen=True, slots=True)
class Launch:
    """A command to every rank: launch this step.

    Every rank answers with Done: rank 0 with the step's result, the others once they have launched
    the step.
    """

    step: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class ReadLogits:
    """A command to every rank: apply `edits` to the last step's logits, and read `rows`.

    Every rank answers with Done, rank 0 with an array [len(rows), V] float32.
    """

    step: int
    edits: LogitsEdits
    rows: list[int]


@dataclass(frozen=True, slots=True)
class SampleConstrained:
    """A command to every rank: sample the constrained rows of the last step.

    Every rank answers as it answers Launch.
    """

    step: int
    edits: LogitsEdits  # without logits processors, which the engine's process calls
    logits: dict[int, np.ndarray]  # row -> the logits that its processor returned


@dataclass(frozen=True, slots=True)
class Synchronize:
    """A command to every rank: finish all launched steps, and drop the results not yet sent.

    Every rank answers with Done.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Task:
    """A command to every rank: call `task(runner, *args)`.

    The engine sends it when it has the results of all steps. Every rank answers with Done.
    """

    step: int
    task: Callable[..., None]
    args: tuple[Any, ...]


Command = Start | Launch | ReadLogits | SampleConstrained | Synchronize | Task


def pack_command(command: Command) -> bytes:
    """Encode a command as bytes."""
    return pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)


def unpack_command(data: bytes) -> Command:
    """Decode a command. This can run any code, so `data` must come from the engine."""
    return pickle.loads(data)
