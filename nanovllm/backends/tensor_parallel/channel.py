"""The channel between the engine and the process of a rank.

A channel carries messages of bytes of any length, whole and in order. commands.py and answers.py
define what the messages mean.
"""

import socket
import struct
from contextlib import suppress

# `recv` allocates as many bytes as it is asked for, and the length in a header may be false.
MOST_AT_ONCE = 2**20


class ChannelClosed(Exception):
    """The other end of the channel is closed."""


class Channel:
    """One end of a socket pair.

    timeout: seconds that the other end may take to send the rest of a message, or to accept more of
    one. None: any time.

    An interrupt (Ctrl-C) never cuts a message in two. Python raises it between two bytecodes, but
    not inside a call into C, so each call into C both moves bytes and records how many it moved.
    """

    HEADER = struct.Struct("<Q")

    def __init__(self, sock: socket.socket, timeout: float | None = None) -> None:
        sock.settimeout(timeout)
        self.sock = sock
        self._parts: list[bytes] = []  # the parts received so far of the message under way

    @classmethod
    def frame(cls, message: bytes) -> memoryview:
        """Put the header before a message. One frame can be sent to several receivers."""
        return memoryview(cls.HEADER.pack(len(message)) + message)

    def send(self, message: bytes) -> None:
        """Send a message, and wait until the other end has accepted all of it."""
        frame = self.frame(message)
        sent: list[int] = []
        while self.send_some(frame, sent):
            pass

    def send_some(self, frame: memoryview, sent: list[int]) -> bool:
        """Send some of the rest of a frame, and return whether any of the frame is left.

        `sent` lists how many bytes of the frame each call has sent; this call appends its number.
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
        """Count the bytes still to come of the header or, once that is complete, of the message."""
        have = sum(map(len, self._parts))
        if have < self.HEADER.size:
            return self.HEADER.size - have
        (length,) = self.HEADER.unpack_from(b"".join(self._parts[: self.HEADER.size]))
        return self.HEADER.size + length - have

    def close(self) -> None:
        """Close the channel for both ends, even if a forked process holds a copy of this end."""
        with suppress(OSError):  # the other end may be gone
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
