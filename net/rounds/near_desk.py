"""NearDesk: a desk in memory that is shared with a process of this host which was started by somebody else.

Messages, answers and beats go through the memory. The TCP connection on which the two have met stays open: its end is
the end of the other process, and the names of the nodes go there, as remote_desk.py has it, and what is pulled.
"""

from __future__ import annotations

from collections.abc import Callable

from net.channel.wire import Frame
from net.errors import PeerLost
from net.rounds.connected_desk import ConnectedDesk
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import Layout
from net.transfer.common.memory import Region


class NearDesk(ConnectedDesk):
    """The asking end. `region`: the other process has it too."""

    def __init__(self, region: Region, wire: FrameSocket, layout: Layout, ended: Callable[[str], None]) -> None:
        """`ended(why)`: as ConnectedDesk has it."""
        super().__init__(region, layout, wire, ended)
        wire.trust(self._room)
        wire.await_for(0.0)  # beats come through the memory
        self._thread.start()

    def _heard(self, frame: Frame) -> None:
        raise PeerLost("the other side sent something else than messages through the memory")
