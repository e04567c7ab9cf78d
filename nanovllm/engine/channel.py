"""What the engine and the process of a rank say to each other, and the channel between them.

Messages are frozen dataclasses that cross whole; a channel keeps their order and sets no limit to their length.
"""

import pickle
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, StepResult


@dataclass(frozen=True, slots=True)
class Start:
    """To a rank, first of all: what to be. Answered by Ready; rank 0, which has no port to go to, says Listening before."""

    rank: int
    size: int
    port: int | None  # where rank 0 listens for the others
    runner_class: type
    config: Config
    hf_config: Any
    folder: str
    max_model_len: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Launch:
    """To a rank: start this step. Answered by Done, which on rank 0 has the step's result; on others it says: launched."""

    step: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Synchronize:
    """To a rank: finish what was launched, and forget the tokens not yet sent. Answered by Done."""

    step: int


@dataclass(frozen=True, slots=True)
class Listening:
    port: int


@dataclass(frozen=True, slots=True)
class Ready:
    num_blocks: int
    device: str


@dataclass(frozen=True, slots=True)
class Done:
    step: int
    result: StepResult | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank, last of all: what it raised."""

    error: str
    traceback: str
    is_users: bool  # a ValueError: what was asked for is wrong


class Channel:
    """One end of a socket pair. `timeout`: seconds that a message may take once it has begun; None: any."""

    HEADER = struct.Struct("<Q")

    def __init__(self, sock: socket.socket, timeout: float | None = None) -> None:
        sock.settimeout(timeout)
        self.sock = sock

    @classmethod
    def frame(cls, message: Any) -> bytes:
        """A message as it goes over the wire: once for all who get it."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        return cls.HEADER.pack(len(body)) + body

    def send(self, message: Any) -> None:
        self.sock.sendall(self.frame(message))

    def send_frame(self, frame: bytes) -> None:
        self.sock.sendall(frame)

    def receive(self) -> Any:
        """Wait for the next message. EOFError: the other end is closed."""
        (length,) = self.HEADER.unpack(self._read(self.HEADER.size))
        return pickle.loads(self._read(length))

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self.sock.recv_into(view)
            if count == 0:
                raise EOFError("the other end of the channel is closed")
            view = view[count:]
        return data

    def close(self) -> None:
        self.sock.close()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C until the block is done: an exception inside would cut a message in two, and the channel with it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield  # no handler of Python's runs in this thread
        return
    held = False

    def hold(*_: Any) -> None:
        nonlocal held
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)
