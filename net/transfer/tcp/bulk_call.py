"""Bulk calls: questions over a data connection, with bytes after the question or after its answer.

    bulk{id, k, b, n} + bytes ──>  data{id} + bytes ... ──>  tail{id, b} ──>      (bytes and tail only where n > 0)
           <── answer{id, b, n} + bytes  <── data{id} + bytes ...
           <── error{id, reason, code}
    cancel{id} ──>   <── cancelled{id}

A control message (net/channel/channel.py) costs two copies of its bytes at either end, and a transfer a message before
it that says where they lie. Here the one who answers finds that out, and the bytes go from its memory into the asker's.
The tail is what the asker knows only when the bytes are on their way, as their checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from net.errors import RemoteError
from net.loop.deadlines import Deadline

Body = dict[str, Any]


class Source(Protocol):
    """Bytes in order, handed out in pieces: net.transfer.common.spans.Cursor, or Views."""

    left: int

    def take(self, nbytes: int) -> list[memoryview]:
        """Views of the next `nbytes`; ValueError beyond the end."""


class Views:
    """The bytes of `views`, handed out in order."""

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

COPIED_BYTES = 16 << 10  # bytes: a buffer of its own costs the sender more than the copy of so many


def joined(views: Sequence[memoryview]) -> Sequence[memoryview]:
    """The same bytes in one buffer where they are many small ones."""
    if len(views) > 1 and max(map(len, views)) <= COPIED_BYTES:
        return [memoryview(b"".join(views))]
    return views


class BulkCall:
    """One question, as its asker has it. `expected`: bytes that will move, a guess where the answer has them."""

    def __init__(self, kind: str, body: Body, expected: int) -> None:
        self.kind, self.body, self.expected = kind, body, expected
        self.sends = 0  # bytes of the question
        self.answer: Body = {}
        self.moved = 0  # bytes of the answer that are in place
        self._deadline: Deadline | None = None
        self._silence_s = 0.0

    def limit(self, deadline: Deadline, silence_s: float) -> None:
        """The deadline moves on as bytes come: it is for silence, not for the whole."""
        self._deadline, self._silence_s = deadline, silence_s

    def begin(self) -> None:
        """It is asked, or asked again because a connection broke: what came of an answer before is void."""
        self.answer, self.moved = {}, 0

    def data(self) -> Source:
        """The question's bytes, from the first one. They do not change until the call is over."""
        return NOTHING

    def tail(self) -> Body:
        """Asked for once the bytes are on their way."""
        return {}

    def place(self, body: Body, nbytes: int) -> Source:
        """The answer begins with `body`: where its bytes go. Raises RemoteError when they are not what was asked."""
        raise RemoteError(f"{nbytes} unexpected bytes: none were requested", "bad_answer")

    def came(self, moved: int) -> None:
        """The first `moved` bytes of the answer are where they belong."""
        self.moved = moved
        if self._deadline is not None:
            self._deadline.extend(self._silence_s)


@dataclass(slots=True)
class Answer:
    """`views` do not change until `sent` is called, which happens once, whatever becomes of the connection."""

    body: Body = field(default_factory=dict)
    views: Sequence[memoryview] = ()
    nbytes: int = 0
    sent: Callable[[], None] | None = None


class Receiving(Protocol):
    """A question whose bytes are arriving. One of `finish` and `drop` is called, once."""

    target: Source
    """Where they go."""

    def finish(self, tail: Body) -> Answer:
        """All are there; the answer has no bytes. Raises RemoteError, and BodyError for a tail that is not as agreed:
        then nothing is held any more."""

    def drop(self) -> None:
        """The asker has gone or given up; nothing is written to `target` any more."""


Answerer = Callable[[str, Body], Answer | Coroutine[Any, Any, Answer]]
"""(peer id, body) of a question without bytes -> its answer. Raises RemoteError, BodyError."""

Receiver = Callable[[str, Body, int], Receiving]
"""(peer id, body, bytes) of a question with bytes. Raises RemoteError, BodyError."""


@dataclass(slots=True)
class Services:
    """Who answers what, by kind."""

    answers: dict[str, Answerer] = field(default_factory=dict)
    receives: dict[str, Receiver] = field(default_factory=dict)
