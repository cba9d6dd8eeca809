"""Near: two processes of one host that have met over TCP go on in shared memory.

The asking process opens a Unix socket in a folder that only its user can enter, and says where. The other one connects
there, and gets the descriptors of memory. Who cannot (another container, another user) stays with TCP.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from net.errors import PeerLost

GIVE_S = 10.0
MOST_DESCRIPTORS = 4


class Handover:
    """The giving side, at `path`. Close it when nobody comes any more. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / secrets.token_hex(8))
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.bind(self.path)
            self._sock.listen(1)
        except OSError:
            self._sock.close()
            raise
        self._sock.settimeout(GIVE_S)

    def give(self, descriptors: Sequence[int]) -> None:
        """To the process that has connected. Raises PeerLost."""
        try:
            there, _ = self._sock.accept()
            with there:
                socket.send_fds(there, [b"."], descriptors)
        except OSError as error:
            raise PeerLost(f"shared memory could not be handed over: {error}") from None

    def close(self) -> None:
        self._sock.close()
        with suppress(OSError):
            Path(self.path).unlink()


def reach(path: str) -> socket.socket | None:
    """The taking side: a connection; None if there is no way from here."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(GIVE_S)
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return sock


def take(sock: socket.socket, count: int) -> list[int]:
    """The descriptors, `count`, which belong to the caller. Raises PeerLost."""
    descriptors: list[int] = []
    try:
        _, descriptors, _, _ = socket.recv_fds(sock, 1, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise PeerLost(f"shared memory could not be taken over: {error}") from None
    if len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise PeerLost("the node did not hand over its memory")
    return descriptors
