"""One node, wired: channel and transfer engine, store share, gossip, HTTP API, engine.

Read `start` as the order of things: what others may need early (the store share, membership, the answer to "are you
ready?") comes before the slow part, loading weights. Nobody is sent here before the engine answers probes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp.web import Application

from cache.block import root_key
from cache.store import Store
from engine import __version__, node_report
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.progress import Progress
from engine.config import ROLES, Config
from engine.flags import UsageError
from engine.kv.share import open_share
from engine.phases import Phases
from engine.resolve import disagreement, geometry
from engine.serving.acceptor import Acceptor
from engine.serving.frontend import ServingFrontend, StoreFrontend
from engine.serving.live import Live
from engine.serving.placement_policy import placement_policy
from engine.serving.placing import Placer
from engine.speculation.draft_source import check_draft
from engine.text.tokenizer import Tokenizer
from net.channel import Channel, PeerRefused
from net.cluster_key import ClusterKey, KeyFileError
from net.gossip import Gossip, JoinRefused
from net.http.server import HttpServer, create_app
from net.load_words import LoadWords
from net.metrics import Metrics
from net.rdma import places
from net.rdma.verbs import prepare as rdma_prepare
from net.stalls import StallMonitor
from net.transfer import TransferEngine, transports
from sched.member import Member, presets
from sched.rejection import rejections
from sched.state import NodeRecord

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.loading import LoadedModel

log = logging.getLogger("mooncake.node")

TRANSPORTS = {"auto": ("shm", "rdma", "tcp")} | {name: (name,) for name in transports}


def rdma_devices(config: Config) -> list[str]:
    """Empty: all there are."""
    return [] if config.rdma_devices == "auto" else [name.strip() for name in config.rdma_devices.split(",")]


def transport_options(config: Config) -> dict[str, dict[str, Any]]:
    """The arguments of each transport's constructor. Raises UsageError for a wrong --topology-file."""
    try:
        overrides = places.overrides(config.topology_file)
    except ValueError as error:
        raise UsageError(str(error)) from None
    gid_index = None if config.rdma_gid_index < 0 else config.rdma_gid_index
    rdma = {"devices": rdma_devices(config), "gid_index": gid_index, "overrides": overrides}
    return {"rdma": rdma, "tcp": {"connections": config.tcp_connections}}


def open_cluster_key(config: Config) -> ClusterKey | None:
    """Raises UsageError."""
    if config.cluster_key_file is None:
        return None
    try:
        return ClusterKey(Path(config.cluster_key_file))
    except KeyFileError as error:
        raise UsageError(str(error)) from None


