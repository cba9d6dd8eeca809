"""RankGroup: the collectives of several processes on raw memory.

On one host calls go through shared memory; if two ranks are on different hosts, or may not share memory, all calls of
the group go over sockets. Messages (`send`, `receive`) always go over sockets. net/collectives/epochs.py says what
follows when ranks are lost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from net.collectives import plan
from net.collectives.calls import Calls
from net.collectives.epochs import Epochs
from net.collectives.errors import CallsDiffer, RanksGone, RootGone
from net.collectives.exchange import view
from net.collectives.link import USER
from net.collectives.ticket import Ticket


class RankGroup(Epochs):
    """One rank's end. Collective calls may come from any thread; they run one after the other."""

    # --- collectives; lists have an entry per slot, of which only those of members count

    def barrier(self) -> None:
        self._call(lambda calls: calls.barrier())

    def all_reduce(self, given: int, into: int, count: int, dtype: str, op: str) -> None:
        plan.check_reduction(dtype, op)
        nbytes = count * plan.WIDTHS[dtype]
        kept = (given, nbytes) if given == into else None
        self._call(lambda calls: calls.all_reduce(given, into, count, dtype, op), kept)

    def reduce(self, given: int, into: int, count: int, dtype: str, op: str, root: int) -> None:
        plan.check_reduction(dtype, op)
        kept = (given, count * plan.WIDTHS[dtype]) if given == into else None
        self._call(lambda calls: calls.reduce(given, into, count, dtype, op, self._member(root)), kept)

    def reduce_scatter(self, given: Sequence[int], into: int, count: int, dtype: str, op: str) -> None:
        plan.check_reduction(dtype, op)
        kept = (into, count * plan.WIDTHS[dtype]) if into in given else None
        self._call(lambda calls: calls.reduce_scatter(self._of_members(given), into, count, dtype, op), kept)

    def all_gather(self, given: int, into: Sequence[int], nbytes: int) -> None:
        self._call(lambda calls: calls.all_gather(given, self._of_members(into), nbytes))

    def gather(self, given: int, into: Sequence[int], nbytes: int, root: int) -> None:
        def made(calls: Calls) -> None:
            outs = self._of_members(into) if root == self.rank else [0] * len(self.members)
            calls.gather(given, outs, nbytes, self._member(root))

        self._call(made)

    def scatter(self, given: Sequence[int], into: int, nbytes: int, root: int) -> None:
        def made(calls: Calls) -> None:
            ins = self._of_members(given) if root == self.rank else []
            calls.scatter(ins, into, nbytes, self._member(root))

        self._call(made)

    def broadcast(self, memory: int, nbytes: int, root: int) -> None:
        self._call(lambda calls: calls.broadcast(memory, nbytes, self._member(root)))

    def all_to_all(
        self, given: Sequence[int], given_bytes: Sequence[int], into: Sequence[int], into_bytes: Sequence[int]
    ) -> None:
        of = self._of_members
        self._call(lambda calls: calls.all_to_all(of(given), of(given_bytes), of(into), of(into_bytes)))

    # --- messages

    def send(self, memory: int, nbytes: int, rank: int, tag: int) -> Ticket:
        """The ticket ends when the memory may be reused. Raises RanksGone, ValueError for an unknown rank."""
        link = self._peers.links.get(rank)
        if link is None:
            self._unlinked(rank)
        assert link is not None
        return link.send(USER, tag, view(memory, nbytes))

    def receive(self, memory: int, nbytes: int, rank: int | None, tag: int) -> tuple[Ticket, Callable[[], object]]:
        """From any rank if `rank` is None. The second value gives up: the ticket then ends with RanksGone, or with the
        message if that has begun and its bytes go on moving."""
        if rank is not None and rank not in self._peers.links:
            self._unlinked(rank)
        ticket, receive = self._peers.mailbox.post(rank, (USER, tag), view(memory, nbytes))
        late = RanksGone(f"no message from {'any rank' if rank is None else f'rank {rank}'} came in time", [])

        def give_up() -> None:
            if not self._peers.mailbox.cancel(receive, late):
                link = self._peers.links.get(ticket.source)
                if link is not None:
                    link.finish(ticket)

        return ticket, give_up

    def _unlinked(self, rank: int) -> None:
        if rank == self.rank or not 0 <= rank < self.slots:
            raise ValueError(f"rank {self.rank} of {self.slots} can exchange no message with rank {rank}")
        raise RanksGone(self._peers.why.get(rank, f"rank {rank} is no member of the group"), [rank])

    # --- inside

    def _of_members(self, values: Sequence[int]) -> list[int]:
        return [values[rank] for rank in self.members]

    def _member(self, root: int) -> int:
        if root not in self.members:
            raise RootGone(f"rank {root} is no member of the group", [root])
        return self.members.index(root)

    def _call(self, made: Callable[[Calls], None], kept: tuple[int, int] | None = None) -> None:
        """`kept`: memory that the call reads and overwrites, which a second try needs as it was."""
        with self._turn:
            again = self.on_loss == "continue"
            saved = ctypes.string_at(*kept) if again and kept and kept[1] and len(self.members) > 1 else None
            while True:
                self._check()
                try:
                    if not self._peers.gone():
                        return made(self._calls)
                except RootGone:
                    raise
                except CallsDiffer as error:
                    if self.path == "sockets":  # messages of the call may still be under way
                        self._differ = str(error)
                    raise
                except RanksGone:
                    self._check()
                reason = self._peers.reason()
                self._broken = True
                self._peers.tell(self._peers.membership.report(self._calls.completed))
                if self.on_loss != "fail":
                    self._agree(whole=again)
                if not again:
                    raise reason
                if saved is not None and kept is not None:
                    ctypes.memmove(kept[0], saved, len(saved))
