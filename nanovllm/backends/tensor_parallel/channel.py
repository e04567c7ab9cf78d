"""The channel between the engine and the process of a rank: it carries messages of bytes, whole and
in order, whatever their length. What they mean is in commands.py and answers.py.
"""

import socket
import struct
from contextlib import suppress

# `recv` makes room for as many bytes as it is asked for, and a message's length may be a lie.
MOST_AT_ONCE = 2**20


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
    def frame(cls, message: bytes) -> memoryview:
        """The bytes of a message on the wire. One frame serves all who get the message."""
        return memoryview(cls.HEADER.pack(len(message)) + message)

    def send(self, message: bytes) -> None:
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

    def receive(self) -> bytes:
        """Wait for the next message. Raises ChannelClosed if the other end is closed."""
        while missing := self._missing():
            self._parts.extend(map(self.sock.recv, (min(missing, MOST_AT_ONCE),)))
            if not self._parts[-1]:
                raise ChannelClosed
        data = b"".join(self._parts)
        self._parts.clear()
        return data[self.HEADER.size :]

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