class Node:
    """Everything of one node. `config` is resolved, `http_socket` listens, `cluster` is what GET /cluster of the node
    to join answered (None: this node starts a cluster); `phases` of the start are logged when it is over."""

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        http_socket: socket.socket,
        cluster: dict[str, Any] | None,
        phases: Phases,
        draft: ModelSource | None = None,
    ) -> None:
        if config.device == "cuda":
            raise UsageError("--device cuda: KV in GPU memory cannot be transferred or pooled yet; use --device cpu")
        self.config = config
        self.source = source
        self._draft = draft
        self.geometry = geometry(config, source.config, config.kv_cache_dtype)
        self.root = root_key(source.fingerprint, self.geometry)
        if cluster is not None and (reason := disagreement(config, self.root.hex(), cluster)):
            raise UsageError(f"--join {config.join}: {reason}")
        self.metrics = Metrics(config.served_model_name, config.node_id)
        self.stalls = StallMonitor(self.metrics.observe_stall)
        key = open_cluster_key(config)
        self.channel = Channel(config.node_id, self.identity(), self._check_peer, key)
        self.transfer = TransferEngine(
            self.channel, TRANSPORTS[config.transport], transport_options(config), config.rail_limit
        )
        self.words = LoadWords(self.channel, self.transfer)
        self.metrics.watch_transfers(self.transfer.snapshot)
        self.share = open_share(config, self.geometry, self.root) if config.dram_bytes else None
        self.store = Store(
            config.node_id,
            self.channel,
            self.transfer,
            self.share,
            self._homes,
            block_bytes=self.geometry.block_bytes,
            replicas=config.replicas,
            repair_limit=config.repair_limit_bytes,
        )
        self.channel.handle("store.members", self._store_members)
        self.engine: Engine | None = None
        self._cluster = cluster
        self._phases = phases
        self._http_socket = http_socket
        self._rng = random.Random()
        self._policy = placement_policy(config, self._rng)
        self.gossip = Gossip(self._member(), presets[config.net], self._rng, self._record, key)
        self._gossiping = False
        self._http: HttpServer | None = None
        self.loading: str | None = "starting"

    # --- life

    async def start(self) -> None:
        """Returns when this node serves. Raises UsageError when the cluster refuses it."""
        config = self.config
        self.stalls.start()
        if "rdma" in TRANSPORTS[config.transport]:
            await asyncio.to_thread(rdma_prepare)
        host, port = await self.channel.start(config.host, config.control_port)
        self.gossip.on_up(self._member_up)
        self.gossip.on_down(self._member_down)
        self.channel.on_lost(self.gossip.suspect)
        await self.gossip.start(host, port)
        self._gossiping = True
        self._phase("network")
        self._http = HttpServer(await self._app())
        await self._http.start_on(self._http_socket)
        if self._cluster is not None:
            await self._join(self._cluster)
        if self.store.keeper is not None:
            self.store.keeper.start()
        self._phase("HTTP and joining")
        if "prefill" in config.roles or "decode" in config.roles:
            self.engine = await self._load_engine()
            log.info("calibrated by %d steps", await self.engine.calibrate())
            self._phase("calibration")
            self.engine.start()
            self.words.start(self.engine.load.word)
            self._phase("engine")
        self.loading = None
        log.info("ready after %s", self._phases.line())

    async def stop(self) -> None:
        """Leave the cluster and give everything back, in reverse order."""
        if self._http is not None:
            await self._http.close()
        if self._gossiping and self.store.keeper is not None:
            await self.store.keeper.leave(self.config.leave_ms / 1000)
        if self._gossiping:
            await self.gossip.leave()
        if self.engine is not None:
            await self.engine.close()
        await self.gossip.close()
        await self.words.close()
        await self.transfer.close()
        await self.channel.close()
        await self.store.close()
        await self.stalls.close()

    async def _join(self, cluster: dict[str, Any]) -> None:
        address = tuple(cluster["control"])
        try:
            await self.channel.connect(address)
            await self.gossip.join(address)
        except (PeerRefused, JoinRefused) as error:
            raise UsageError(f"--join {self.config.join}: {error}") from None
        except (OSError, TimeoutError) as error:
            raise UsageError(
                f"--join {self.config.join}: the node answers HTTP, but not on its control port {address[1]} "
                f"({error or type(error).__name__}); open that port for TCP and UDP, or fix it by --control-port"
            ) from None

    async def _load_engine(self) -> Engine:
        """In a thread: importing torch takes a second, and a store node never pays for it."""

        def load() -> tuple[type[Engine], LoadedModel]:
            from engine.engine import Engine
            from engine.loading import load_model

            self._phase("torch")
            return Engine, load_model(self.config, self.geometry, self.source, self._draft, Progress())

        self.loading = "loading weights"
        # Not the loop's pool: an OpenMP team lives as long as the thread that led it, and libgomp cuts the spinning of
        # every team short once there are more of its threads than cores.
        with ThreadPoolExecutor(1, thread_name_prefix="loading") as loading:
            engine, loaded = await asyncio.get_running_loop().run_in_executor(loading, load)
        self._phase("weights")
        return engine(
            self.config, self.geometry, loaded, self.channel, self.transfer, self.store, self.words, self.metrics
        )

    async def _app(self) -> Application:
        """The HTTP API; without a model, what can be asked of a store."""
        config = self.config
        if self.source.format == "none":
            plain = StoreFrontend(*self._answers(None))
            return create_app(plain, api_key=config.api_key, version=__version__)
        tokenizer = await asyncio.to_thread(Tokenizer.load, self.source, config.tokenizer)
        await asyncio.to_thread(check_draft, self._draft, self.source, tokenizer)
        self._phase("tokenizer")
        frontend = self._frontend(tokenizer, self._acceptor(tokenizer))
        return create_app(frontend, api_key=config.api_key, version=__version__)

    def _phase(self, name: str) -> None:
        self._phases.end(name, time.monotonic())

    # --- rooms

    def _acceptor(self, tokenizer: Tokenizer) -> Acceptor:
        config = self.config
        placer = Placer(
            self._policy,
            self.channel,
            self.gossip,
            self.store,
            self.words,
            self.geometry,
            config.enable_prefix_caching,
            config.max_waiting_requests,
            rejections[config.rejection](),
            config.slo_scale,
        )
        return Acceptor(
            config.node_id,
            self.channel,
            placer,
            tokenizer,
            self.root,
            config.max_model_len,
            config.request_timeout_ms / 1000,
            self._rng,
            self.metrics,
        )

    def _frontend(self, tokenizer: Tokenizer, acceptor: Acceptor) -> ServingFrontend:
        return ServingFrontend(
            self.config.served_model_name,
            self.config.model,
            self.config.max_model_len,
            tokenizer,
            acceptor,
            *self._answers(acceptor),
        )

    def _answers(
        self, acceptor: Acceptor | None
    ) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], str | None], Callable[[], Any], Live]:
        """What the API says of this node: its cluster, its state, why it is not ready, its metrics, the live page."""

        def cluster() -> dict[str, Any]:
            return node_report.cluster(self.identity(), self.gossip, self.transfer)

        live = Live(
            self.channel,
            lambda: node_report.live(self, acceptor),
            lambda request_id: None if acceptor is None else acceptor.timeline(request_id),
            lambda: list(cluster()["members"]),
        )
        return (cluster, lambda: node_report.state(self), lambda: self.loading, self._metrics_text, live)

    # --- who we are, who they are

    def identity(self) -> dict[str, Any]:
        """What nodes compare before they share KV."""
        return {
            "model": self.config.served_model_name,
            "root": self.root.hex(),
            "block_size": self.config.block_size,
            "dtype": self.geometry.dtype,
        }

    def _check_peer(self, theirs: dict[str, Any]) -> str | None:
        return disagreement(self.config, self.root.hex(), theirs)

    def _member(self) -> Member:
        """The control address is filled in when gossip starts."""
        return Member(
            node_id=self.config.node_id,
            address=("", 0),
            http=self.http_address,
            roles=self.config.roles,
            info=self.identity() | {"share": self.config.dram_bytes + self._ssd_bytes},
        )

    @property
    def _ssd_bytes(self) -> int:
        return self.config.ssd_bytes if self.config.ssd_path is not None else 0

    @property
    def http_address(self) -> str:
        host, port = self._http_socket.getsockname()[:2]
        return f"{self.config.host}:{port}" if ":" not in host else f"[{self.config.host}]:{port}"

    def _homes(self) -> dict[str, int]:
        """Members that pooled blocks live on, with the bytes of their shares."""
        return {member.node_id: member.info["share"] for member in self.gossip.members if member.info["share"] > 0}

    async def _store_members(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        return node_report.store_members(self)

    def _member_up(self, member: Member) -> None:
        self.channel.introduce(member.node_id, member.address)

    def _member_down(self, member: Member, reason: str) -> None:
        self.channel.drop(member.node_id, reason)

    def _record(self) -> NodeRecord:
        """This node's load, for gossip."""
        return self.engine.load.record() if self.engine is not None else NodeRecord()

    async def _metrics_text(self) -> bytes:
        """GET /metrics; what is a state and not an event is read now."""
        roles = Counter(role for member in self.gossip.members for role in member.roles)
        self.metrics.set_members({role: roles[role] for role in ROLES})
        self.metrics.set_longest_stall(self.stalls.longest_s)
        if self.engine is not None:
            self.metrics.set_waiting(self.engine.load.waiting_by_class())
        return await asyncio.to_thread(self.metrics.text)
