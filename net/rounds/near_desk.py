"""NearDesk: a desk in memory that is shared with a process of this host which was started by somebody else.

Messages, answers and beats go through the memory. The TCP connection on which the two have met stays open: its end is
the end of the other process, and what is neither message nor answer goes there, as remote_desk.py has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from net.channel.wire import FrameError
from net.errors import PeerLost, PeerRefused
from net.rounds.desk import Desk
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import Layout
from net.transfer.common.memory import Region


class NearDesk(Desk):
    """The asking end. Owns the region and the connection, on which the other side has said that it is ready."""

    def __init__(self, region: Region, wire: FrameSocket, layout: Layout, ended: Callable[[str], None]) -> None:
        """`ended(why)` is called in a thread of this desk, once, when the connection has ended; not after `close`."""
        super().__init__(region, layout)
        self._wire, self._ended = wire, ended
        self._closing = False
        wire.await_for(0.0)  # beats come through the memory
        self._thread = threading.Thread(target=self._receive, name="rounds-end", daemon=True)
        self._thread.start()

    def dismiss(self) -> None:
        with suppress(PeerLost):
            self._wire.post({"bye": True}, [])

    def tell(self, nodes: Sequence[str]) -> None:
        """As RemoteDesk.tell."""
        with suppress(PeerLost):
            self._wire.post({"nodes": [*nodes]}, [])

    def close(self) -> None:
        self._closing = True
        self._wire.end()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._wire.close()
        super().close()

    def _receive(self) -> None:
        try:
            for _ in self._wire.frames():
                raise PeerLost("the other side sent something else than messages through the memory")
        except (PeerLost, PeerRefused, FrameError) as error:
            why = str(error)
        self._wire.end()
        if not self._closing:
            self._ended(why)
