"""ExchangeCalls: the collectives over the sockets between the ranks, for groups on more than one host.

Every call is one or two exchanges: a message to each member that needs one, a message from each that has one. Bytes
that a rank sends, for N bytes in and n ranks: all_reduce (n-1) N if that is small, else 2 N (n-1)/n (parts are reduced
by one rank each, then gathered); reduce_scatter and all_to_all N (n-1)/n; all_gather (n-1) N; broadcast (n-1) N at the
root, or 2 N in two steps if that is less and N is large.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence

from net.collectives import native, plan
from net.collectives.errors import RanksGone
from net.collectives.link import CALLS, Link
from net.collectives.mailbox import Mailbox
from net.collectives.matching import Receive
from net.collectives.shared import pointers
from net.collectives.ticket import Ticket

SPREAD_BYTES = 1 << 20
"""From here on, a broadcast to three or more others goes through all of them."""


class ExchangeCalls:
    """One rank's calls. One thread calls at a time; `stop`, `late` and `moved_ns` may be used by any thread."""

    def __init__(
        self, links: Mapping[int, Link], mailbox: Mailbox, ranks: Sequence[int], me: int, epoch: int, calls: int
    ) -> None:
        """`links`: by rank, of all members but this one, which is ranks[me]."""
        self._links, self._mailbox, self._ranks, self._me = dict(links), mailbox, list(ranks), me
        self._epoch, self.completed = epoch, calls
        mailbox.begin(CALLS, epoch)
        self._pending: list[tuple[int, Ticket]] = []  # rank and message, of the messages that the call waits for
        self._moved_ns = 0  # when one of them began or ended; 0: it waits for none
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def moved_ns(self) -> int:
        """When the running call last moved on, if only by some bytes, by the monotonic clock; 0 if none runs."""
        moved = self._moved_ns
        return moved and max([moved, *(self._links[rank].progressed_ns for rank in self.late())])

    def late(self) -> list[int]:
        """The ranks that the running call waits for."""
        return sorted({rank for rank, ticket in self._pending if not ticket.ended()})

    def barrier(self) -> None:
        empty = dict.fromkeys(self._others, (0, 0))
        self._exchange("barrier", (), empty, empty)
        self.completed += 1

    def all_reduce(self, given: int, into: int, count: int, dtype: str, op: str) -> None:
        plan.check_reduction(dtype, op)
        facts, nbytes = ("all_reduce", count, dtype, op), count * plan.WIDTHS[dtype]
        if plan.is_direct(nbytes, len(self._ranks)):
            self._reduce_from_all(facts, given, into, count, dtype, op)
            self.completed += 1
            return
        cuts = plan.parts(nbytes, len(self._ranks), plan.WIDTHS[dtype])
        self._reduce_parts(facts, [(given + at, n) for at, n in cuts], into + cuts[self._me][0], dtype, op)
        own = into + cuts[self._me][0], cuts[self._me][1]
        self._exchange("gathered", (), dict.fromkeys(self._others, own), self._but_me([(into + a, n) for a, n in cuts]))
        self.completed += 1

    def reduce(self, given: int, into: int, count: int, dtype: str, op: str, root: int) -> None:
        plan.check_reduction(dtype, op)
        facts, nbytes = ("reduce", count, dtype, op, root), count * plan.WIDTHS[dtype]
        if self._me == root:
            self._reduce_from_all(facts, given, into, count, dtype, op, send=False)
        else:
            self._exchange(*facts_of(facts), {root: (given, nbytes)}, {})
        self.completed += 1

    def reduce_scatter(self, given: Sequence[int], into: int, count: int, dtype: str, op: str) -> None:
        plan.check_reduction(dtype, op)
        nbytes = count * plan.WIDTHS[dtype]
        facts = ("reduce_scatter", count, dtype, op)
        self._reduce_parts(facts, [(address, nbytes) for address in given], into, dtype, op)
        self.completed += 1

    def all_gather(self, given: int, into: Sequence[int], nbytes: int) -> None:
        parts = [(address, nbytes) for address in into]
        self._exchange("all_gather", (nbytes,), dict.fromkeys(self._others, (given, nbytes)), self._but_me(parts))
        move(given, into[self._me], nbytes)
        self.completed += 1

    def gather(self, given: int, into: Sequence[int], nbytes: int, root: int) -> None:
        if self._me == root:
            self._exchange("gather", (nbytes, root), {}, self._but_me([(address, nbytes) for address in into]))
            move(given, into[root], nbytes)
        else:
            self._exchange("gather", (nbytes, root), {root: (given, nbytes)}, {})
        self.completed += 1

    def scatter(self, given: Sequence[int], into: int, nbytes: int, root: int) -> None:
        if self._me == root:
            self._exchange("scatter", (nbytes, root), self._but_me([(address, nbytes) for address in given]), {})
            move(given[root], into, nbytes)
        else:
            self._exchange("scatter", (nbytes, root), {}, {root: (into, nbytes)})
        self.completed += 1

    def broadcast(self, memory: int, nbytes: int, root: int) -> None:
        facts, size = (nbytes, root), len(self._ranks)
        if size < 4 or nbytes < SPREAD_BYTES:
            if self._me == root:
                self._exchange("broadcast", facts, dict.fromkeys(self._others, (memory, nbytes)), {})
            else:
                self._exchange("broadcast", facts, {}, {root: (memory, nbytes)})
            self.completed += 1
            return
        parts = [(memory + at, n) for at, n in plan.parts(nbytes, size, 1)]
        if self._me == root:
            self._exchange("broadcast", facts, self._but_me(parts), {})
        else:
            self._exchange("broadcast", facts, {}, {root: parts[self._me]})
        self._exchange("gathered", facts, dict.fromkeys(self._others, parts[self._me]), self._but_me(parts))
        self.completed += 1

    def all_to_all(
        self, given: Sequence[int], given_bytes: Sequence[int], into: Sequence[int], into_bytes: Sequence[int]
    ) -> None:
        outs = self._but_me(list(zip(given, given_bytes, strict=True)))
        ins = self._but_me(list(zip(into, into_bytes, strict=True)))
        self._exchange("all_to_all", (), outs, ins)
        move(given[self._me], into[self._me], min(given_bytes[self._me], into_bytes[self._me]))
        self.completed += 1

    @property
    def _others(self) -> list[int]:
        return [member for member in range(len(self._ranks)) if member != self._me]

    def _but_me(self, parts: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
        return {member: parts[member] for member in self._others}

    def _reduce_from_all(
        self, facts: tuple[object, ...], given: int, into: int, count: int, dtype: str, op: str, send: bool = True
    ) -> None:
        nbytes = count * plan.WIDTHS[dtype]
        room = [ctypes.create_string_buffer(max(1, nbytes)) if member != self._me else None for member in self._members]
        places = [given if one is None else ctypes.addressof(one) for one in room]
        sends = dict.fromkeys(self._others, (given, nbytes)) if send else {}
        self._exchange(*facts_of(facts), sends, self._but_me([(place, nbytes) for place in places]))
        reduce_into(into, places, count, dtype, op)

    def _reduce_parts(
        self, facts: tuple[object, ...], parts: Sequence[tuple[int, int]], into: int, dtype: str, op: str
    ) -> None:
        """Member i gets the reduction of what all gave for part i."""
        nbytes = parts[self._me][1]
        room = [ctypes.create_string_buffer(max(1, nbytes)) if member != self._me else None for member in self._members]
        places = [parts[self._me][0] if one is None else ctypes.addressof(one) for one in room]
        ins = self._but_me([(place, nbytes) for place in places])
        self._exchange(*facts_of(facts), self._but_me(parts), ins)
        reduce_into(into, places, nbytes // plan.WIDTHS[dtype], dtype, op)

    @property
    def _members(self) -> range:
        return range(len(self._ranks))

    def _exchange(
        self,
        kind: str,
        facts: tuple[object, ...],
        outs: Mapping[int, tuple[int, int]],
        ins: Mapping[int, tuple[int, int]],
    ) -> None:
        """Send `outs` and receive `ins`, by member: (address, bytes). Ends when all of them are through."""
        if self._stopped:
            raise RanksGone("the members of the group have changed")
        sign = plan.signature(kind, self._epoch, self.completed, *facts)
        posted = []
        for member, (address, nbytes) in ins.items():
            rank = self._ranks[member]
            posted.append((rank, *self._mailbox.post(rank, (CALLS, self._epoch), view(address, nbytes), sign)))
        sent = []
        for member, (address, nbytes) in outs.items():
            rank = self._ranks[member]
            sent.append((rank, self._links[rank].send(CALLS, self._epoch, view(address, nbytes), sign)))
        try:
            self._wait([(rank, ticket) for rank, ticket, _ in posted])
            self._wait(sent)
        finally:
            self._moved_ns = 0
            self._end_messages(posted, sent)

    def _end_messages(self, posted: Sequence[tuple[int, Ticket, Receive]], sent: Sequence[tuple[int, Ticket]]) -> None:
        """Nothing reads or writes the memory of a call that has failed: a message under way comes to its end, or its
        connection to an end."""
        under_way = [(rank, ticket) for rank, ticket in sent if not ticket.ended()]
        for rank, ticket, receive in posted:
            if not ticket.ended() and not self._mailbox.cancel(receive, RanksGone("the call ended early")):
                under_way.append((rank, ticket))
        for rank, ticket in under_way:
            self._links[rank].finish(ticket)

    def _wait(self, messages: list[tuple[int, Ticket]]) -> None:
        self._pending, self._moved_ns = messages, time.monotonic_ns()
        for _, ticket in messages:
            while not ticket.wait(0.02):
                if self._stopped:
                    raise RanksGone("the members of the group have changed")
            self._moved_ns = time.monotonic_ns()


def facts_of(facts: tuple[object, ...]) -> tuple[str, tuple[object, ...]]:
    return str(facts[0]), facts[1:]


def view(address: int, nbytes: int) -> memoryview:
    """Bytes at an address, writable."""
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def move(source: int, target: int, nbytes: int) -> None:
    if source != target and nbytes:
        ctypes.memmove(target, source, nbytes)


def reduce_into(into: int, places: Sequence[int], count: int, dtype: str, op: str) -> None:
    code = native.library().mc_reduce_buffers(
        into, pointers(places), len(places), count, plan.DTYPES.index(dtype), plan.OPS.index(op)
    )
    assert code == native.OK, code
