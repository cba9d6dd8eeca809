"""One node, assembled: channel and transfer engine, store share, gossip, HTTP API, engine.

`start` shows the order: first the parts that other nodes may need early (the store share, membership, the answer to
"are you ready?"), then the slow part, loading weights. No request is placed here before the engine answers probes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import current_thread
from typing import TYPE_CHECKING, Any

from cache import keys as key_chain
from cache.keys import root_key
from cache.messages import MEMBERS, PoolMembers
from cache.pool.borders import borders_of
from cache.protocol import Deadlines
from cache.store.job import MESSAGE_BYTES
from cache.store.objects import Objects
from cache.store.options import StoreOptions
from cache.store.store import Store
from engine.checkpoint.gguf.header import forget_header
from engine.checkpoint.loop_calls import LoopCalls
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.progress import Progress
from engine.config.agreement import disagreement, identity, kv_of, unlike
from engine.config.config import Config
from engine.config.flags import UsageError
from engine.config.net_options import TRANSPORTS, open_cluster_key, sealed_only, transport_options
from engine.config.shape import cluster_geometry, geometry
from engine.core.engine_load import first_role
from engine.experts.sharing import sharing_of
from engine.front.cluster import Cluster
from engine.front.compiled import cheapest, choose
from engine.handoff.arenas import Arenas
from engine.node import common_transport
from engine.node import report as node_report
from engine.node.front_door import FrontDoor
from engine.node.history_recorder import HistoryRecorder
from engine.node.leaving import Leaving
from engine.node.lending import lend, told_beyond, told_context
from engine.node.local_store import open_share
from engine.node.parts import Blocks, Measures, Serving
from engine.node.phases import Phases
from engine.node.prefault import prefault
from engine.node.resource_use import NodeUse
from engine.node.scrape import watch, watch_engine
from engine.observe.history import History
from engine.scaling.rank_scaler import RankScaler
from engine.scaling.role_changes import RoleChanges
from engine.scaling.scaler import SCALES, Scaler, may_leave
from engine.sites.members import others_shares, shares
from net.bodies import Nothing, typed
from net.channel.channel import Channel, PeerRefused
from net.channel.sockets import control_port, naming_control_port
from net.compiled import NotCompiled
from net.gossip.driver import Gossip, JoinRefused
from net.gossip.load_words import LoadWords
from net.kv_events.settings import parse as event_settings
from net.loop.leaving import may_be_left
from net.loop.stalls import StallMonitor
from net.loop.supervisor import Supervisor
from net.loop.tasks import awaited, spawn
from net.metrics.events import Metrics
from net.transfer.common.prefault import Prefault
from net.transfer.device.staging import DeviceTransferEngine
from net.transfer.rdma.verbs import prepare as rdma_prepare
from sched.gossip.load_word import DRAINING
from sched.gossip.state import NodeRecord
from sched.membership.member import Member, Status, presets
from sched.role_change import BOTH

if TYPE_CHECKING:
    from engine.checkpoint.pooled_weights import PooledWeights
    from engine.loading.load_model import LoadedModel
    from engine.node.engine import Engine

log = logging.getLogger("mooncake.node")

JOIN_S = 10.0
"""Time for a member of the cluster to answer on its control port."""
RANKS_S = 0.1
"""Between two looks for ranks with experts that are to join."""


class Node:
    """One complete node. `config` is resolved, `http_socket` listens, `cluster` is the answer to GET /cluster of the
    node to join (None: this node starts a cluster). The `phases` of the start are logged at its end."""

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        http_socket: socket.socket,
        cluster: dict[str, Any] | None,
        phases: Phases,
        draft: ModelSource | None = None,
    ) -> None:
        self.config = config
        self.source = source
        self._draft = draft
        self.geometry = geometry(config, source.config, config.kv_cache_dtype)
        self._site = config.site or ""
        self._sharing = sharing_of(config, source.config, source.fingerprint)
        self.pooled = cluster_geometry(config, source.config)
        self.root = root_key(source.fingerprint, self.pooled)
        if cluster is not None and (reason := disagreement(config, self.root.hex(), cluster)):
            raise UsageError(f"--join {config.join}: {reason}")
        metrics = Metrics(config.served_model_name, config.node_id)
        history = History(config.node_id, time.time())
        self.measures = Measures(metrics, StallMonitor(metrics.observe_stall), phases, history)
        cluster_key = open_cluster_key(config)
        self._identity = identity(config, self.pooled, self.root.hex())
        self.serving = Serving()
        self.channel = Channel(config.node_id, self._identity, self._check_peer, cluster_key)
        self.transfer = DeviceTransferEngine(
            self.channel, TRANSPORTS[config.transport], transport_options(config), config.rail_limit
        )
        self.words = LoadWords(self.channel, self.transfer)
        self.share = open_share(config, self.pooled, self.root) if config.dram_bytes else None
        self.use = NodeUse(dict if self.share is None else self.share.stats)
        self.store = Store(
            config.node_id,
            self.channel,
            self.transfer,
            self.share,
            self._homes,
            StoreOptions(
                block_bytes=self.pooled.pool_bytes,
                deadlines=Deadlines.answered_within(config.store_timeout_ms / 1e3),
                replicas=config.replicas,
                repair_limit=config.repair_limit_bytes,
                checksums=config.block_checksums,
                other_sites=self._other_sites,
                message_call_bytes=0 if config.rail_limit or config.transport == "rdma" else MESSAGE_BYTES,
            ),
        )
        self.channel.handle(MEMBERS, typed(Nothing, self._pool_members))
        self._role_changes: RoleChanges | None = None
        self._cluster = cluster
        self._http_socket = http_socket
        self.gossip = Gossip(self._member(), presets[config.net], random.Random(), self._record, cluster_key)
        self._gossiping = False
        peers = self._peers = Cluster(self.channel, self.gossip, self.transfer, self.words, self.store)
        blocks = self._blocks = Blocks(self.pooled, self.geometry, self.root, self.share)
        self.leaving = Leaving(config, self.gossip, self.serving)
        may_leave(self.channel, self.gossip, self.leaving.ask)
        self.door = FrontDoor(config, source, peers, blocks, self.serving, self.leaving, self.measures)
        self.weights = self.door.weights
        watch(metrics, peers, blocks)
        self._recorder = HistoryRecorder(history, self.serving, peers, blocks)
        self.supervisor = Supervisor(
            lambda task: metrics.count("mooncake:background_failures", task=task), self.give_up
        )
        self.given_up = asyncio.Event()
        self._publishing: asyncio.Task[None] | None = None  # of weights
        self._prefault: Prefault | None = None

    # --- life

    async def start(self) -> None:
        """Returns when this node serves. Raises ListenError, and UsageError if the cluster refuses it."""
        config = self.config
        self.supervisor.install()
        self.measures.stalls.start()
        if "rdma" in TRANSPORTS[config.transport] and not sealed_only(config):
            await asyncio.to_thread(rdma_prepare)
            if config.transport == "rdma" or config.rdma_devices != "auto":
                self._check_rdma()
        wanted = config.control_port or control_port(config.host, config.port)
        with naming_control_port(config.host, wanted):
            host, port = await self.channel.start(config.host, wanted)
            self.gossip.on_up(self._member_up)
            self.gossip.on_down(self._member_down)
            self.channel.on_lost(self.gossip.suspect)
            self._recorder.start()
            await self.gossip.start(host, port)
        self._gossiping = True
        try:
            await asyncio.to_thread(key_chain.prepare)
        except NotCompiled as error:
            log.info("block keys by hashlib, four times slower: %s", error)
        try:
            await asyncio.to_thread(cheapest.prepare)
            await asyncio.to_thread(choose.prepare)
        except NotCompiled as error:
            log.info("shortlists by numpy and choices in Python, up to three times slower: %s", error)
        self.measures.phase("network")
        await self.door.open(self._http_socket, self._draft)
        if self._cluster is not None:
            await self._join(self._cluster)
            await common_transport.check(self.config.transport, self.channel, self.transfer, self.gossip.members)
        self.weights.start(self._cluster)
        if self.store.keeper is not None:
            self.store.keeper.start()
        self.measures.phase("HTTP and joining")
        if config.computes:
            imported = asyncio.Event()
            engine, _ = await asyncio.gather(self._load_engine(imported), self._prepare_grammars(imported))
            self.serving.engine = engine
            watch_engine(self.measures.metrics, engine)
            await self.weights.hold()
            engine.pool.watch(self.gossip.cached, places=True)
            self._tell_kv_events(engine)
            await self._await_ranks(engine)
            log.info("calibrated by %d steps", await engine.calibrate(self.source.fingerprint))
            self.measures.phase("calibration")
            engine.start()
            self.words.start(engine.load.word)
            if config.weights_from_store and self.source.format != "pooled":
                self._publishing = spawn(self._publish_weights(), "publishing weights to the pool")
            if engine.load.does < BOTH <= set(config.roles):
                hold_s = config.role_change_hold_ms / 1000
                self._role_changes = RoleChanges(self.gossip, engine.load, hold_s, config.role_policy)
                self._role_changes.start()
            self.measures.phase("engine")
        self.serving.holder = await lend(config, self._blocks, self.source, self._peers)
        if config.prefault:
            self._prefault = self._prefaulting()
            self._prefault.start()
        if config.scale_command is not None:
            self.serving.scaler = Scaler(config, self.gossip, self.channel, self.measures.metrics)
            self.serving.scaler.start()
        if config.expert_scale_command is not None and self.engine is not None and self.engine.ranks is not None:
            self.serving.rank_scaler = RankScaler(config, self.gossip, self.engine.ranks, self.measures.metrics)
            self.serving.rank_scaler.start()
        self.serving.unready = self.serving.gave_up
        log.info("ready after %s", self.measures.phases.line())

    def _check_rdma(self) -> None:
        """A transport or device named by a flag must exist: fail at the start, not at the first peer."""
        if (reason := self.transfer.refusal("rdma")) is not None:
            by_name = self.config.transport != "rdma"
            asked = f"--rdma-devices {self.config.rdma_devices}" if by_name else "--transport rdma"
            raise UsageError(f"{asked}: {reason}; give --transport auto or tcp (mooncake.py doctor shows what is here)")

    async def drain(self) -> None:
        """Call it before `stop`: finishes the requests of clients. If cancelled, it ends the rest immediately."""
        await self.leaving.run()

    async def stop(self) -> None:
        """Leave the cluster and release everything, in reverse order."""
        if self.serving.scaler is not None:
            await self.serving.scaler.close()
        ranks = self.serving.rank_scaler
        # Meanwhile, because a command that hangs must not keep this node from leaving the cluster.
        ending = None if ranks is None else awaited(ranks.close())
        await self.door.close()
        if self._prefault is not None:
            await asyncio.to_thread(self._prefault.close)
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        if self._gossiping and self.store.keeper is not None:
            await self.store.keeper.leave(self.config.leave_ms / 1000)
        if self._gossiping:
            self.channel.leave()
            await self.gossip.leave()
        if ending is not None:
            await ending
        await self._recorder.close()
        await self.weights.close()
        if self._role_changes is not None:
            await self._role_changes.close()
        if self.engine is not None:
            await self.engine.close()
        if self._sharing is not None:
            self._sharing.door.close()
        if self.serving.holder is not None:
            await self.serving.holder.close()
        if self.serving.kv_events is not None:
            await self.serving.kv_events.close()
        await self.gossip.close()
        await self.words.close()
        await self.transfer.close()
        await self.channel.close()
        await self.store.close()
        await self.measures.stalls.close()
        self.supervisor.remove()

    def give_up(self, reason: str) -> None:
        """This node cannot continue: it logs the reason, leaves the cluster, and ends with exit code 1."""
        if self.serving.gave_up is None:
            self.serving.gave_up = self.serving.unready = reason
            log.critical("%s; this node leaves", reason)
            self.given_up.set()

    @property
    def engine(self) -> Engine | None:
        return self.serving.engine

    @property
    def lost(self) -> str | None:
        """Why this node cannot continue; None while it can."""
        return self.serving.lost

    async def _join(self, cluster: dict[str, Any]) -> None:
        address = tuple(cluster["control"])
        try:
            await self.channel.connect(address)
            await self.gossip.join(address, self._join_s(cluster))
        except (PeerRefused, JoinRefused) as error:
            raise UsageError(f"--join {self.config.join}: {error}") from None
        except (OSError, TimeoutError) as error:
            raise UsageError(
                f"--join {self.config.join}: the node answers HTTP, but not on its control port {address[1]} "
                f"({error or type(error).__name__}); open that port for TCP and UDP, or fix it by --control-port"
            ) from None

    def _join_s(self, cluster: dict[str, Any]) -> float:
        """Seconds to ask. A node that restarts under the same name is admitted when its previous process is known to be
        dead, or immediately if it has a new address."""
        members = cluster["members"]
        if not any(m["node_id"] == self.config.node_id and m["status"] in ("alive", "suspect") for m in members):
            return JOIN_S
        log.info("a member still has this name: waiting until it proves that it is alive, or is given up")
        return JOIN_S + presets[self.config.net].suspicion_max_s(len(members))

    async def _prepare_grammars(self, imported: asyncio.Event) -> None:
        """Next to the loading of weights, which seldom needs the interpreter lock; the import of torch always does."""
        assert self.door.grammars is not None, "a node with a model has a tokenizer"
        await imported.wait()
        await asyncio.to_thread(self.door.grammars.prepare)

    async def _load_engine(self, imported: asyncio.Event) -> Engine:
        """Runs in a thread: importing torch takes a second. A store node does not import it."""
        loop = asyncio.get_running_loop()

        def load() -> tuple[type[Engine], LoadedModel]:
            may_be_left(current_thread())
            from engine.loading.load_model import load_model
            from engine.node.engine import Engine

            self.measures.phase("torch")
            loop.call_soon_threadsafe(imported.set)
            find = self._find_weights(calls) if self.config.weights_from_store else None
            parts = self.config, self.geometry, self.source, self._draft, Progress(), self.door.grammars
            door = None if self._sharing is None else self._sharing.door
            return Engine, load_model(*parts, find, self.serving.weight_dtype, door)

        self.serving.unready = "loading weights"
        calls = LoopCalls()
        # Not in the loop's thread pool: an OpenMP team exists as long as the thread that led it, and libgomp shortens
        # the spinning of all teams if they have more threads than there are cores.
        loading = ThreadPoolExecutor(1, thread_name_prefix="loading")
        try:
            engine, loaded = await loop.run_in_executor(loading, load)
        except asyncio.CancelledError:  # by a signal: compiling or reading may still take minutes
            loading.shutdown(wait=False)
            raise
        finally:
            imported.set()  # also if it failed
            calls.stop()  # the thread must not wait for this loop while the loop waits for the thread
        loading.shutdown()
        forget_header()
        self.measures.phase("weights")
        self.serving.weight_dtype = loaded.weight_dtype
        borders = borders_of(self.geometry)
        arenas = Arenas(self.config.node_id, lambda: self.gossip.core.digests.holders, self._lends, borders)
        shapes = self.geometry, self.pooled
        return engine(self.config, shapes, loaded, self._peers, self.measures.metrics, arenas, self.use.onto)

    async def _await_ranks(self, engine: Engine) -> None:
        """All ranks with experts must have been there once: the steps of the calibration need them."""
        while (waits := engine.awaited_ranks) is not None:
            if waits != self.serving.unready:
                log.info("%s", waits)
            self.serving.unready = waits
            await asyncio.sleep(RANKS_S)

    def _tell_kv_events(self, engine: Engine) -> None:
        """--kv-events-config. Other nodes do not load ZeroMQ."""
        if self.config.kv_events_config and (settings := event_settings(self.config.kv_events_config)) is not None:
            from engine.node.kv_events import KvEvents

            self.serving.kv_events = KvEvents(settings, engine, self.geometry, self.weights.root)
            self.serving.kv_events.start()

    def _find_weights(self, calls: LoopCalls) -> Callable[[], PooledWeights | None]:
        from engine.checkpoint.pooled_weights import PooledWeights

        return partial(PooledWeights.find, Objects(self.store), calls, self.source.fingerprint, self.config.dtype)

    def _prefaulting(self) -> Prefault:
        if (engine := self.engine) is None:
            return prefault(None, self.share, lambda: False)
        return prefault(engine.region, self.share, engine.is_busy)

    async def _publish_weights(self) -> None:
        from engine.checkpoint.pooled_weights import publish
        from engine.loading.load_model import weights_of

        opened = await asyncio.to_thread(weights_of, self.config, self.source)
        await publish(Objects(self.store), self.source.fingerprint, self.config.dtype, opened)

    # --- this node and its peers

    def _check_peer(self, theirs: dict[str, Any]) -> str | None:
        found = disagreement(self.config, self.root.hex(), theirs)
        return found or unlike(kv_of(self._identity), kv_of(theirs))

    def _member(self) -> Member:
        """This node; `Gossip.start` fills in the control address."""
        return Member(
            node_id=self.config.node_id,
            address=("", 0),
            http=self.http_address,
            roles=self.config.roles,
            info=self._identity
            | {"share": self.config.dram_bytes + self._ssd_bytes}
            | told_context(self.config, self.geometry)
            | told_beyond(self.config, self.geometry)
            | self._first_role
            | self._scaling
            | ({} if self._sharing is None else self._sharing.told)
            | common_transport.named(self.config.transport),
        )

    @property
    def _first_role(self) -> dict[str, list[str]]:
        """For a node that changes its role: the role to which it returns at low load."""
        begins = first_role(self.config)
        return {"first_role": sorted(begins)} if begins < BOTH <= set(self.config.roles) else {}

    @property
    def _scaling(self) -> dict[str, Any]:
        """What others must know to choose cheap and near nodes, and the node that starts others. Defaults are left
        out."""
        cost = {"cost": self.config.node_cost} if self.config.node_cost != 1.0 else {}
        site = {"site": self._site} if self._site else {}
        place = {"place": self.config.network_place} if self.config.network_place else {}
        return cost | site | place | ({SCALES: True} if self.config.scale_command is not None else {})

    @property
    def _ssd_bytes(self) -> int:
        return self.config.ssd_bytes if self.config.ssd_path is not None else 0

    @property
    def http_address(self) -> str:
        host, port = self._http_socket.getsockname()[:2]
        return f"{self.config.host}:{port}" if ":" not in host else f"[{self.config.host}]:{port}"

    def _lends(self, node_id: str) -> bool:
        """Whether this node may read blocks in the arena of that one."""
        member = self.gossip.core.membership.get(node_id)
        if member is None or member.status is not Status.ALIVE or member.site != self._site:
            return False
        return kv_of(member.info) == kv_of(self._identity)

    def _homes(self) -> dict[str, int]:
        """Members of this node's site that store pooled blocks, with the bytes of their shares."""
        return shares(self.gossip).get(self._site, {})

    def _other_sites(self) -> dict[str, dict[str, int]]:
        """The same for other sites."""
        return others_shares(self.gossip)

    async def _pool_members(self, peer: str, body: Nothing, data: memoryview) -> PoolMembers:
        return node_report.pool_members(self.gossip, self.pooled.pool_bytes, self.config.replicas)

    def _member_up(self, member: Member) -> None:
        self.channel.introduce(member.node_id, member.address)
        self._share_ranks()

    def _member_down(self, member: Member, reason: str) -> None:
        self.channel.drop(member.node_id, reason)
        if self.store.keeper is not None:
            self.store.keeper.lost(member.node_id)
        self._share_ranks()

    def _share_ranks(self) -> None:
        if self._sharing is not None:
            self._sharing.heard(member.info for member in self.gossip.members)

    def _record(self) -> NodeRecord:
        """This node's load, for gossip."""
        if self.engine is not None:
            record = self.engine.load.record()
        else:
            record = self.use.onto(NodeRecord(flags=DRAINING * self.leaving.begun))
        return self.weights.onto(record)
