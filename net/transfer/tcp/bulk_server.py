"""The answering end of bulk calls (net/transfer/tcp/bulk_call.py) on one data connection."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from net.bodies import BodyError
from net.channel.connection import Connection
from net.channel.wire import Frame, FrameError, Header, nowhere
from net.errors import PeerLost, RemoteError
from net.loop.tasks import spawn
from net.transfer.tcp.bulk_call import Answer, Receiving, Services, Views
from net.transfer.tcp.coding import RAW_BYTES, Coding, Encode, land, place_coded
from net.transfer.tcp.pushing import at_once, push, send_frame

log = logging.getLogger("mooncake.net")

QUESTION_S = 45.0  # from the first of a question's bytes to its tail: until then memory is reserved for it
SENT_CHECK_S = 0.002  # between two checks whether the socket has an answer's bytes


class BulkServer:
    """Frames of the connection that belong to bulk calls."""

    def __init__(
        self, connection: Connection, services: Services, cut_short: Callable[[], None], coding: Coding | None = None
    ) -> None:
        """`cut_short` ends the connection and this server."""
        self._connection = connection
        self._coding = coding
        self._services = services
        self._cut_short = cut_short
        self._arriving: dict[int, tuple[Receiving, asyncio.TimerHandle]] = {}
        self._answering: dict[int, tuple[asyncio.Task[None], Collection[str]]] = {}  # with the regions that are sent
        # (bytes that the socket must have taken, callback then)
        self._unsent: deque[tuple[int, Callable[[], None]]] = deque()
        self._looking: asyncio.Handle | None = None
        self._ended = False

    # --- questions

    def place(self, header: Header, nbytes: int) -> Sequence[memoryview]:
        """The destination of the bytes of a question."""
        number = header["id"]
        if header["op"] == "bulk":
            self._begin(number, header)
        arriving, _ = self._arriving.get(number, (None, None))
        if arriving is None:
            return nowhere(nbytes)
        if RAW_BYTES in header:
            return place_coded(header, nbytes)
        if nbytes > arriving.target.left:
            raise FrameError(f"{nbytes} bytes arrived, but {arriving.target.left} were announced")
        return arriving.target.take(nbytes)

    def knows(self, number: int) -> bool:
        """Whether `number` is a question whose bytes are arriving."""
        return number in self._arriving

    def arrived(self, frame: Frame) -> None:
        """A complete frame of a question's bytes."""
        arriving, _ = self._arriving.get(frame.header["id"], (None, None))
        if arriving is not None and RAW_BYTES in frame.header:
            land(self._coding, self._connection.peer_id, frame, arriving.target)

    def asked(self, frame: Frame) -> None:
        """A complete frame `bulk`. A question without bytes is answered now."""
        header = frame.header
        if header.get("n"):  # `place` has begun it
            self.arrived(frame)
            if header.get("w"):
                self.tail({"id": header["id"]})
            return
        number, kind = header["id"], header["k"]
        try:
            answerer = self._services.answers.get(kind)
            if answerer is None:
                raise RemoteError(f"this node does not answer {kind!r}", "unknown kind")
            answer = answerer(self._connection.peer_id, header["b"])
        except Exception as error:
            self._fail(number, kind, error)
            return
        if not isinstance(answer, Answer):
            task = self._spawn(number, self._later(header, answer))
            task.add_done_callback(lambda _: answer.close())  # it may have been cancelled before it began
            return
        encode = self._encoder(header, answer)
        if at_once(self._connection, answer.nbytes, encode):
            try:
                self._send(number, answer, encode)
            finally:
                self._when_sent(answer)
        else:
            task = self._spawn(number, self._send_in_turns(number, answer, encode), answer.regions)
            task.add_done_callback(lambda _: self._when_sent(answer))

    def tail(self, header: Header) -> None:
        """The tail of a question, after all its bytes."""
        number = header["id"]
        arriving, timer = self._arriving.pop(number, (None, None))
        if arriving is None or timer is None:
            return  # the asker has given up
        timer.cancel()
        try:
            if arriving.target.left:
                arriving.drop()
                raise RemoteError(f"{arriving.target.left} bytes are missing", "bad_request")
            tail = header.get("b")
            answer = arriving.finish(tail if isinstance(tail, dict) else {})
            self._connection.send({"op": "answer", "id": number, "b": answer.body, "n": 0})
        except Exception as error:
            self._fail(number, "the end of a bulk call", error)

    def stop(self, number: int) -> None:
        """The asker has given up this question."""
        arriving, timer = self._arriving.pop(number, (None, None))
        if arriving is not None and timer is not None:
            timer.cancel()
            incoming = self._connection.decoder.incoming
            if incoming is not None and incoming.header.get("id") == number:
                self._connection.decoder.discard()
            arriving.drop()
        task, _ = self._answering.pop(number, (None, ()))
        if task is not None:
            task.cancel()

    def withdraw(self, region: str) -> None:
        """The region was unregistered: end the questions that write to it, and the answers that are read from it."""
        arriving = [number for number, (one, _) in self._arriving.items() if region in one.regions]
        sending = [number for number, (_, regions) in self._answering.items() if region in regions]
        for number in arriving + sending:
            self.stop(number)
            self._fail(number, "a bulk call", RemoteError(f"region {region!r} was unregistered", "unregistered"))

    def end(self) -> None:
        """Nothing more is sent or received. Idempotent."""
        self._ended = True
        for number in [*self._arriving, *self._answering]:
            self.stop(number)
        if self._looking is not None:
            self._looking.cancel()
        while self._unsent:
            self._unsent.popleft()[1]()

    def _begin(self, number: int, header: Header) -> None:
        kind = header["k"]
        try:
            receiver = self._services.receives.get(kind)
            if receiver is None:
                raise RemoteError(f"this node does not accept {kind!r}", "unknown kind")
            arriving = receiver(self._connection.peer_id, header["b"], header["n"])
        except Exception as error:
            self._fail(number, kind, error)
            return
        timer = asyncio.get_running_loop().call_later(QUESTION_S, self._too_late, kind)
        self._arriving[number] = arriving, timer

    def _too_late(self, kind: str) -> None:
        log.warning(
            "%s did not finish a %r within %g s: cutting its connection", self._connection.peer_id, kind, QUESTION_S
        )
        self._cut_short()

    # --- answers

    def _spawn(self, number: int, work: Coroutine[Any, Any, None], regions: Collection[str] = ()) -> asyncio.Task[None]:
        task = spawn(work, "bulk answer")
        self._answering[number] = task, regions
        task.add_done_callback(lambda done: self._forget(number, done))
        return task

    def _forget(self, number: int, done: asyncio.Task[None]) -> None:
        if self._answering.get(number, (None, ()))[0] is done:
            del self._answering[number]

    def _encoder(self, header: Header, answer: Answer) -> Encode | None:
        if self._coding is None:
            return None
        return self._coding.asked(self._connection.peer_id, header, answer.nbytes)

    async def _later(self, header: Header, answering: Coroutine[Any, Any, Answer]) -> None:
        """Answers the question with this header."""
        number = header["id"]
        try:
            answer = await answering
        except Exception as error:
            self._fail(number, header["k"], error)
            return
        try:
            await self._send_in_turns(number, answer, self._encoder(header, answer))
        finally:
            self._when_sent(answer)

    def _send(self, number: int, answer: Answer, encode: Encode | None) -> None:
        header = {"op": "answer", "id": number, "b": answer.body, "n": answer.nbytes}
        send_frame(self._connection, header, answer.views, answer.nbytes, encode)

    async def _send_in_turns(self, number: int, answer: Answer, encode: Encode | None) -> None:
        with suppress(PeerLost):
            if answer.nbytes:
                header = {"op": "answer", "id": number, "b": answer.body, "n": answer.nbytes}
                await push(self._connection, number, Views(answer.views), None, header, encode)
            else:
                self._send(number, answer, None)

    def _fail(self, number: int, kind: str, error: Exception) -> None:
        reason, code = f"internal error in {kind}", "internal"
        if isinstance(error, RemoteError):
            reason, code = error.reason, error.code
        elif isinstance(error, BodyError):
            reason, code = str(error), "bad_request"
        else:
            log.error("%r requested by %s failed", kind, self._connection.peer_id, exc_info=error)
        with suppress(PeerLost):
            self._connection.send({"op": "error", "id": number, "reason": reason, "code": code})

    def _when_sent(self, answer: Answer) -> None:
        """Notify the answer's owner when the socket has its bytes."""
        if answer.sent is None:
            return
        if self._ended:
            answer.sent()
            return
        self._unsent.append((self._connection.queued, answer.sent))
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        handed = self._connection.queued - self._connection.unsent()
        while self._unsent and self._unsent[0][0] <= handed:
            self._unsent.popleft()[1]()
        self._looking = asyncio.get_running_loop().call_later(SENT_CHECK_S, self._look) if self._unsent else None
