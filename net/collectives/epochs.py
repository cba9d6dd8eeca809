"""Epochs: the members of a group, and how they change: by losses, by agreement among those that are left, by joining.

A rank is gone when its process ends, when it leaves, and when a call waits for it longer than `timeout_s` and nothing
of its messages moves. The call that runs then ends with RanksGone, and `on_loss` says what follows:

    fail       so do all later calls, until the others agree on who is left (`recover`, by each of them)
    shrink     the others agree at once, and later calls go on among them
    continue   the same, and the call itself is made again among them: its result has no part of the ranks that are gone

A new process takes the place of a rank, or a new place, with `joins`, when all members `admit` it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import orjson

from net.collectives import plan
from net.collectives.errors import CallsDiffer, RanksGone
from net.collectives.exchange import ExchangeCalls
from net.collectives.meeting import Meeting, Met, Store, own_host
from net.collectives.peers import Peers
from net.collectives.shared import SharedCalls, new_segment

log = logging.getLogger("mooncake.ranks")

ON_LOSS = ("fail", "shrink", "continue")
LONGEST_TICK_S, SHORTEST_TICK_S = 0.25, 0.01


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The same for all ranks."""

    timeout_s: float = 10.0  # how late a rank may be in a call
    on_loss: str = "fail"
    shares_memory: bool = True  # where that is possible
    host: str = ""  # a host that this rank reaches, "" for ranks of one host
    slots: int = 0  # how many ranks there may ever be; 0: those of the beginning
    meeting_s: float = 120.0  # how long the ranks wait for each other at the beginning


