"""Peers: the other ranks of a group as this process reaches them: sockets, segments, losses, and what they report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import orjson

from net import bodies
from net.collectives.errors import RanksGone
from net.collectives.link import NEWS, Link
from net.collectives.mailbox import Mailbox
from net.collectives.meeting import Meeting, Met
from net.collectives.membership import Membership, Removed, Report
from net.transfer.common.memory import Region


class Peers:
    """`changed`: notified when a rank is lost or has reported. Its lock guards `membership`."""

    def __init__(self, meeting: Meeting, rank: int, timeout_s: float, on_lost: Callable[[], None]) -> None:
        """`on_lost`: called after a loss, in any thread."""
        self.changed = threading.Condition()
        self.mailbox = Mailbox()
        self.links: dict[int, Link] = {}
        self.segments: dict[int, Region] = {}
        self.dropped: list[Region] = []  # segments of ranks that were cut off, for the owner to close
        self.membership = Membership(rank, 0, (rank,))
        self.why: dict[int, str] = {}
        self.removed_by: int | None = None
        self.meeting, self._rank, self._timeout_s, self._on_lost = meeting, rank, timeout_s, on_lost
        self._ahead: dict[int, Report] = {}

    def add(self, met: dict[int, Met]) -> None:
        for rank, one in met.items():
            with self.changed:
                self.why.pop(rank, None)
                if one.segment is not None:
                    self.segments[rank] = one.segment
                self.links[rank] = Link(one.sock, rank, self.mailbox, self._ended, self._news, self._timeout_s)

    def enter(self, epoch: int, members: tuple[int, ...]) -> None:
        """A new epoch. Ranks that are no members any more are cut off."""
        with self.changed:
            self.membership = Membership(self._rank, epoch, members)
            self.membership.lose(rank for rank in members if rank in self.why)
            apart = [rank for rank in self.links if rank not in members]
            for rank, report in self._ahead.items():
                with suppress(Removed):
                    self.membership.hear(rank, report)
            self._ahead.clear()
        for rank in apart:
            self.cut(rank)

    def cut(self, rank: int) -> None:
        link = self.links.pop(rank, None)
        if link is not None:
            link.close()
            self.mailbox.lost(rank, self.why.get(rank, f"rank {rank} is no member any more"), None)
        if (segment := self.segments.pop(rank, None)) is not None:
            self.dropped.append(segment)

    def lose(self, ranks: Iterable[int], why: str) -> None:
        """Give up on ranks, and tell the others."""
        with self.changed:
            new = [rank for rank in ranks if rank not in self.why]
            for rank in new:
                self.why[rank] = why
            lost = self.membership.lose(new)
            self.changed.notify_all()
        if lost:
            self._on_lost()

    def tell(self, report: Report) -> None:
        """Also to those that are gone for this rank: they may be alive, and must not go on by themselves."""
        data = orjson.dumps(bodies.encode(report))
        for rank in report.members:
            if rank in self.links:
                self.links[rank].send(NEWS, 0, memoryview(data))

    def gone(self) -> list[int]:
        with self.changed:
            return sorted(self.membership.gone)

    def reason(self) -> RanksGone:
        """Why calls fail."""
        with self.changed:
            if self.removed_by is not None:
                return RanksGone(f"rank {self.removed_by} has removed this rank ({self._rank}) from the group", [])
            gone = sorted(self.membership.gone)
            told = "; ".join(self.why.get(rank, f"others have lost rank {rank}") for rank in gone)
        return RanksGone(told or "the members of the group have changed", gone)

    def welcome(self, deadline: float) -> Report | None:
        """The report of a member that counts this rank among the members; None at the deadline."""
        with self.changed:
            while True:
                for report in self._ahead.values():
                    if self._rank in report.members:
                        return report
                if not self.wait_report(deadline):
                    return None

    def wait_report(self, deadline: float) -> bool:
        """With `changed` held: until something changes; False at the deadline."""
        return self.changed.wait(max(0.0, deadline - time.monotonic()))

    def still(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks whose messages have not moved for the timeout."""
        since = time.monotonic_ns() - 1e9 * self._timeout_s
        links = {rank: self.links.get(rank) for rank in ranks}
        return [rank for rank, link in links.items() if link is None or link.progressed_ns < since]

    def close(self) -> None:
        self.meeting.close()
        for link in self.links.values():
            link.bye()
        self.mailbox.close()
        for link in list(self.links.values()):
            link.close()
        self.links.clear()
        self.dropped += self.segments.values()
        self.segments.clear()

    def _ended(self, link: Link, why: str) -> None:
        if self.links.get(link.rank) is link:
            self.lose([link.rank], why)

    def _news(self, rank: int, data: bytes) -> None:
        report = bodies.decode(Report, orjson.loads(data))
        with self.changed:
            before = set(self.membership.gone)
            try:
                if report.epoch > self.membership.epoch:
                    self._ahead[rank] = report
                self.membership.hear(rank, report)
            except Removed:
                self.removed_by = rank
            lost = self.removed_by is not None or self.membership.gone != before
            self.changed.notify_all()
        if lost:
            self._on_lost()
