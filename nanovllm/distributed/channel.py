"""What the engine and the process of a rank say to each other, and the channel between them.

Messages are frozen dataclasses that cross whole; a channel keeps their order and sets no limit to their length.
"""

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, RunnerInfo, StepResult


@dataclass(frozen=True, slots=True)
class Start:
    """To a rank, first of all: what to be. Rank 0 chooses a port and answers Listening; then each answers Ready."""

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
    """From a rank: the model is loaded and the KV cache is allocated."""

    info: RunnerInfo


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
    """One end of a socket pair. `timeout`: seconds that the other end may take to send the rest of a message, or to
    take more of one; None: any.

    Ctrl-C never cuts a message in two. It can come between any two steps of Python's, but not within a call of C's, so
    the bytes that a call moves are counted in that same call.
    """

    HEADER = struct.Struct("<Q")

    def __init__(self, sock: socket.socket, timeout: float | None = None) -> None:
        sock.settimeout(timeout)
        self.sock = sock
        self._parts: list[bytes] = []  # of the message being received

    @classmethod
    def frame(cls, message: Any) -> memoryview:
        """A message as it goes over the wire: made once for all who get it."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        return memoryview(cls.HEADER.pack(len(body)) + body)

    def send(self, message: Any) -> None:
        frame, sent = self.frame(message), []
        while self.send_some(frame, sent):
            pass

    def send_some(self, frame: memoryview, sent: list[int]) -> bool:
        """Send some of what the frame has left, and add its bytes to the counts in `sent`. Whether there is still more."""
        sent.extend(map(self.sock.send, (frame[sum(sent) :],)))
        return sum(sent) < len(frame)

    def receive(self) -> Any:
        """Wait for the next message, and take no byte of the one after. EOFError: the other end is closed."""
        while missing := self._missing():
            self._parts.extend(map(self.sock.recv, (missing,)))
            if not self._parts[-1]:
                raise EOFError("the other end of the channel is closed")
        data = b"".join(self._parts)
        self._parts.clear()
        return pickle.loads(memoryview(data)[self.HEADER.size :])

    def _missing(self) -> int:
        """Bytes that the message's header lacks or, once it is there, the message."""
        have = sum(map(len, self._parts))
        if have < self.HEADER.size:
            return self.HEADER.size - have
        (length,) = self.HEADER.unpack_from(b"".join(self._parts[: self.HEADER.size]))
        return self.HEADER.size + length - have

    def close(self) -> None:
        self.sock.close()
