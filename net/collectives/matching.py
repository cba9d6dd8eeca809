"""Which message belongs to which receive: the first that fits, in the order in which they came. Pure.

A message is known from its head on, before its bytes have arrived. A receive may name its source, or take any.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, int]  # channel, tag


@dataclass(eq=False, slots=True)
class Receive:
    """One receive that waits for a message."""

    source: int | None
    key: Key
    into: Any  # where its bytes go; this module does not look at it
    waiter: Any = None


@dataclass(eq=False, slots=True)
class Message:
    """One message that came before its receive."""

    source: int
    key: Key
    nbytes: int
    data: Any = None  # once all its bytes are here
    taker: Receive | None = None  # a receive that waits for them
    facts: Any = None


@dataclass(slots=True)
class Matching:
    """Of one rank; a lock of the caller guards it."""

    waiting: list[Receive] = field(default_factory=list)
    early: list[Message] = field(default_factory=list)
    early_bytes: int = 0

    def post(self, receive: Receive) -> Message | None:
        """The message that came before; otherwise the receive waits. If its bytes are still on the way, the caller
        sets `taker`."""
        for message in self.early:
            if message.key == receive.key and receive.source in (None, message.source):
                self.early.remove(message)
                self.early_bytes -= message.nbytes
                return message
        self.waiting.append(receive)
        return None

    def arrived(self, source: int, key: Key) -> Receive | None:
        """The receive that a message's head belongs to."""
        for receive in self.waiting:
            if receive.key == key and receive.source in (None, source):
                self.waiting.remove(receive)
                return receive
        return None

    def keep(self, message: Message) -> None:
        """Nobody waits for the message yet."""
        self.early.append(message)
        self.early_bytes += message.nbytes

    def forget(self, message: Message) -> None:
        """Its bytes will never come."""
        if message in self.early:
            self.early.remove(message)
            self.early_bytes -= message.nbytes

    def cancel(self, receive: Receive) -> bool:
        """Whether it was still waiting."""
        if receive in self.waiting:
            self.waiting.remove(receive)
            return True
        return False

    def lost(self, source: int, members: set[int]) -> list[Receive]:
        """The receives that no message can reach any more: those from `source`, and those from any source if no other
        rank is in `members`."""
        gone = [one for one in self.waiting if one.source == source or (one.source is None and not members - {source})]
        self.waiting = [one for one in self.waiting if one not in gone]
        return gone
