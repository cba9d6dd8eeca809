"""RemoteDesk: a desk whose answering process is on another host, behind a TCP connection.

    asking side                                            answering side (outpost.py)
    {"m": number, "h": head} + the filled parts   ──>      writes them to its own desk, and rings its door
       "x": bytes of what comes behind the parts           writes it to where Outpost's `take` says
                              <──  {"a": number} + the rows of the answer
                              <──  {"b": true}             every 10 ms
                              <──  {"q": true or false}    the message waits for work of others, or does so no more
                              <──  {"leave": true}         it would like to end, and answers until
    {"bye": true}                 ──>                      no message follows
    {"nodes": addresses}          ──>                      the asking processes that share the answering one

The message is written to memory of this process as for a rank on this host, and nobody else needs to know the
difference: what arrives is put where a local process would have put it, and rings the same bell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from net.channel.wire import FrameError, Header
from net.errors import PeerLost, PeerRefused
from net.rounds.desk import Desk, desk_bytes
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import PAGE, Layout
from net.transfer.common.memory import Region


class RemoteDesk(Desk):
    """The asking end. Owns the connection, on which the other side has said that it is ready."""

    def __init__(
        self,
        wire: FrameSocket,
        layout: Layout,
        bell: Region,
        ended: Callable[[str], None],
        leaves: Callable[[], None] = lambda: None,
    ) -> None:
        """Both are called in a thread of this desk. `ended(why)` once, when the connection has ended; not after
        `close`. `leaves()` when the other side would like to end."""
        super().__init__(Region.private("desk of a rank elsewhere", desk_bytes(layout)), layout)
        self._wire, self._bell, self._ended, self._leaves = wire, bell, ended, leaves
        self._rows = 0  # of the message that is open
        self._closing = False
        wire.trust(self._place, self.live)  # an answer of megabytes holds up the beats behind it
        self._thread = threading.Thread(target=self._receive, name="rounds-receive", daemon=True)
        self._thread.start()

    def ask(self, *head: int) -> None:
        self.give((), *head)

    def give(self, more: Sequence[memoryview], *head: int) -> None:
        """As `ask`, with bytes that have no room in a message. They must not change until it has been answered."""
        super().ask(*head)
        rows, pairs = head[2:4]
        self._rows = rows
        memory = self.region.memory[PAGE:]
        parts = [memory[at : at + nbytes] for at, nbytes in self.layout.parts(rows, pairs)]
        header = {"m": self._asked, "h": list(head)} | ({"x": sum(map(len, more))} if more else {})
        with suppress(PeerLost):  # the thread that receives sees the end too
            self._wire.post(header, [*parts, *more])

    def dismiss(self) -> None:
        with suppress(PeerLost):
            self._wire.post({"bye": True}, [])

    def tell(self, nodes: Sequence[str]) -> None:
        """HOST:PORT of all asking processes that share the answering one."""
        with suppress(PeerLost):
            self._wire.post({"nodes": [*nodes]}, [])

    def close(self) -> None:
        self._closing = True
        self._wire.end()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._wire.close()
        super().close()

    def _place(self, header: Header, nbytes: int) -> Sequence[memoryview]:
        """The memory of an answer. Raises FrameError for anything else."""
        self._check(header, nbytes)
        begin = PAGE + self.layout.message_bytes
        return [self.region.memory[begin : begin + nbytes]]

    def _check(self, header: Header, nbytes: int) -> None:
        """Raises FrameError if this is not the answer to the open message."""
        fits = header.get("a") == self._asked and nbytes == self.layout.answer_part(self._rows)
        if not fits or self.idle:
            raise FrameError(f"{nbytes} bytes are no answer to message {self._asked}")

    def _receive(self) -> None:
        try:
            for frame in self._wire.frames():
                if "a" in frame.header:
                    if not frame.payload:  # nothing was placed, so nothing was checked
                        self._check(frame.header, 0)
                    self.queue(False)
                    self.answered(self._asked, self._bell)
                elif "b" in frame.header:
                    self.live()
                elif "q" in frame.header:
                    self.queue(frame.header["q"] is True and not self.idle)
                elif "leave" in frame.header:
                    self._leaves()
        except (PeerLost, PeerRefused, FrameError) as error:
            why = str(error)
        self._wire.end()
        if not self._closing:
            self._ended(why)
