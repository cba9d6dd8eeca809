"""Link: the stream socket between two ranks. It carries messages, and its end tells that the other process has ended.

A thread per link receives, straight into the memory of the receive that waits. Receiving never waits for sending, so
ranks that send to each other at once do not block each other.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from net.collectives.errors import CallsDiffer, RanksGone
from net.collectives.mailbox import Mailbox, check
from net.collectives.matching import Message, Receive
from net.collectives.ticket import Ticket

TIMEVAL = struct.Struct("ll")
HEAD = struct.Struct("<IqQQ")  # channel, tag, bytes, facts
BYE, NEWS, USER, CALLS = 0, 1, 2, 3  # channels; BYE: this rank leaves
NEWS_BYTES = 4096  # at most
INLINE_BYTES = 16 << 10  # sent in the caller's thread
PIECE_BYTES = 256 << 10
"""Sent or read at a time: whether a large message moves shows after each of them."""


class Link:
    """One end. `on_end(link, why)` is called once, in the link's thread or that of `finish`, unless `close` came first;
    `on_news(rank, bytes)` for what the other side says about the group itself."""

    def __init__(
        self,
        sock: socket.socket,
        rank: int,
        mailbox: Mailbox,
        on_end: Callable[[Link, str], None],
        on_news: Callable[[int, bytes], None],
        timeout_s: float,
    ) -> None:
        """`timeout_s`: without any progress of a message, after which the link ends."""
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6)))
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_host(sock, timeout_s)
        self.rank = rank
        self.progressed_ns = 0  # when bytes last went or came, by the monotonic clock
        self._sock, self._mailbox, self._on_end, self._on_news = sock, mailbox, on_end, on_news
        self._timeout_s = timeout_s
        self._closed = False
        self._left = False
        self._why = ""  # this end closed the link
        self._turn = threading.Condition()
        self._sending = False
        self._queue: deque[tuple[bytes, memoryview, Ticket]] = deque()
        mailbox.add(rank)
        self._threads = [
            threading.Thread(target=self._receive, name=f"rank-{rank}-receive", daemon=True),
            threading.Thread(target=self._send_queued, name=f"rank-{rank}-send", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, channel: int, tag: int, data: memoryview, facts: int = 0) -> Ticket:
        """The ticket ends when `data` may be reused."""
        ticket = Ticket()
        head = HEAD.pack(channel, tag, len(data), facts)
        with self._turn:
            if self._closed:
                ticket.end(RanksGone(f"the connection to rank {self.rank} is closed", [self.rank]))
                return ticket
            if self._sending or self._queue or len(data) > INLINE_BYTES:
                self._queue.append((head, data, ticket))
                self._turn.notify_all()
                return ticket
            self._sending = True
        self._send_one(head, data, ticket)
        return ticket

    def bye(self) -> None:
        self.send(BYE, 0, memoryview(b""))

    def close(self) -> None:
        """Ends both directions; tickets of messages that were not sent end with an error."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._mailbox.abandon(self.rank)  # the thread that receives may wait for room, and then sees no end
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._sock.close()

    def finish(self, ticket: Ticket) -> None:
        """Wait for the end of a message under way while bytes move. Without any for `timeout_s` the link ends, and the
        ticket with it. The time is counted in steps: it stands still while this process is stopped."""
        step_s, silent_s, seen_ns = self._timeout_s / 10, 0.0, -1
        with suppress(RanksGone, CallsDiffer):
            while not ticket.wait(step_s):
                silent_s = silent_s + step_s if self.progressed_ns == seen_ns else 0.0
                seen_ns = self.progressed_ns
                if silent_s >= self._timeout_s:
                    self._lose(f"rank {self.rank} stopped in the middle of a message")
                    return

    def _lose(self, why: str) -> None:
        with self._turn:
            ended, self._closed = self._closed, True
            if not ended:
                self._why = why
        self.close()
        if not ended:
            self._on_end(self, why)

    def _send_one(self, head: bytes, data: memoryview, ticket: Ticket) -> None:
        error: BaseException | None = None
        try:
            if len(data) <= INLINE_BYTES:
                self._write(memoryview(head + bytes(data)))
            else:
                self._write(memoryview(head))
                self._write(data)
        except OSError as reason:
            error = RanksGone(f"rank {self.rank} takes no more messages ({reason})", [self.rank])
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # part of a message may be out
        with self._turn:
            self._sending = False
            self._turn.notify_all()
        ticket.end(error)

    def _write(self, data: memoryview) -> None:
        while len(data):
            data = data[self._sock.send(data[:PIECE_BYTES]) :]
            self.progressed_ns = time.monotonic_ns()

    def _send_queued(self) -> None:
        while True:
            with self._turn:
                while not self._closed and (self._sending or not self._queue):
                    self._turn.wait()
                if self._closed:
                    break
                head, data, ticket = self._queue.popleft()
                self._sending = True
            self._send_one(head, data, ticket)
        for _, _, ticket in self._queue:
            ticket.end(RanksGone(f"the connection to rank {self.rank} is closed", [self.rank]))

    def _receive(self) -> None:
        head = bytearray(HEAD.size)
        going: Receive | Message | None = None
        try:
            while self._fill(memoryview(head)):
                channel, tag, nbytes, facts = HEAD.unpack(head)
                if channel == BYE:
                    self._left = True
                    continue
                if channel == NEWS:
                    news = bytearray(min(nbytes, NEWS_BYTES))
                    if not self._fill(memoryview(news)):
                        break
                    self._on_news(self.rank, bytes(news))
                    continue
                going = self._mailbox.expect(self.rank, (channel, tag), nbytes)
                if not self._take(going, nbytes, facts):
                    break
                going = None
            why = f"the process of rank {self.rank} has ended"
        except ConnectionError:
            why = f"the process of rank {self.rank} has ended"
        except (OSError, ValueError) as error:  # ValueError: no message of this protocol
            why = f"lost rank {self.rank}: {error}"
        if self._why:
            why = self._why
        elif self._left:
            why = f"rank {self.rank} has left the group"
        self._mailbox.lost(self.rank, why, going)
        with self._turn:
            ended, self._closed = self._closed, True
            self._turn.notify_all()
        if not ended:
            self._on_end(self, why)

    def _take(self, going: Receive | Message, nbytes: int, facts: int) -> bool:
        """Read the bytes of one message. False at the end of the stream."""
        if isinstance(going, Receive) and check(going, self.rank, nbytes, facts):
            if not self._fill(going.into[0]):
                return False
            going.waiter.end()
            return True
        data = bytearray(nbytes)
        if not self._fill(memoryview(data)):
            return False
        if isinstance(going, Message):
            self._mailbox.complete(going, data, facts)
        return True

    def _fill(self, into: memoryview) -> bool:
        """Read exactly this many bytes; False at the end of the stream."""
        while len(into):
            count = self._sock.recv_into(into[:PIECE_BYTES], 0, socket.MSG_WAITALL)
            if not count:
                return False
            self.progressed_ns = time.monotonic_ns()
            into = into[count:]
        return True


def watch_host(sock: socket.socket, timeout_s: float) -> None:
    """The kernel ends the connection if the other host does not answer for this long, also while nothing is sent."""
    idle_s = min(max(1, int(timeout_s / 4)), 32767)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(1000 * timeout_s), (1 << 31) - 1))
