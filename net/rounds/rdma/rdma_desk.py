"""RdmaDesk: a RemoteDesk whose messages and answers are written by network cards.

Both sides have desks of the same layout, and each writes what the other one reads to the same place there
(net/rounds/rdma/mirror.py):

    asking side                                            answering side (rdma_outpost.py)
    head, filled parts, number of the message     ──>      into its desk
                              <──  rows of the answer, number of the answer

All else stays on the TCP connection as remote_desk.py has it: beats, the end of either side, names of nodes, and
messages with bytes that have no room in one (experts that move, between two steps), and what is pulled.
"""

from __future__ import annotations

from collections.abc import Callable

from net.channel.wire import FrameError, Header
from net.rounds import native
from net.rounds.desk import ASKED_AT, HEAD_AT, HEAD_WORDS, Desk
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import PAGE, Layout
from net.rounds.rdma.mirror import Mirror
from net.rounds.remote_desk import RemoteDesk
from net.transfer.common.memory import Region

HEAD = HEAD_AT, 8 * HEAD_WORDS


class RdmaDesk(RemoteDesk):
    """The asking end. Owns the mirror, which is connected."""

    def __init__(
        self,
        wire: FrameSocket,
        layout: Layout,
        bell: Region,
        mirror: Mirror,
        ended: Callable[[str], None],
        leaves: Callable[[], None] = lambda: None,
    ) -> None:
        """`ended`, `leaves`: as RemoteDesk has it."""

        def fenced(why: str) -> None:
            mirror.close()
            ended(mirror.broken or why)

        self._mirror = mirror
        super().__init__(wire, layout, bell, fenced, leaves, mirror.region)
        mirror.watch(self._landed, lambda why: wire.end())

    def ask(self, *head: int) -> None:
        Desk.ask(self, *head)
        parts = [(PAGE + at, nbytes) for at, nbytes in self.layout.parts(*head[2:4])]
        self._mirror.write([HEAD, *parts], ASKED_AT)

    def close(self) -> None:
        self._mirror.close()
        super().close()

    def _landed(self) -> None:
        self.queue(False)
        native.short().mr_answer_landed(self._bell.address)

    def _check(self, header: Header, nbytes: int) -> None:
        raise FrameError("an answer came over TCP, where cards write them")
