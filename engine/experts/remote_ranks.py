"""RemoteRanks: the ranks on other hosts, as the node sees them: they connect, get their share, and come back.

A process of another host (mooncake.py expert-rank) asks for a place. The first free rank is its own, or the one that it
had. When its connection ends, the rank is lost like one whose process has ended; the next connection has the place.
Ranks that may be added are free from the start; they are given away when all others have their processes.
A rank that the node shares with other nodes has its number from the start, and hears from each node where the others
are.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from engine.config.config import Config
from engine.config.net_options import open_cluster_key, rank_ways
from engine.experts.group import ExpertGroup
from engine.experts.joining import LOADING_S, SILENCE_S, Joining, Welcome, lacks_rdma, refusal
from engine.experts.plan import Duty
from engine.experts.pulling import MEMORY, Bring, Sources
from engine.experts.share import Share
from engine.model.model_error import ModelError
from net import bodies
from net.channel.wire import Header
from net.errors import PeerLost
from net.rounds.desk import Desk, new_region
from net.rounds.door import Door, spelled
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import Layout
from net.rounds.near import Handover
from net.rounds.near_desk import NearDesk
from net.rounds.rdma import meeting
from net.rounds.rdma.mirror import Mirror
from net.rounds.rdma.offer import devices, why_not
from net.rounds.rdma.rdma_desk import RdmaDesk
from net.rounds.remote_desk import RemoteDesk
from net.transfer.common.memory import Region
from net.transfer.shm.transport import boot_id
from sched.scaling.width import Rank

log = logging.getLogger("mooncake.experts")

NOT_YET = "it has not joined yet"
MOST_GUESTS = 16
"""Connections without a place, at most, besides one for each rank."""
JOIN_S = 10.0
"""A connection must have said within this time that it would like to join."""
AGAIN_S = 0.1
"""Between two tries to accept a connection, after an error."""


@dataclass(slots=True)
class _Guest:
    """A connection that has a place. `host`: as `host_of` says. `name`: of its process. `desk`: once it is ready;
    `way`: how messages go to it. `beats`: of a near desk, and since when there were no others, by the monotonic clock,
    as was seen last."""

    instance: str
    wire: FrameSocket
    host: str | None
    name: str = ""
    desk: RemoteDesk | NearDesk | None = None
    way: str = ""
    beats: tuple[int, float] = (-1, 0.0)


def _discard(way: Region | Mirror | str) -> None:
    if isinstance(way, Mirror):
        way.discard()
    elif isinstance(way, Region):
        way.close()


def host_of(sock: socket.socket) -> str | None:
    """The address of the other side's host; None if it is this one."""
    peer: str = sock.getpeername()[0]
    return None if peer == sock.getsockname()[0] else peer


