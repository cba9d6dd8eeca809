"""Bulk calls: questions over a data connection, with bytes after the question or after its answer.

    bulk{id, k, b, n} + bytes ──>  data{id} + bytes ... ──>  tail{id, b} ──>      (bytes and tail only where n > 0)
           <── answer{id, b, n} + bytes  <── data{id} + bytes ...
           <── error{id, reason, code}
    cancel{id} ──>   <── cancelled{id}

A control message (net/channel/channel.py) copies its bytes twice at each end, and a transfer requires an earlier
message with their location. Here the answering node finds the location, and the bytes move from its memory directly
into the asking node's. The tail contains facts that the asker computes while the bytes are in flight: their checksums.
A question of one frame that already contains everything ("w") has no tail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from net.errors import RemoteError
from net.loop.deadlines import Deadline

Body = dict[str, Any]


class Source(Protocol):
    """Bytes in order, returned in pieces: net.transfer.common.spans.Cursor, or Views."""

    left: int

    def take(self, nbytes: int) -> list[memoryview]:
        """Views of the next `nbytes`. Raises ValueError beyond the end."""


class Views:
    """Returns the bytes of `views` in order."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.left = sum(map(len, views))
        self._views = views
        self._index = 0
        self._used = 0  # bytes of the current view

    def take(self, nbytes: int) -> list[memoryview]:
        """See Source."""
        if nbytes > self.left:
            raise ValueError(f"{nbytes} bytes requested, but only {self.left} remain")
        if nbytes == self.left and not self._used:
            self.left = 0
            return list(self._views[self._index :])
        self.left -= nbytes
        out: list[memoryview] = []
        while nbytes:
            piece = self._views[self._index][self._used : self._used + nbytes]
            out.append(piece)
            nbytes -= len(piece)
            self._used += len(piece)
            if self._used == len(self._views[self._index]):
                self._index += 1
                self._used = 0
        return out


NOTHING = Views(())

JOIN_MAX = 16 << 10  # bytes: for smaller views, a copy costs the sender less than a separate buffer


def joined(views: Sequence[memoryview]) -> Sequence[memoryview]:
    """The same bytes, in one buffer if the views are small."""
    if len(views) > 1 and max(map(len, views)) <= JOIN_MAX:
        return [memoryview(b"".join(views))]
    return views


class BulkCall:
    """One question, on the asking side. `expected`: bytes that will move; a guess if they are in the answer."""

    def __init__(self, kind: str, body: Body, expected: int) -> None:
        self.kind, self.body, self.expected = kind, body, expected
        self.sends = 0  # bytes of the question
        self.is_whole = False  # the question needs no tail; it has at most FRAME_BYTES
        self.answer: Body = {}
        self.moved = 0  # bytes of the answer that have arrived
        self._deadline: Deadline | None = None
        self._silence_s = 0.0

    def limit(self, deadline: Deadline, silence_s: float) -> None:
        """Arriving bytes extend the deadline: it limits silence, not the whole call."""
        self._deadline, self._silence_s = deadline, silence_s

    def begin(self) -> None:
        """The question is asked, or asked again after a connection broke: an earlier partial answer is void."""
        self.answer, self.moved = {}, 0

    def data(self) -> Source:
        """The question's bytes, from the first one. They do not change until the call has ended."""
        return NOTHING

    def sent(self, moved: int) -> None:
        """The first `moved` bytes of the question are on their way; called by a BlockingRail only."""

    def tail(self) -> Body:
        """The body of the tail; called when the bytes are in flight."""
        return {}

    def place(self, body: Body, nbytes: int) -> Source:
        """The destination of the bytes of an answer with this `body`. Raises RemoteError if they were not requested."""
        raise RemoteError(f"{nbytes} unexpected bytes: none were requested", "bad_answer")

    def received(self, moved: int) -> None:
        """The first `moved` bytes of the answer have arrived."""
        self.moved = moved
        if self._deadline is not None:
            self._deadline.extend(self._silence_s)


@dataclass(slots=True)
class Answer:
    """`views` do not change until `sent` is called; it is called once, even if the connection breaks. `regions`: those
    that the views belong to, if their owners may unregister them meanwhile: that ends the answer."""

    body: Body = field(default_factory=dict)
    views: Sequence[memoryview] = ()
    nbytes: int = 0
    sent: Callable[[], None] | None = None
    regions: Collection[str] = ()


class Receiving(Protocol):
    """A question whose bytes are arriving. Either `finish` or `drop` is called, once."""

    target: Source
    """The destination of the bytes."""

    regions: Collection[str]
    """Those that the destination belongs to, if their owners may unregister them meanwhile: that ends the question."""

    def finish(self, tail: Body) -> Answer:
        """All bytes have arrived. Returns an answer without bytes. Raises RemoteError, and BodyError for an invalid
        tail; then it has released everything."""

    def drop(self) -> None:
        """The asker is gone or has given up; nothing is written to `target` any more."""


Answerer = Callable[[str, Body], Answer | Coroutine[Any, Any, Answer]]
"""(peer id, body) of a question without bytes -> its answer. Raises RemoteError, BodyError."""

Receiver = Callable[[str, Body, int], Receiving]
"""(peer id, body, bytes) of a question with bytes. Raises RemoteError, BodyError."""


@dataclass(slots=True)
class Services:
    """The handlers of questions, by kind."""

    answers: dict[str, Answerer] = field(default_factory=dict)
    receives: dict[str, Receiver] = field(default_factory=dict)
