"""Mailbox: the messages that have come to this rank, and the receives that wait for them."""

from __future__ import annotations

import threading

from net.collectives.errors import CallsDiffer, RanksGone
from net.collectives.matching import Key, Matching, Message, Receive
from net.collectives.ticket import Ticket

EARLY_BYTES = 256 << 20
"""Bytes of messages that nobody has asked for yet; beyond this, senders wait. One message is always taken."""


class Mailbox:
    """Shared by the threads of all links of a group."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._matching = Matching()
        self._linked: set[int] = set()
        self._gone: dict[int, str] = {}
        self._abandoned: set[int] = set()
        self._least: dict[int, int] = {}  # channel -> tags below are over
        self._closed = False

    def add(self, rank: int) -> None:
        with self._changed:
            self._linked.add(rank)
            self._gone.pop(rank, None)
            self._abandoned.discard(rank)

    def abandon(self, rank: int) -> None:
        """The link to this rank is about to close: what it still reads waits for no room, and is not kept."""
        with self._changed:
            self._abandoned.add(rank)
            self._changed.notify_all()

    def begin(self, channel: int, tag: int) -> None:
        """Drop all messages of this channel with lower tags, also those that are still to come."""
        with self._changed:
            self._least[channel] = tag
            for message in [one for one in self._matching.early if one.key[0] == channel and one.key[1] < tag]:
                self._matching.forget(message)
            self._changed.notify_all()

    def post(self, source: int | None, key: Key, into: memoryview, facts: int = 0) -> tuple[Ticket, Receive]:
        """Receive a message of exactly len(into) bytes, whose facts are these."""
        ticket = Ticket()
        receive = Receive(source, key, (into, facts), ticket)
        with self._changed:
            message = self._matching.post(receive)
            if message is None and source is not None and source in self._gone:
                self._matching.cancel(receive)
                ticket.end(RanksGone(self._gone[source], [source]))
            elif message is not None and message.data is None:
                message.taker, ticket.source = receive, message.source
                message = None
            self._changed.notify_all()
        if message is not None:
            deliver(receive, message)
        return ticket, receive

    def cancel(self, receive: Receive, error: BaseException) -> bool:
        """False if its message has begun to arrive; otherwise no byte is written to its memory any more."""
        with self._changed:
            waited = self._matching.cancel(receive)
        if waited:
            receive.waiter.end(error)
        return waited

    def expect(self, source: int, key: Key, nbytes: int) -> Receive | Message:
        """The head of a message has come: where its bytes belong. May wait for room."""
        with self._changed:
            while True:
                if key[1] < self._least.get(key[0], key[1]):
                    return Message(source, key, nbytes)
                receive = self._matching.arrived(source, key)
                if receive is not None:
                    receive.waiter.source = source
                    return receive
                if source in self._abandoned:
                    return Message(source, key, nbytes)
                early = self._matching.early_bytes
                if self._closed or not early or early + nbytes <= EARLY_BYTES:
                    message = Message(source, key, nbytes)
                    self._matching.keep(message)
                    return message
                self._changed.wait()

    def complete(self, message: Message, data: bytes | bytearray, facts: int) -> None:
        """All bytes of an early message are here."""
        with self._changed:
            message.data, message.facts = data, facts
            receive = message.taker
        if receive is not None:
            deliver(receive, message)

    def lost(self, source: int, why: str, partial: Receive | Message | None) -> None:
        """No more messages come from this rank. `partial`: where the last one was going."""
        with self._changed:
            self._linked.discard(source)
            self._gone[source] = why
            receives = self._matching.lost(source, self._linked)
            if isinstance(partial, Receive):
                receives.append(partial)
            elif partial is not None:
                self._matching.forget(partial)
                if partial.taker is not None:
                    receives.append(partial.taker)
            self._changed.notify_all()
        for receive in receives:
            receive.waiter.end(RanksGone(why, [source]))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def deliver(receive: Receive, message: Message) -> None:
    into, _ = receive.into
    if check(receive, message.source, message.nbytes, message.facts):
        into[:] = message.data
        receive.waiter.source = message.source
        receive.waiter.end()


def check(receive: Receive, source: int, nbytes: int, facts: int) -> bool:
    """Whether the message is the one that was expected; the ticket ends with an error if not."""
    into, expected = receive.into
    if nbytes == len(into) and facts == expected:
        return True
    if nbytes != len(into):
        reason = f"rank {source} sent {nbytes:,} bytes where {len(into):,} are expected"
    else:
        reason = f"rank {source} called another collective, or the same with other sizes"
    receive.waiter.end(CallsDiffer(reason))
    return False
