"""Outpost: the answering end of a RemoteDesk. The process that answers uses an ordinary desk of its own host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from net.channel.wire import FrameError, Header
from net.errors import PeerLost, PeerRefused
from net.rounds.desk import BEAT_NS, HEAD_WORDS, Desk, Message, desk_bytes, new_bell
from net.rounds.door import parsed
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import PAGE, Layout
from net.transfer.common.memory import Region

Take = Callable[[list[int], int], Sequence[memoryview]]
Told = Callable[[list[str]], None]
Give = Callable[[list[int], int, int], tuple[memoryview, int] | None]
"""(name, begin, bytes) -> these bytes, which do not change, and their checksum; None if it is not here."""


def untaken(head: list[int], nbytes: int) -> Sequence[memoryview]:
    """No bytes can come with a message."""
    raise FrameError(f"{nbytes} bytes came that belong to no message")


def unheard(nodes: list[str]) -> None:
    """Which processes ask does not matter."""


def nothing(name: list[int], at: int, nbytes: int) -> tuple[memoryview, int] | None:
    """Nothing can be pulled from here."""
    return None


def pulled(give: Give, header: Header) -> tuple[Header, list[memoryview]]:
    """The answer to a frame {"pull": ...}. Raises FrameError."""
    match header:
        case {"pull": int(number), "name": [*name], "at": int(at), "n": int(nbytes)} if all(map(_is_int, name)):
            given = give(name, at, nbytes)
            return ({"pulled": number}, []) if given is None else ({"pulled": number, "sum": given[1]}, [given[0]])
    raise FrameError("a frame pulls nothing that has a name")


def _is_int(value: object) -> bool:
    return type(value) is int


def addresses(header: Header) -> list[str]:
    """Of a frame {"nodes": ...}. Raises FrameError."""
    nodes = header.get("nodes")
    if not isinstance(nodes, list) or not all(type(node) is str for node in nodes):
        raise FrameError("a frame names no nodes")
    try:
        for node in nodes:
            parsed(node)
    except ValueError as error:
        raise FrameError(f"a frame names no nodes: {error}") from None
    return nodes


class Outpost:
    """A context manager: inside, messages arrive at `desk` and beats leave. `ended` says why that is over."""

    def __init__(
        self,
        wire: FrameSocket,
        layout: Layout,
        take: Take = untaken,
        told: Told = unheard,
        give: Give = nothing,
        region: Region | None = None,
    ) -> None:
        """`wire`: nothing but messages comes on it from now on. `take(head, nbytes)`: memory for bytes that come with a
        message and have no room in it, called before the message arrives; raises FrameError for what cannot be.
        `told(nodes)`: HOST:PORT of the processes that ask here. `give`: what can be pulled. All three are called in a
        thread of this outpost. `region`: of the desk, which belongs to this object from now on; None = new memory."""
        self.desk = Desk(region or Region.private("desk", desk_bytes(layout)), layout)
        self.ended: str | None = None
        self._wire, self._bell, self._take, self._told = wire, new_bell("bell"), take, told
        self._give = give
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._receive, name="rounds-receive", daemon=True),
            threading.Thread(target=self._beat, name="rounds-beat", daemon=True),
        ]

    def __enter__(self) -> Self:
        self._wire.trust(self._place)
        self._wire.await_for(0.0)  # a node without work is silent; beats that nobody takes end the connection
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._wire.end()
        for thread in self._threads:
            thread.join()
        self._wire.close()
        self.desk.close()
        self._bell.close()

    def next_message(self, time_s: float) -> Message | None:
        """A message without an answer; None at the end of the time."""
        return self.desk.next_message(time_s)

    def answered(self, message: Message) -> None:
        """The answer to a message lies at the desk: send it. A connection that is broken shows in `ended`."""
        nbytes = self.desk.layout.answer_part(message.head[2])
        begin = PAGE + self.desk.layout.message_bytes
        self.desk.answered(message.number, self._bell)
        with suppress(PeerLost):
            self._wire.send({"a": message.number}, [self.desk.region.memory[begin : begin + nbytes]])

    def queue(self, waits: bool) -> None:
        """Say whether the message waits for work of others."""
        with suppress(PeerLost):
            self._wire.send({"q": waits})

    def leave(self) -> None:
        """This process would like to end. It answers messages until `ended`."""
        with suppress(PeerLost):
            self._wire.send({"leave": True})

    def _place(self, header: Header, nbytes: int) -> Sequence[memoryview]:
        """The memory of a message. Raises FrameError for anything else."""
        memory, head, more = self.desk.region.memory[PAGE:], self._head(header), header.get("x", 0)
        if type(more) is not int or more < 0:
            raise FrameError(f"{more} is no number of bytes")
        parts = [memory[at : at + size] for at, size in self._parts(header, head, nbytes - more)]
        return [*parts, *self._take(head, more)] if more else parts

    def _parts(self, header: Header, head: list[int], nbytes: int) -> list[tuple[int, int]]:
        """What the next message fills. Raises FrameError if this one of `nbytes` bytes is not the next."""
        if header["m"] != (last := self.desk.asked) + 1 or not self.desk.idle:
            raise FrameError(f"message {header['m']} came before message {last} was answered")
        try:
            parts = self.desk.layout.parts(head[2], head[3])
        except ValueError as error:
            raise FrameError(str(error)) from None
        if (filled := sum(size for _, size in parts)) != nbytes:
            raise FrameError(f"{nbytes} bytes are no message of {filled} bytes")
        return parts

    @staticmethod
    def _head(header: Header) -> list[int]:
        head = header.get("h")
        fits = isinstance(head, list) and 4 <= len(head) <= HEAD_WORDS and all(type(word) is int for word in head)
        if not fits or type(header.get("m")) is not int:
            raise FrameError("a frame is no message to a rank")
        return list(head or ())

    def _receive(self) -> None:
        try:
            for frame in self._wire.frames():
                if "bye" in frame.header:
                    raise PeerLost("the other side has let this one go")
                if "nodes" in frame.header:
                    self._told(addresses(frame.header))
                    continue
                if "pull" in frame.header:
                    self._wire.send(*pulled(self._give, frame.header))
                    continue
                head = self._head(frame.header)
                if not frame.payload:  # nothing was placed, so nothing was checked
                    self._place(frame.header, 0)
                self.desk.ask(*head)
        except (PeerLost, PeerRefused, FrameError) as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        """The first reason counts: the others follow from it."""
        self.ended = self.ended or why
        self._wire.end()

    def _beat(self) -> None:
        with suppress(PeerLost):
            while not self._stop.wait(BEAT_NS / 1e9):
                self._wire.send({"b": True})
