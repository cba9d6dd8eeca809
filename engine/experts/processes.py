"""ExpertProcesses: the other ranks: child processes that are started, watched and started again, and remote_ranks.py.

The shares of the ranks of this host lie in memory that rank 0 keeps, so a process that is started again finds the
experts of the other ranks there. Before it starts, this one pulls those that only ranks of other hosts have. The rest
comes from the checkpoint.
A rank that is masked and shows no sign of life for HUNG_S is killed, and so is one that loads and makes no progress for
LOAD_HUNG_S. Both are started again like one that ended by itself.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.weight_cache import WeightCache
from engine.config.config import Config
from engine.config.net_options import open_expert_door
from engine.experts.group import ExpertGroup, LossRule
from engine.experts.loading import LOADING, Start, fill
from engine.experts.placing.balance import Balance
from engine.experts.placing.hosts import Hosts
from engine.experts.plan import Duty, first_of, plan_of
from engine.experts.pulling import CHECKPOINT, MEMORY, RANKS, Sources
from engine.experts.remote_ranks import NOT_YET, RemoteRanks
from engine.experts.share import Share
from engine.model.model_error import ModelError
from net.rounds.desk import Desk, desk_bytes, new_bell, new_region
from net.rounds.door import Door
from net.transfer.common.memory import Region
from sched.scaling.width import Rank

log = logging.getLogger("mooncake.experts")

ROOT = Path(__file__).resolve().parents[2]
WORKER = "engine.experts.worker"
END_TIMEOUT_S = 10.0
HUNG_S = 30.0
LOAD_HUNG_S = 180.0
"""Without progress while a rank loads. Before the first weight it imports torch, which takes long on a busy host."""
AGAIN_S = (0.0, 1.0, 5.0, 30.0)
"""Before a process is started again, by how often that has happened in a row."""
WELL_S = 60.0
"""After this long, a process counts as started for the first time."""


class ExpertProcesses:
    """The constructor returns while the other ranks load; `join` waits for those of this host. `source`: the model
    served. `door`: where ranks of other hosts join, if it is open already; belongs to this object from now on, also if
    the constructor raises. It raises OSError, and UsageError if nobody could connect to this node."""

    def __init__(self, config: Config, source: ModelSource, door: Door | None = None) -> None:
        self.plan = plan_of(config, source.config)
        self.placement = first_of(config, self.plan)
        self.lost: str | None = None  # a node outlives its ranks
        self.group: ExpertGroup | None = None
        self._config, self._source = config, source
        self._sources = Sources(self.plan, source)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        ranks = range(self.plan.local)
        self._regions = [Region.shared(f"experts of rank {rank}", self.plan.share_bytes) for rank in ranks]
        self.shares = {rank: Share(region, self.plan) for rank, region in enumerate(self._regions)}
        self._bell = new_bell("bell of the experts")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._links: dict[int, Connection] = {}
        self._threads: list[threading.Thread] = []
        self.restarts = 0
        self._desks = [self._private_desk() for _ in ranks[:1]]
        self.remote: RemoteRanks | None = None
        try:
            if self.plan.remote:
                first, door = Duty(0, self.plan, self.placement), door or open_expert_door(config)
                self.remote = RemoteRanks(config, self._sources, self.shares, first, self._bell, door)
            for rank in ranks[1:]:
                self._desks.append(self._start(Duty(rank, self.plan, self.placement)))
            self._desks += [self._private_desk() for _ in range(self.plan.remote)]  # until they join
        except BaseException:
            self.close()
            raise

    def fill_own(self, cache: WeightCache | None) -> None:
        """Rank 0's share, if it is this process, from the checkpoint. Raises ModelError."""
        if not self.plan.shared:
            duty = Duty(0, self.plan, self.placement)
            fill(duty, self._source, self.shares, cache)
            self._count(duty)

    def _hosts(self) -> Hosts:
        """Of all ranks."""
        return [None] * self.plan.local + ([] if self.remote is None else self.remote.hosts())

    def join(self) -> ExpertGroup:
        """Wait until the others of this host have loaded. Ranks of other hosts may come later: until then they are
        masked. Raises ModelError with the error of one of them."""
        for rank in range(1, self.plan.local):
            if (error := self._loaded(rank)) is not None:
                raise ModelError(f"--expert-parallel-size {self.plan.ranks}: rank {rank}: {error}")
            self._count(Duty(rank, self.plan, self.placement))
        config = self._config
        rule = LossRule(config.expert_loss)
        absent = {} if self.remote is None else self.remote.absent()
        parts = self.plan, self.placement, self._desks, self.shares, self._bell, rule, absent
        self.group = ExpertGroup(*parts)
        if config.expert_balance_steps:
            self.group.balance = Balance(config.expert_balance_steps, config.expert_replicas, self._hosts)
        if self.group.mover is not None:
            self.group.mover.sources = self._sources
        if self.remote is not None:
            self.remote.begin(self.group, self._desks)
        for rank in range(1, self.plan.local):
            thread = threading.Thread(target=self._keep, args=(rank,), name=f"expert rank {rank}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self.group

    def awaited(self) -> str | None:
        """The ranks that have never joined, and where they join, for people; None if all have."""
        waits = [] if self.remote is None else [rank for rank, why in self.missing().items() if why == NOT_YET]
        if self.remote is None or not waits:
            return None
        return f"waiting for ranks {', '.join(waits)} of the experts: {self.remote.how}"

    def missing(self) -> dict[str, str]:
        """The ranks that steps do without, and why."""
        return {} if self.group is None else self.group.missing()

    def lack(self) -> float:
        """See ExpertGroup.lack."""
        return 0.0 if self.group is None else self.group.lack()

    def joined(self) -> list[Rank]:
        """The ranks of other hosts that have a process."""
        return [] if self.remote is None else self.remote.joined(self.missing())

    @property
    def where(self) -> str | None:
        """HOST:PORT at which ranks of other hosts join; None if none may."""
        return None if self.remote is None else self.remote.where

    @property
    def experts_s(self) -> float:
        """See ExpertGroup.decode_s."""
        return 0.0 if self.group is None else self.group.decode_s

    def state(self) -> dict[str, Any]:
        """For /debug/state."""
        pids = {str(rank): process.pid for rank, process in sorted(self._processes.items())}
        group = {} if self.group is None else self.group.state()
        remote = {} if self.remote is None else self.remote.state()
        return group | {
            "restarts": self.restarts,
            "processes": pids,
            "remote": remote,
            "experts_from": self._sources.counts,
        }

    def close(self) -> None:
        """End the other ranks and wait for them."""
        with self._lock:
            self._closing.set()
            for link in self._links.values():
                link.close()
        if self.remote is not None:
            self.remote.close()
        for process in list(self._processes.values()):
            with suppress(ProcessLookupError):
                process.kill()  # one that is stopped does not see the closed socket
            process.wait(END_TIMEOUT_S)
        for thread in self._threads:
            thread.join(END_TIMEOUT_S)
        for desk in self._desks:
            desk.close()
        for region in (*self._regions, self._bell):
            region.close()

    def _private_desk(self) -> Desk:
        return Desk(Region.private("desk", desk_bytes(self.plan.layout)), self.plan.layout)

    # --- one process

    def _start(self, duty: Duty, given: frozenset[tuple[int, int]] = frozenset()) -> Desk:
        """Start the process of a rank; returns its new desk. `given`: layers and slots that are filled. Raises OSError,
        and ModelError if this node stops."""
        rank = duty.rank
        region = new_region(f"desk of rank {rank}", self.plan.layout)
        memfds = tuple(region.memfd or 0 for region in self._regions)
        told = Start(duty, self._config, self._source, memfds, region.memfd or 0, self._bell.memfd or 0, given)
        ours, theirs = Pipe()
        try:
            with theirs, self._lock:
                if self._closing.is_set():
                    raise ModelError("this node is stopping")
                self._processes[rank] = subprocess.Popen(
                    [sys.executable, "-P", "-m", WORKER, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # the node's stdout belongs to the process that started it
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                    pass_fds=(theirs.fileno(), told.desk, told.bell, *told.memfds),
                )
                self._links[rank] = ours
            ours.send(told)
        except BaseException:
            ours.close()  # a process that was started ends with it
            region.close()
            raise
        return Desk(region, self.plan.layout)

    def _pull(self, duty: Duty) -> frozenset[tuple[int, int]]:
        """Fill the share of a rank without a process with the experts that only ranks elsewhere have: the layers and
        slots of those that came."""
        assert self.group is not None
        given, lost = set(), set[Desk]()
        for layer, slot, expert in duty.experts:
            if duty.copy_here(layer, expert) is None and not self._closing.is_set():
                share = self._sources.pulled(layer, expert, self.group.elsewhere(layer, expert), lost)
                if share is not None:
                    self.shares[duty.rank].take(layer, slot, share)
                    given.add((layer, slot))
        return frozenset(given)

    def _count(self, duty: Duty, given: frozenset[tuple[int, int]] = frozenset()) -> None:
        """Where the experts of a rank of this host came from."""
        for layer, slot, expert in duty.experts:
            if (layer, slot) in given:
                self._sources.count(RANKS)
            else:
                self._sources.count(CHECKPOINT if duty.copy_here(layer, expert) is None else MEMORY)

    def _loaded(self, rank: int) -> str | None:
        """Wait until the rank has loaded; returns why it could not."""
        return why_not_loaded(self._links[rank], self._processes[rank])

    def _keep(self, rank: int) -> None:
        """Watch the process of a rank and start it again when it has ended, until this node stops."""
        assert self.group is not None
        desk, tries = self._desks[rank], 0
        while True:
            begun = time.monotonic()
            code = self._watch(rank, desk)
            self.group.died(rank)
            if desk is not self._desks[rank]:  # no step has begun since it was ready, or it never was
                desk.close()
            if self._closing.is_set():
                return
            tries = 0 if time.monotonic() - begun > WELL_S else tries
            wait_s = AGAIN_S[min(tries, len(AGAIN_S) - 1)]
            log.warning("expert rank %d ended with exit code %d; starting it again in %g s", rank, code, wait_s)
            if self._closing.wait(wait_s):
                return
            tries += 1
            self.restarts += 1
            duty = Duty(rank, self.plan, *self.group.restart_from(rank))
            try:
                given = self._pull(duty)
                desk = self._start(duty, given)
            except (OSError, ModelError) as error:
                if self._closing.is_set():
                    return
                log.error("expert rank %d cannot be started: %s", rank, error)
                continue
            if (reason := self._loaded(rank)) is None:
                self._count(duty, given)
                self.group.arrived(rank, desk)
            elif not self._closing.is_set():
                log.error("expert rank %d cannot load: %s", rank, reason)

    def _watch(self, rank: int, desk: Desk) -> int:
        """Wait for the end of the process; kill it when it is masked and hangs. Returns its exit code. `desk`: where it
        beats, which is not yet that of the group if no step has begun since it was started."""
        process, beats, since = self._processes[rank], -1, time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(1.0)
            assert self.group is not None
            now = desk.beats
            if rank not in self.group.masked or now != beats:
                beats, since = now, time.monotonic()
            elif time.monotonic() - since > HUNG_S:
                log.warning("expert rank %d hangs for %g s: it is killed", rank, HUNG_S)
                process.kill()


def why_not_loaded(link: Connection, process: subprocess.Popen[bytes]) -> str | None:
    """Wait until the process of a rank has loaded: None, or why it could not. One that makes no progress for
    LOAD_HUNG_S is killed."""
    try:
        while link.poll(LOAD_HUNG_S):
            told: str | None = link.recv()
            if told != LOADING:
                return told
    except (EOFError, OSError):
        code = process.wait()
        return f"it ended with exit code {code}; its log above says why"
    process.kill()
    process.wait()
    return f"it made no progress for {LOAD_HUNG_S:g} s and was killed"