class _Waiting:
    """One of the semaphore's places, which is given back once: by `release`, or at the end of the context."""

    def __init__(self, semaphore: threading.Semaphore) -> None:
        self._semaphore, self._held = semaphore, True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._semaphore.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class RemoteRanks:
    """Accepts connections from the constructor on. `sources`: of experts that no rank of this host has. `first`: of
    rank 0; the placement at the start. `bell`: of the rounds. `door`: belongs to this object from now on."""

    def __init__(
        self, config: Config, sources: Sources, shares: Mapping[int, Share], first: Duty, bell: Region, door: Door
    ) -> None:
        self._sources, self._shares, self._first, self._bell, self._door = sources, shares, first, bell, door
        self._fingerprint = sources.source.fingerprint
        self._key, self._ways = open_cluster_key(config), rank_ways(config)
        self._group: ExpertGroup | None = None
        self._desks: list[Desk] = []
        self._begun = threading.Event()
        self._lock = threading.Lock()  # of _guests
        self._guests: dict[int, _Guest] = {}
        self._closing = False
        self._waiting = threading.Semaphore(MOST_GUESTS + first.plan.remote)
        plan, self.address, self.where = first.plan, door.address, door.where
        told = plan.remote - plan.added, plan.added, self.how
        log.info("%d ranks of the experts, and up to %d more, join by %s", *told)
        self._threads = [threading.Thread(target=self._accept, name="expert ranks", daemon=True)]
        if plan.shared:
            self._threads.append(threading.Thread(target=self._tell, name="nodes of ranks", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def how(self) -> str:
        """The command by which a process joins."""
        return f"mooncake.py expert-rank --join {self.where}" + " --rank N" * self._first.plan.shared

    def begin(self, group: ExpertGroup, desks: list[Desk]) -> None:
        """Those that wait and those that come get their places. `desks`: the group's."""
        self._group, self._desks = group, desks
        self._begun.set()

    def absent(self) -> dict[int, str]:
        """The ranks of other hosts, all of which come after `begin`."""
        return dict.fromkeys(range(self._first.plan.local, self._first.plan.least), NOT_YET)

    def hosts(self) -> list[str | None]:
        """Of the ranks that join. One that is not here counts as alone on its host."""
        plan = self._first.plan
        with self._lock:
            there = {rank: guest.host for rank, guest in self._guests.items()}
        return [there.get(rank, f"of rank {rank}") for rank in range(plan.local, plan.ranks)]

    def state(self) -> dict[str, Any]:
        """For /debug/state."""
        with self._lock:
            there = {rank: guest for rank, guest in sorted(self._guests.items()) if guest.desk is not None}
        near = [rank for rank, guest in there.items() if isinstance(guest.desk, NearDesk)]
        ways = {str(rank): guest.way for rank, guest in there.items()}
        found = {"address": list(self.address), "connected": list(there), "near": near, "ways": ways}
        return found | ({"nodes": [*self._door.nodes]} if self._first.plan.shared else {})

    def joined(self, missing: Collection[str]) -> list[Rank]:
        """The ranks that have a process. `missing`: numbers of those that steps do without."""
        with self._lock:
            guests = sorted(self._guests.items())
        return [Rank(rank, guest.name, guest.desk is not None and str(rank) not in missing) for rank, guest in guests]

    def close(self) -> None:
        with self._lock:
            self._closing = True
            guests = list(self._guests.values())
        self._begun.set()
        self._door.changed.set()
        self._door.close()
        for guest in guests:
            guest.wire.end()
            if guest.desk is not None and guest.desk not in self._desks:
                guest.desk.close()
        for thread in self._threads:
            thread.join(SILENCE_S)

    # --- one connection

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._door.listener.accept()
            except OSError as error:
                if self._closing:
                    return
                log.warning("no rank of the experts can join: %s; trying again", error)
                time.sleep(AGAIN_S)
                continue
            if not self._waiting.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._receive, args=(sock,), name="expert rank joins", daemon=True).start()

    def _receive(self, sock: socket.socket) -> None:
        with _Waiting(self._waiting) as waiting:
            self._serve(sock, waiting)

    def _serve(self, sock: socket.socket, waiting: _Waiting) -> None:
        try:
            peer = spelled(sock.getpeername())
            host = host_of(sock)
            ring = None if self._key is None else self._key.ring()
            wire = FrameSocket.accepted(sock, ring, SILENCE_S, JOIN_S)
            joining = bodies.decode(Joining, wire.frame().header.get("join"))
            wire.await_for(SILENCE_S)
        except (OSError, bodies.BodyError) as error:
            log.warning("a connection for a rank of the experts is refused: %s", error)
            sock.close()
            return
        try:
            with self._handover(joining) as handover:
                self._join(wire, joining, handover, peer, host, waiting)
        except (OSError, ModelError) as error:
            log.warning("the process at %s that joined the ranks of the experts is lost: %s", peer, error)
        finally:
            if not any(guest.wire is wire and guest.desk for guest in list(self._guests.values())):
                self._leave(wire)
                wire.close()

    def _join(
        self,
        wire: FrameSocket,
        joining: Joining,
        handover: Handover | None,
        peer: str,
        host: str | None,
        waiting: _Waiting,
    ) -> None:
        ours, near = self._ways.offer(), handover is not None
        if (reason := refusal(joining, self._fingerprint, self._first.plan, ours, near)) is not None:
            log.warning("%s cannot be a rank of the experts: %s", peer, reason)
            wire.send({"refused": reason})
            return
        self._begun.wait()
        rank = self._take_place(wire, joining, host)
        if rank is None:
            which = f"rank {joining.rank} has its process" if joining.shared else "all ranks have their processes"
            wire.send({"refused": which, "again": True})
            return
        waiting.release()
        assert self._group is not None
        placement, living = self._group.restart_from(rank)
        duty = replace(self._first, rank=rank, placement=placement, living=living)
        why_tcp = why_not(ours, joining.rdma)
        here, there = ("", "") if why_tcp else devices(ours, joining.rdma, rank)
        welcome = Welcome(
            rank,
            self._fingerprint,
            duty.plan,
            placement,
            "" if handover is None else handover.path,
            there,
            why_tcp,
            lacks_rdma(ours, joining.rdma) or "",
        )
        wire.send({"welcome": bodies.encode(welcome)})
        wire.await_for(LOADING_S)
        if (ready := self._loaded(wire, duty)) is None:
            return
        wire.await_for(SILENCE_S)
        way: Region | Mirror | str = why_tcp
        if handover is not None and "near" in ready:
            way = self._shared_region(handover, duty)
        elif here:
            way = meeting.ask(wire, ready, here, self._ways.gid_index, duty.plan.layout)
        if isinstance(way, str) and (ours.only or joining.rdma.only):
            raise PeerLost(f"--transport rdma: {way}")
        with self._lock:
            guest = self._guests.get(rank)
            if guest is None or guest.wire is not wire or self._closing:
                _discard(way)
                return
            guest.desk, guest.way = self._desk(way, rank, wire, duty.plan.layout)
            log.info("rank %d of the experts is the process at %s, %s", rank, peer, guest.way)
            self._group.arrived(rank, guest.desk)
        self._door.changed.set()

    def _desk(
        self, way: Region | Mirror | str, rank: int, wire: FrameSocket, layout: Layout
    ) -> tuple[RemoteDesk | NearDesk, str]:
        """A desk for this way to a rank, and the way in words. `way`: memory that both share, a mirror, or why messages
        go over TCP."""
        ended, leaves = partial(self._ended, rank, wire), partial(self._leaves, rank)
        if isinstance(way, Region):
            return NearDesk(way, wire, layout, ended), "through shared memory"
        if isinstance(way, Mirror):
            return RdmaDesk(wire, layout, self._bell, way, ended, leaves), f"RDMA over {way.device}"
        return RemoteDesk(wire, layout, self._bell, ended, leaves), f"TCP; no RDMA: {way}"

    def _handover(self, joining: Joining) -> AbstractContextManager[Handover | None]:
        """For a process of this host that may share memory."""
        try:
            if self._first.plan.shared and joining.boot and joining.boot == boot_id():
                return closing(Handover(self._door.folder))
        except OSError as error:
            log.warning("no memory can be shared with rank %d of the experts: %s", joining.rank, error)
        return nullcontext()

    def _shared_region(self, handover: Handover, duty: Duty) -> Region:
        """Of a desk; the process of the rank has got it. Raises PeerLost, OSError."""
        region = new_region(f"desk of rank {duty.rank}", duty.plan.layout)
        try:
            handover.give([region.memfd or 0, self._bell.memfd or 0])
        except PeerLost:
            region.close()
            raise
        return region

    def _take_place(self, wire: FrameSocket, joining: Joining, host: str | None) -> int | None:
        """The rank of this connection from now on; None if all are taken. A process that connects again has lost its
        earlier connection, also if this host has not noticed: it is asked to come again, when it has."""
        plan = self._first.plan
        with self._lock:
            if before := [guest for guest in self._guests.values() if guest.instance == joining.instance]:
                for guest in before:
                    guest.wire.end()
                return None
            free = [rank for rank in range(plan.local, plan.ranks) if rank not in self._guests]
            if joining.shared and joining.rank in self._guests:
                self._end_hung(self._guests[joining.rank])
                return None
            if self._closing or not free:
                return None
            free = [rank for rank in free if rank < plan.least] or free
            rank = joining.rank if joining.rank in free else free[0]
            self._guests[rank] = _Guest(joining.instance, wire, host, joining.name)
            return rank

    @staticmethod
    def _end_hung(guest: _Guest) -> None:
        """End the connection of a process of this host that has not beaten for SILENCE_S while another asked for its
        place: the connection stays open as long as the process is there."""
        if not isinstance(guest.desk, NearDesk):
            return
        now, beats = time.monotonic(), guest.desk.beats
        if beats != guest.beats[0]:
            guest.beats = beats, now
        elif now - guest.beats[1] > SILENCE_S:
            guest.wire.end()

    def _loaded(self, wire: FrameSocket, duty: Duty) -> Header | None:
        """Hand out weights until the process has its share: what it says then; None if it has failed. Raises
        PeerLost."""
        with self._sources.opened() as bring:
            while True:
                header = wire.frame().header
                if "ready" in header:
                    return header
                if "failed" in header:
                    log.error("rank %d of the experts cannot load: %s", duty.rank, str(header["failed"]))
                    return None
                if "want" in header:
                    self._send_expert(wire, duty, bring, header)

    def _send_expert(self, wire: FrameSocket, duty: Duty, bring: Bring, header: Header) -> None:
        try:
            layer, slot = header["want"]
            expert = duty.placement.layers[layer][duty.rank][slot]
        except (TypeError, ValueError, IndexError):
            raise PeerLost(f"it asked for {header['want']}, which is no place of an expert") from None
        assert self._group is not None
        if (here := duty.copy_here(layer, expert)) is not None:
            views, origin = self._shares[here[0]].bytes_of(layer, here[1]), MEMORY
        else:
            try:
                share, origin = bring(layer, expert, self._group.elsewhere(layer, expert))
            except (ModelError, OSError) as error:
                raise PeerLost(f"its weights cannot be read here: {error}") from None
            views = share.bytes_of(0, 0)
        wire.send({"expert": [layer, slot], "sum": self._sources.checksum(layer, expert, views)}, views)
        self._sources.count(origin)

    def _tell(self) -> None:
        """Tell all ranks which nodes share them, whenever there is another one of either."""
        while self._door.changed.wait() and not self._closing:
            self._door.changed.clear()
            with self._lock:
                desks = [guest.desk for guest in self._guests.values() if guest.desk is not None]
            for desk in desks:
                desk.tell(self._door.nodes)

    def _leave(self, wire: FrameSocket) -> None:
        with self._lock:
            self._guests = {rank: guest for rank, guest in self._guests.items() if guest.wire is not wire}

    def _leaves(self, rank: int) -> None:
        """In the thread of its desk."""
        assert self._group is not None
        with self._lock:  # after the desk has arrived
            self._group.leave(rank)

    def _ended(self, rank: int, wire: FrameSocket, why: str) -> None:
        """In the thread of its desk."""
        assert self._group is not None
        with self._lock:  # after the desk has arrived
            desk = self._guests[rank].desk
        assert desk is not None
        if self._closing:
            return
        self._group.died(rank, f"its connection has ended: {why}")
        if self._desks[rank] is not desk:  # no step has begun since it was ready
            desk.close()
        self._leave(wire)
