"""A node's entrance for clients: acceptor and HTTP API."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.block import BlockKey, type_bytes
from cache.sessions.parked import Times
from engine import __version__
from engine.backends.question import Forwarded
from engine.checkpoint.model_source import ModelSource
from engine.config.agreement import identity
from engine.config.backend_address import addresses
from engine.config.config import ROLES, Config
from engine.config.flags import UsageError
from engine.config.net_options import api_keys, open_cluster_key
from engine.config.scaling import bound_tenants
from engine.config.step_policies import refusals
from engine.front.acceptor import Acceptor, RequestLimits, Tries
from engine.front.attempts import Attempts
from engine.front.cluster import Cluster
from engine.front.flight_log import FlightLog
from engine.front.groups import GroupRules
from engine.front.placement_policy import placement_policy
from engine.front.placing import PlacementRules, Placer
from engine.front.sessions.turns import Sessions
from engine.node import report as node_report
from engine.node.frontend import Answers, Compiler, Served, ServingFrontend, StoreFrontend
from engine.node.leaving import Leaving
from engine.node.parts import Blocks, Measures, Serving
from engine.node.prefix_reset import PrefixReset
from engine.node.weights import NodeWeights
from engine.observe.live import Live
from engine.observe.otlp import OtlpError, SpanExport
from engine.observe.trace_recorder import TraceRecorder
from engine.sampling.grammar import Grammars
from engine.speculation.draft_source import check_draft
from engine.text.tokenizer import Tokenizer
from net.http.batches.runner import Batches, PathInUse
from net.http.common.frontend import Frontend
from net.http.server import HttpServer, create_app
from net.metrics.watched import of_traces
from sched.placement.groups.context import context
from sched.placement.groups.pipeline import pipeline
from sched.sessions.parking import LEAST_TTL_S, Parking, ParkingRules

if TYPE_CHECKING:
    from engine.backends.placing import WorkerPlacer


class FrontDoor:
    """The API of one node. It refuses clients before `open`. Raises UsageError for an unusable key file."""

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        cluster: Cluster,
        blocks: Blocks,
        serving: Serving,
        leaving: Leaving,
        measures: Measures,
    ) -> None:
        self._config, self._source = config, source
        self._cluster, self._blocks, self._serving, self._leaving = cluster, blocks, serving, leaving
        self._measures = measures
        self.weights = NodeWeights(config, source, cluster, blocks.root, serving)
        serving.weights = self.weights.member
        self._rng = random.Random()
        self._policy = placement_policy(config, self._rng, self._price)
        self._keys = api_keys(config)
        self._recorder = _recorder(config)
        self._export = _span_export(config)
        if (export := self._export) is not None:
            measures.metrics.watch(of_traces(lambda: export.lost, lambda: export.sent))
        self.grammars: Grammars | None = None  # None on a node without a model
        self._sessions: Sessions | None = None
        self._placer: Placer | None = None
        self._http: HttpServer | None = None

    async def open(self, listening: socket.socket, draft: ModelSource | None) -> None:
        """Serve on a listening socket. Without a model, the node answers only questions about its store."""
        frontend: Frontend
        if self._source.format == "none":
            frontend = StoreFrontend(self._answers())
        else:
            frontend = await self._with_model(draft)
        config = self._config
        app = create_app(
            frontend,
            keys=self._keys,
            max_body_bytes=config.max_body_bytes,
            max_connections=config.max_connections,
            read_timeout_s=config.read_timeout_ms / 1000,
            rate_limit=config.rate_limit,
            allowed_origins=[origin.strip() for origin in (config.allowed_origins or "").split(",") if origin.strip()],
            ignore_unknown=config.unknown_fields == "ignore",
            version=__version__,
            cluster_key=open_cluster_key(config),
            batches=_batches(config, frontend),
        )
        self._http = HttpServer(app, max_header_bytes=config.max_header_bytes)
        await self._http.start_on(listening)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
        if self._placer is not None:
            self._placer.close()
        if self._sessions is not None:
            self._sessions.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._export is not None:
            await asyncio.to_thread(self._export.close)
        if self._serving.fleet is not None:
            await self._serving.fleet.close()

    async def _with_model(self, draft: ModelSource | None) -> ServingFrontend:
        config, cluster, blocks = self._config, self._cluster, self._blocks
        tokenizer = await asyncio.to_thread(Tokenizer.load, self._source, config.tokenizer)
        await asyncio.to_thread(check_draft, draft, self._source, tokenizer)
        self._measures.phase("tokenizer")
        rules = PlacementRules(
            self._policy,
            refusals(config),
            config.max_waiting_requests,
            config.enable_prefix_caching,
            config.prefix_intents,
            self._groups(),
            config.max_model_len,
        )
        placer: Placer | WorkerPlacer
        if config.backend is not None:
            placer = await self._open_fleet(config.backend, rules)
        else:
            placer = self._placer = Placer(rules, cluster, blocks.geometry, self._rng)
            placer.start()
        limits = RequestLimits(
            config.max_model_len,
            config.request_timeout_ms / 1000,
            config.role_wait_ms / 1000,
            bound_tenants(config.site_bound_tenants),
        )
        measures = self._measures
        flight_log = FlightLog(config.node_id, measures.metrics, placer, measures.history, self._recorder, self._export)
        attempts: Tries
        compiler: Compiler
        if isinstance(placer, Placer):
            attempts = Attempts(cluster.channel, placer, flight_log)
            cluster.gossip.on_suspected(attempts.node_suspected)
            compiler = self.grammars = Grammars(tokenizer)
        else:
            assert self._serving.fleet is not None
            attempts, compiler = self._serving.fleet.attempts(flight_log), Forwarded()
        acceptor = Acceptor(config.node_id, placer, attempts, tokenizer, blocks.root, limits, flight_log)
        self._serving.acceptor = acceptor
        if config.session_parking and config.enable_prefix_caching and isinstance(placer, Placer):
            acceptor.sessions = self._sessions = self._parking()
        longest, scored = config.max_model_len, config.max_answer_logprobs
        trusts = config.trust_request_chat_template
        served = Served(config.served_model_name, config.model, longest, scored, trusts)
        return ServingFrontend(served, tokenizer, compiler, acceptor, self._answers())

    def _parking(self) -> Sessions:
        config, store = self._config, self._cluster.store
        rules = ParkingRules(
            config.session_hold_ms / 1000,
            config.session_window_ms / 1000,
            ttl_s=config.session_ttl_ms / 1000,
            least_ttl_s=min(LEAST_TTL_S, config.session_ttl_ms / 1000),
        )

        def park(keys: Sequence[BlockKey], session: int, way: Parking) -> None:
            store.park(keys, session, Times(way.down_s, way.up_s, way.late_s, way.over_s))

        return Sessions(rules, self._blocks.geometry.block_size, park, self._measures.metrics)

    def _price(self, node_id: str) -> float:
        """Of a member, per hour."""
        member = self._cluster.gossip.core.membership.get(node_id)
        return 1.0 if member is None else member.cost

    def _groups(self) -> GroupRules | None:
        config, model = self._config, self._source.config
        if config.prefill_parallel == "none":
            return None
        geometry = self._blocks.geometry
        divide, hop_bytes = {
            "cpp": (pipeline, model.hidden_size * type_bytes[config.dtype]),
            "cp": (context, geometry.layer_bytes // geometry.block_size),
        }[config.prefill_parallel]
        least, most, budget = config.cpp_min_tokens, config.cpp_max_nodes, config.max_num_batched_tokens
        return GroupRules(least, most, config.cpp_min_gain, model.num_layers, divide, hop_bytes, budget)

    async def _open_fleet(self, workers: str, rules: PlacementRules) -> WorkerPlacer:
        """Watch the workers of --backend. Other nodes do not import this."""
        from engine.backends.fleet import Fleet

        fleet = self._serving.fleet = Fleet(
            addresses(workers), rules, self._blocks.root, self._blocks.geometry.block_size
        )
        await fleet.start()
        self._measures.phase("workers")
        return fleet.placer

    def _answers(self) -> Answers:
        """The API's answers about this node: cluster, state, why it is not ready, metrics, the live page."""
        config, cluster, blocks, serving = self._config, self._cluster, self._blocks, self._serving
        stalls = self._measures.stalls
        own = identity(config, blocks.geometry, blocks.root.hex()) | {"fingerprint": self._source.fingerprint}

        def members() -> dict[str, Any]:
            return node_report.cluster(own | self.weights.told(), cluster.gossip, cluster.transfer)

        live = Live(
            cluster.channel,
            lambda: node_report.live(serving, cluster, blocks, stalls, time.time()),
            lambda request_id: None if serving.acceptor is None else serving.acceptor.timeline(request_id),
            lambda: list(members()["members"]),
            self._measures.history,
            lambda: [] if serving.fleet is None else serving.fleet.live(time.time()),
        )
        return Answers(
            members,
            lambda: node_report.state(config, serving, cluster, blocks, stalls),
            lambda: serving.not_ready,
            lambda: {} if serving.engine is None else serving.engine.masked_ranks,
            self._metrics_text,
            live,
            self._leaving,
            PrefixReset(cluster.channel, serving, blocks, lambda: [one["node_id"] for one in members()["members"]]),
            self.weights,
        )

    async def _metrics_text(self) -> bytes:
        """GET /metrics. Reads gauges of states now; events are already counted."""
        metrics, engine = self._measures.metrics, self._serving.engine
        roles = Counter(role for member in self._cluster.gossip.members for role in member.roles)
        for role in ROLES:
            metrics.set("mooncake:cluster_members", roles[role], role=role)
        metrics.set("mooncake:node_cost", self._config.node_cost)
        metrics.set("mooncake:weights_generation", self.weights.member.served.generation)
        metrics.set("mooncake:weights_held", len(self.weights.member.held))
        metrics.set("mooncake:event_loop_longest_stall_seconds", self._measures.stalls.longest_s)
        if engine is not None:
            for name, count in engine.load.waiting_by_class().items():
                metrics.set("mooncake:requests_waiting", count, service_class=name)
        metrics.read()
        return await asyncio.to_thread(metrics.text)


def _recorder(config: Config) -> TraceRecorder | None:
    if config.record_trace is None:
        return None
    try:
        return TraceRecorder(Path(config.record_trace), time.time())
    except OSError as error:
        raise UsageError(f"--record-trace {config.record_trace}: {error.strerror}") from None


def _batches(config: Config, frontend: Frontend) -> Batches | None:
    if config.batch_path is None:
        return None
    try:
        return Batches(frontend, Path(config.batch_path), config.batch_concurrency)
    except (OSError, PathInUse) as error:
        raise UsageError(f"--batch-path {config.batch_path}: {error}") from None


def _span_export(config: Config) -> SpanExport | None:
    if config.otlp_traces_endpoint is None:
        return None
    try:
        return SpanExport(config.otlp_traces_endpoint, config.served_model_name)
    except OtlpError as error:
        raise UsageError(str(error)) from None
