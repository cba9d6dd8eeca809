"""ConnectedDesk: a desk whose answering process was started by somebody else, and has come to this one over TCP.

The end of the connection is the end of that process, as far as the asking one can know. The kinds of such desks differ
in what else comes on it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

from net.channel.wire import Frame, FrameError
from net.errors import PeerLost, PeerRefused
from net.rounds.desk import Desk
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import Layout
from net.transfer.common.memory import Region


class ConnectedDesk(Desk, ABC):
    """The asking end. Owns the region and the connection, on which the other side has said that it is ready."""

    def __init__(self, region: Region, layout: Layout, wire: FrameSocket, ended: Callable[[str], None]) -> None:
        """`ended(why)` is called in a thread of this desk, once, when the connection has ended; not after `close`."""
        super().__init__(region, layout)
        self._wire, self._ended = wire, ended
        self._closing = False
        self._thread = threading.Thread(target=self._receive, name="rounds-receive", daemon=True)

    def tell(self, nodes: Sequence[str]) -> None:
        """HOST:PORT of all asking processes that share the answering one."""
        with suppress(PeerLost):  # the thread that receives sees the end too
            self._wire.post({"nodes": [*nodes]}, [])

    def close(self) -> None:
        self._closing = True
        self._wire.end()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._wire.close()
        super().close()

    @abstractmethod
    def _heard(self, frame: Frame) -> None:
        """In the thread of this desk, which the constructor starts at its end. Raises PeerLost, FrameError."""

    def _receive(self) -> None:
        try:
            for frame in self._wire.frames():
                self._heard(frame)
        except (PeerLost, PeerRefused, FrameError) as error:
            why = str(error)
        self._wire.end()
        if not self._closing:
            self._ended(why)
