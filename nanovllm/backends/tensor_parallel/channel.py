"""The messages between the engine and the process of a rank, and the channel that carries them.

Messages are frozen dataclasses. A channel delivers them whole and in order, whatever their length.
"""

import pickle
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, LogitsEdits, RunnerInfo, StepResult


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


@dataclass(frozen=True, slots=True)
class Ready:
    """From a rank: the model is loaded and the KV cache is allocated."""

    info: RunnerInfo


@dataclass(frozen=True, slots=True)
class Done:
    """From a rank: the command of this number is done."""

    step: int
    result: StepResult | np.ndarray | None = None
    error: str = ""  # of a task: the ValueError that it raised


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank, last of all: what it raised."""

    error: str
    traceback: str
    is_users: bool  # a ValueError: the user asked for something that cannot be


class ChannelClosed(Exception):
    """The other end of the channel is closed."""


class Channel:
    """One end of a socket pair.

    `timeout`: seconds that the other end may take to send the rest of a message, or to accept more
    of one; None: without limit.

    An interrupt (Ctrl-C) never cuts a message in two. Python raises it between two bytecodes, but
    not inside a call into C, so each call into C both moves bytes and records how many it moved.
    """

    HEADER = struct.Struct("<Q")

    def __init__(self, sock: socket.socket, timeout: float | None = None) -> None:
        sock.settimeout(timeout)
        self.sock = sock
        self._parts: list[bytes] = []  # of the message being received

    @classmethod
    def frame(cls, message: Any) -> memoryview:
        """The bytes of a message on the wire. One frame serves all who get the message."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        return memoryview(cls.HEADER.pack(len(body)) + body)

    def send(self, message: Any) -> None:
        frame = self.frame(message)
        sent: list[int] = []
        while self.send_some(frame, sent):
            pass

    def send_some(self, frame: memoryview, sent: list[int]) -> bool:
        """Send some of what is left of a frame; whether there is still more.

        `sent` lists the bytes that each call has sent of it, and grows by this call's.
        """
        sent.extend(map(self.sock.send, (frame[sum(sent) :],)))
        return sum(sent) < len(frame)

    def receive(self) -> Any:
        """Wait for the next message. Raises ChannelClosed if the other end is closed."""
        while missing := self._missing():
            self._parts.extend(map(self.sock.recv, (missing,)))
            if not self._parts[-1]:
                raise ChannelClosed
        data = b"".join(self._parts)
        self._parts.clear()
        return pickle.loads(memoryview(data)[self.HEADER.size :])

    def _missing(self) -> int:
        """Bytes still to come: of the header or, once that is complete, of the message."""
        have = sum(map(len, self._parts))
        if have < self.HEADER.size:
            return self.HEADER.size - have
        (length,) = self.HEADER.unpack_from(b"".join(self._parts[: self.HEADER.size]))
        return self.HEADER.size + length - have

    def close(self) -> None:
        """Close the channel for both ends, also where a forked process holds a copy of this one."""
        with suppress(OSError):  # the other end is gone
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