class Epochs:
    """One rank's end: its connections, and the calls of the present epoch. net/collectives/group.py adds the calls."""

    def __init__(
        self, store: Store, rank: int, size: int, options: GroupOptions | None = None, joins: bool = False
    ) -> None:
        """Blocks until all ranks are connected, except with `joins`. Raises RanksGone, ValueError, OSError,
        NotCompiled."""
        options = options or GroupOptions()
        slots = options.slots or max(size, rank + 1)
        if slots > plan.MOST_RANKS or not 0 <= rank < slots:
            raise ValueError(f"rank {rank} of {slots}: a group has at most {plan.MOST_RANKS} ranks, numbered from 0")
        if options.on_loss not in ON_LOSS:
            raise ValueError(f"on_loss is one of {', '.join(ON_LOSS)}, not {options.on_loss!r}")
        self.rank, self.slots, self.timeout_s, self.on_loss = rank, slots, options.timeout_s, options.on_loss
        self._store = store
        self._segment = new_segment(f"rank{rank}") if options.shares_memory else None
        self._turn = threading.RLock()
        self._closing = threading.Event()
        self._looking = threading.Lock()
        self._broken = False
        self._differ = ""
        self._shares_memory = options.shares_memory
        self._calls: SharedCalls | ExchangeCalls
        meeting = Meeting(store, rank, slots, own_host(options.host), self._segment)
        self._peers = Peers(meeting, rank, self.timeout_s, self._stop)
        try:
            if joins:
                self._enter(0, (rank,), 0)
            else:
                deadline = time.monotonic() + options.meeting_s
                self._peers.add(meeting.meet(set(range(size)) - {rank}, options.meeting_s))
                self._shares_memory = self._all_share(size, deadline)
                self._enter(0, tuple(range(size)), 0)
            if self.on_loss == "continue" and self.path != "shared memory":
                raise ValueError(
                    "on_loss=continue needs all ranks on one host: over sockets a call may have ended for some"
                )
        except BaseException:
            self._peers.close()
            self._close_segments()
            raise
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    # --- what is known

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this epoch, ascending."""
        return self._peers.membership.members

    @property
    def epoch(self) -> int:
        """How many times the members have changed."""
        return self._peers.membership.epoch

    @property
    def path(self) -> str:
        """How calls go: "shared memory" or "sockets"."""
        return "shared memory" if isinstance(self._calls, SharedCalls) else "sockets"

    def gone(self) -> list[int]:
        """Members that this rank considers gone."""
        return self._peers.gone()

    def linked(self) -> list[int]:
        """The other ranks with an open connection that nobody has lost."""
        return sorted(set(self._peers.links) - set(self._peers.why) - set(self._peers.gone()))

    # --- changes of the members

    def recover(self) -> bool:
        """After RanksGone, by all members that are left: agree on who they are; calls work again among them. False if
        nobody is gone. Raises RanksGone if this rank has been removed."""
        with self._turn:
            if not self._peers.gone() and self._peers.removed_by is None:
                return False
            self._agree(whole=False)
            return True

    def remove(self, ranks: Iterable[int]) -> None:
        """By all members that stay: go on without these ranks."""
        with self._turn:
            self._peers.lose([rank for rank in ranks if rank in self.members], "removed by deactivate_ranks")
            self.recover()

    def admit(self, ranks: Iterable[int], timeout_s: float) -> None:
        """By all members, at the same place of their programs: new processes with these ranks, which call `join`.
        Raises RanksGone for one that does not come in time."""
        new = sorted(set(ranks) - set(self.members))
        if any(not 0 <= rank < self.slots for rank in new):
            raise ValueError(f"ranks {new}: this group has room for {self.slots} ranks, numbered from 0")
        with self._turn:
            self._check()
            if new:
                self._admit(new, time.monotonic() + timeout_s)

    def _admit(self, new: list[int], deadline: float) -> None:
        peers, members = self._peers, self.members
        for rank in new:
            peers.cut(rank)
        if self.rank == members[0]:
            tokens = {}
            for rank in new:
                token = peers.meeting.read(f"join{rank}", deadline)
                if token is None:
                    raise RanksGone(f"rank {rank} did not ask to join", [rank])
                tokens[str(rank)] = token.decode()
            invitation = orjson.dumps({"members": members, "joins": tokens, "shares_memory": self._shares_memory})
            for name, given in tokens.items():
                self._store.set(f"admit{name}-{given}", invitation.decode())
                self._store.delete_key(f"join{name}")
        met: dict[int, Met] = {}
        try:
            while missing := set(new) - {*met}:
                rank, found = peers.meeting.accept(missing, deadline)
                met[rank] = found
        except RanksGone:
            for one in met.values():
                one.sock.close()
            raise
        self._add(met)
        calls = self._calls
        me = members.index(self.rank)
        try:  # by messages: the words in shared memory change with the epoch, and some would not see them in time
            self._calls = ExchangeCalls(peers.links, peers.mailbox, members, me, self.epoch, calls.completed)
            self._calls.barrier()
        except BaseException:
            self._calls = calls
            raise
        self._enter(self.epoch + 1, tuple(sorted((*members, *new))), calls.completed)
        peers.tell(peers.membership.report(self._calls.completed))

    def join(self, timeout_s: float) -> None:
        """By a process that was made with `joins`: blocks until the members have admitted it. Raises RanksGone."""
        deadline, peers, own = time.monotonic() + timeout_s, self._peers, secrets.token_hex(8)
        with self._turn:
            self._store.set(f"join{self.rank}", own)
            invitation = peers.meeting.read(f"admit{self.rank}-{own}", deadline)
            if invitation is None:
                raise RanksGone(f"no member admitted rank {self.rank} within {timeout_s:g} s")
            told = orjson.loads(invitation)
            self._shares_memory, joins = told["shares_memory"], {int(rank): one for rank, one in told["joins"].items()}
            peers.meeting.publish(own)
            met = {rank: peers.meeting.reach(rank, deadline) for rank in told["members"]}
            met |= {rank: peers.meeting.reach(rank, deadline, joins[rank]) for rank in joins if rank < self.rank}
            while missing := {rank for rank in joins if rank > self.rank} - {*met}:
                rank, found = peers.meeting.accept(missing, deadline)
                met[rank] = found
            self._add(met)
            report = peers.welcome(deadline)
            if report is None:
                raise RanksGone(f"the members did not admit rank {self.rank} within {timeout_s:g} s", told["members"])
            self._enter(report.epoch, tuple(report.members), report.calls)

    def _add(self, met: dict[int, Met]) -> None:
        apart = [rank for rank, one in met.items() if one.segment is None]
        if self._shares_memory and apart:
            for one in met.values():
                one.sock.close()
            raise RanksGone(f"ranks {apart} share no memory with rank {self.rank}, and the group works by that", apart)
        self._peers.add(met)

    def close(self) -> None:
        """Leave. Idempotent. A call of another thread ends first, with RanksGone."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._calls.stop()
        with self._turn:
            self._peers.close()
        self._watcher.join()
        self._close_segments()

    # --- inside

    def _check(self) -> None:
        """Raises if no call can begin."""
        if self._closing.is_set():
            raise RanksGone("this rank has left the group")
        if self._differ:
            raise CallsDiffer(f"an earlier call has failed: {self._differ}")
        if self._broken:
            raise self._peers.reason()

    def _agree(self, whole: bool) -> None:
        """With the others that are left, on the next epoch. `whole`: only if the same calls were complete for all."""
        peers, decision = self._peers, None
        while decision is None:
            with peers.changed:
                report = peers.membership.report(self._calls.completed)
            peers.tell(report)
            deadline = time.monotonic() + self.timeout_s
            silent: list[int] = []
            with peers.changed:
                while not silent and decision is None and sorted(peers.membership.gone) == report.gone:
                    if peers.removed_by is not None:
                        raise peers.reason()
                    decision = peers.membership.decide(self._calls.completed)
                    if decision is None and not peers.wait_report(deadline):
                        silent = peers.still(peers.membership.silent())
                        deadline = time.monotonic() + self.timeout_s / 10
            if silent:
                peers.lose(silent, f"rank {', '.join(map(str, silent))} did not report within {self.timeout_s:g} s")
        self._tell_removed(decision.members)
        if whole and not decision.agreed:
            raise RanksGone("calls were complete for some of the members and not for others: start again", peers.gone())
        log.warning("the group goes on with ranks %s: %s", list(decision.members), peers.reason())
        self._broken = False
        self._enter(decision.epoch, decision.members, decision.calls)

    def _tell_removed(self, members: tuple[int, ...]) -> None:
        """In the store, too: a rank that only stopped may not have got the message before its connection was closed.
        Raises RanksGone if the others have written that this rank is removed."""
        with suppress(RuntimeError):  # the store may have ended with its process
            for rank in set(self.members) - set(members):
                self._store.set(f"removed{rank}-{self.epoch}", str(self.rank))
            if self._store.check([f"removed{self.rank}-{self.epoch}"]):
                self._peers.removed_by = int(self._store.get(f"removed{self.rank}-{self.epoch}"))
        if self._peers.removed_by is not None:
            raise self._peers.reason()

    def _enter(self, epoch: int, members: tuple[int, ...], calls: int) -> None:
        self._peers.enter(epoch, members)
        me = members.index(self.rank)
        if self._segment is not None and self._shares_memory:
            held = {**self._peers.segments, self.rank: self._segment}
            self._calls = SharedCalls([held[rank] for rank in members], members, me, epoch, calls)
        else:
            self._calls = ExchangeCalls(self._peers.links, self._peers.mailbox, members, me, epoch, calls)
        if self._peers.gone():
            self._calls.stop()
        self._close_dropped()

    def _close_segments(self) -> None:
        self._close_dropped()
        if self._segment is not None:
            self._segment.close()

    def _close_dropped(self) -> None:
        """The watcher may be looking at the calls of the last epoch, which have these segments."""
        with self._looking:
            dropped, self._peers.dropped = self._peers.dropped, []
            for region in dropped:
                region.close()

    def _all_share(self, size: int, deadline: float) -> bool:
        """Whether any two of the ranks map each other's segments."""
        own = self._segment is not None and len(self._peers.segments) == size - 1
        self._store.set(f"shares{self.rank}", str(int(own)))
        told = [self._peers.meeting.read(f"shares{rank}", deadline) for rank in range(size)]
        if None in told:
            raise RanksGone(f"rank {self.rank} waited in vain for rank {told.index(None)}", [told.index(None)])
        return told == [b"1"] * size

    def _stop(self) -> None:
        calls = getattr(self, "_calls", None)  # a rank may be lost before the first epoch
        if calls is not None:
            calls.stop()

    def _watch(self) -> None:
        """Gives up on ranks for which a call has waited too long. If this process was stopped itself, the time counts
        from when it went on: the others may have removed it, and it reads that first."""
        tick = min(max(self.timeout_s / 10, SHORTEST_TICK_S), LONGEST_TICK_S)
        last = resumed = time.monotonic_ns()
        while not self._closing.wait(tick):
            now = time.monotonic_ns()
            if now - last > 1e9 * (tick + self.timeout_s / 4):
                resumed = now
            last = now
            with self._looking:
                late = self._calls.late()
                moved = self._calls.moved_ns()  # read after the ranks: it is new if they belong to a call that is over
            if moved and now - max(moved, resumed) > 1e9 * self.timeout_s:
                for rank in late:
                    self._peers.lose([rank], f"rank {rank} was more than {self.timeout_s:g} s late")
