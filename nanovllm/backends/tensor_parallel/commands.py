"""What the engine commands its ranks, and the bytes that carry it.

Commands are pickled: they hold functions and objects of any class. Only a rank unpickles them, and
only from the engine's process, which started it: they come over a socket pair that no other process
can open. What a rank answers is not to be trusted as much; see answers.py.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, LogitsEdits


@dataclass(frozen=True, slots=True)
class Start:
    """To every rank, first of all: join the others and build the runner. Answered by Ready."""

    size: int  # number of ranks
    store_path: str  # of the file through which the ranks find each other
    build_runner: Callable[..., Any]
    config: Config
    hf_config: Any
    folder: str


@dataclass(frozen=True, slots=True)
class Launch:
    """To every rank: start this step.

    Answered by Done: by rank 0 with the step's result, by the others once it is launched.
    """

    step: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class ReadLogits:
    """To every rank: the logits of rows of the last step that wait, edited so far.

    Answered by Done, by rank 0 with an array [len(rows), V] float32.
    """

    step: int
    edits: LogitsEdits
    rows: list[int]


@dataclass(frozen=True, slots=True)
class Constrain:
    """To every rank: complete the last step. Answered as Launch is."""

    step: int
    edits: LogitsEdits  # its processors are here
    logits: dict[int, np.ndarray]  # what they gave


@dataclass(frozen=True, slots=True)
class Synchronize:
    """To every rank: finish what was launched, and drop the results not yet sent.

    Answered by Done.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Task:
    """To every rank: do `task(runner, *args)`, once all steps have been waited for.

    Answered by Done, by every rank.
    """

    step: int
    task: Callable[..., None]
    args: tuple[Any, ...]


Command = Start | Launch | ReadLogits | Constrain | Synchronize | Task


def pack_command(command: Command) -> bytes:
    return pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)


def unpack_command(data: bytes) -> Command:
    """Read a command. It can run any code: `data` must come from the engine."""
    return pickle.loads(data)
