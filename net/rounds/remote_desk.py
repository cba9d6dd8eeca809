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

and what is pulled, as connected_desk.py has it.
The message is written to memory of this process as for a rank on this host, and nobody else needs to know the
difference: what arrives is put where a local process would have put it, and rings the same bell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from net.channel.wire import Frame, FrameError, Header
from net.errors import PeerLost
from net.rounds.connected_desk import ConnectedDesk
from net.rounds.desk import desk_bytes
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import PAGE, Layout
from net.transfer.common.memory import Region


class RemoteDesk(ConnectedDesk):
    """The asking end."""

    def __init__(
        self,
        wire: FrameSocket,
        layout: Layout,
        bell: Region,
        ended: Callable[[str], None],
        leaves: Callable[[], None] = lambda: None,
        region: Region | None = None,
    ) -> None:
        """`ended(why)`: as ConnectedDesk has it. `leaves()` is called in the same thread, when the other side
        would like to end. `region`: of the desk, which belongs to this object from now on; None = new memory."""
        super().__init__(region or Region.private("desk of a rank elsewhere", desk_bytes(layout)), layout, wire, ended)
        self._bell, self._leaves = bell, leaves
        self._rows = 0  # of the message that is open
        wire.trust(self._place, self.live)  # an answer of megabytes holds up the beats behind it
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
        header = {"m": self.asked, "h": list(head)} | ({"x": sum(map(len, more))} if more else {})
        with suppress(PeerLost):  # the thread that receives sees the end too
            self._wire.post(header, [*parts, *more])

    def dismiss(self) -> None:
        with suppress(PeerLost):
            self._wire.post({"bye": True}, [])

    def _place(self, header: Header, nbytes: int) -> Sequence[memoryview]:
        """The memory of an answer, or of what is pulled. Raises FrameError for anything else."""
        if "pulled" in header:
            return self._room(header, nbytes)
        self._check(header, nbytes)
        begin = PAGE + self.layout.message_bytes
        return [self.region.memory[begin : begin + nbytes]]

    def _check(self, header: Header, nbytes: int) -> None:
        """Raises FrameError if this is not the answer to the open message."""
        fits = header.get("a") == self.asked and nbytes == self.layout.answer_part(self._rows)
        if not fits or self.idle:
            raise FrameError(f"{nbytes} bytes are no answer to message {self.asked}")

    def _heard(self, frame: Frame) -> None:
        if "a" in frame.header:
            if not frame.payload:  # nothing was placed, so nothing was checked
                self._check(frame.header, 0)
            self.queue(False)
            self.answered(self.asked, self._bell)
        elif "b" in frame.header:
            self.live()
        elif "q" in frame.header:
            self.queue(frame.header["q"] is True and not self.idle)
        elif "leave" in frame.header:
            self._leaves()
