"""How clients get into a node and out of it: acceptor, HTTP API, and the drain before the node stops."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import __version__, node_report
from engine.checkpoint.model_source import ModelSource
from engine.config import ROLES, Config
from engine.flags import UsageError
from engine.sampling.grammar import Grammars
from engine.serving.acceptor import Acceptor, RequestLimits
from engine.serving.flight_log import FlightLog
from engine.serving.frontend import Answers, Served, ServingFrontend, StoreFrontend
from engine.serving.live import Live
from engine.serving.otlp import OtlpError, SpanExport
from engine.serving.placement_policy import placement_policy
from engine.serving.placing import PlacementRules, Placer
from engine.serving.trace_recorder import TraceRecorder
from engine.speculation.draft_source import check_draft
from engine.text.tokenizer import Tokenizer
from net.http.frontend import Frontend
from net.http.keys import ApiKeyFileError, ApiKeys, key_to_send
from net.http.server import HttpServer, create_app
from net.watched_metrics import of_traces
from sched.rejection import rejections

if TYPE_CHECKING:
    from engine.node import Node


class FrontDoor:
    """The API of one node. Nobody is let in before `open`. Raises UsageError for a key file that cannot be used."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._policy = placement_policy(node.config, node.rng)
        self._keys = _api_keys(node.config)
        self._recorder = _recorder(node.config)
        self._export = _span_export(node.config)
        if (export := self._export) is not None:
            node.metrics.watch(of_traces(lambda: export.lost, lambda: export.sent))
        self._acceptor: Acceptor | None = None
        self.grammars: Grammars | None = None  # None on a node without a model
        self._http: HttpServer | None = None

    async def open(self, listening: socket.socket, draft: ModelSource | None) -> None:
        """Serve on a socket that listens already. Without a model, answer what can be asked of a store."""
        frontend: Frontend
        if self._node.source.format == "none":
            frontend = StoreFrontend(self._answers())
        else:
            frontend = await self._serving(draft)
        config = self._node.config
        app = create_app(
            frontend,
            keys=self._keys,
            max_body_bytes=config.max_body_bytes,
            max_connections=config.max_connections,
            read_timeout_s=config.read_timeout_ms / 1000,
            rate_limit=config.rate_limit,
            allowed_origins=[origin.strip() for origin in (config.allowed_origins or "").split(",") if origin.strip()],
            version=__version__,
            cluster_key=self._node.cluster_key,
        )
        self._http = HttpServer(app, max_header_bytes=config.max_header_bytes)
        await self._http.start_on(listening)

    @property
    def accepted(self) -> int:
        """Requests of clients of this node that have not ended."""
        return 0 if self._acceptor is None else self._acceptor.open

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing more and finish what clients wait for, for `timeout_s` at most."""
        if self._acceptor is not None:
            await self._acceptor.drain(timeout_s)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._export is not None:
            await asyncio.to_thread(self._export.close)

    async def _serving(self, draft: ModelSource | None) -> ServingFrontend:
        node, config = self._node, self._node.config
        tokenizer = await asyncio.to_thread(Tokenizer.load, node.source, config.tokenizer)
        await asyncio.to_thread(check_draft, draft, node.source, tokenizer)
        node.phase("tokenizer")
        rules = PlacementRules(
            self._policy,
            rejections[config.rejection](config.classes),
            config.max_waiting_requests,
            config.slo_scale,
            config.enable_prefix_caching,
            config.prefix_intents,
        )
        placer = Placer(rules, node.cluster, node.geometry, node.rng)
        limits = RequestLimits(config.max_model_len, config.request_timeout_ms / 1000, config.role_wait_ms / 1000)
        flight_log = FlightLog(config.node_id, node.metrics, placer, self._recorder, self._export)
        self._acceptor = Acceptor(node.channel, placer, tokenizer, node.root, limits, flight_log)
        node.gossip.on_suspected(self._acceptor.node_suspected)
        self.grammars = Grammars(tokenizer)
        longest, scored = config.max_model_len, config.max_answer_logprobs
        served = Served(config.served_model_name, config.model, longest, scored)
        return ServingFrontend(served, tokenizer, self.grammars, self._acceptor, self._answers())

    def _answers(self) -> Answers:
        """What the API says of this node: its cluster, its state, why it is not ready, its metrics, the live page."""
        node = self._node

        def cluster() -> dict[str, Any]:
            return node_report.cluster(
                node.identity() | {"fingerprint": node.source.fingerprint}, node.gossip, node.transfer
            )

        live = Live(
            node.channel,
            lambda: node_report.live(node, self._acceptor),
            lambda request_id: None if self._acceptor is None else self._acceptor.timeline(request_id),
            lambda: list(cluster()["members"]),
        )
        return Answers(
            cluster, lambda: node_report.state(node), lambda: node.unready, self._metrics_text, live, node.leaving
        )

    async def _metrics_text(self) -> bytes:
        """GET /metrics; what is a state and not an event is read now."""
        node = self._node
        roles = Counter(role for member in node.gossip.members for role in member.roles)
        node.metrics.set_members({role: roles[role] for role in ROLES})
        node.metrics.set_longest_stall(node.stalls.longest_s)
        if node.engine is not None:
            node.metrics.set_waiting(node.engine.load.waiting_by_class())
        node.metrics.read()
        return await asyncio.to_thread(node.metrics.text)


def api_key(config: Config) -> str | None:
    """What this node sends to the node it joins. Raises UsageError."""
    try:
        return key_to_send(config.api_key, _key_file(config))
    except ApiKeyFileError as error:
        raise UsageError(str(error)) from None


def _api_keys(config: Config) -> ApiKeys:
    try:
        return ApiKeys(config.api_key, _key_file(config))
    except ApiKeyFileError as error:
        raise UsageError(str(error)) from None


def _key_file(config: Config) -> Path | None:
    return None if config.api_key_file is None else Path(config.api_key_file).expanduser()


def _recorder(config: Config) -> TraceRecorder | None:
    if config.record_trace is None:
        return None
    try:
        return TraceRecorder(Path(config.record_trace), time.time())
    except OSError as error:
        raise UsageError(f"--record-trace {config.record_trace}: {error.strerror}") from None


def _span_export(config: Config) -> SpanExport | None:
    if config.otlp_traces_endpoint is None:
        return None
    try:
        return SpanExport(config.otlp_traces_endpoint, config.served_model_name)
    except OtlpError as error:
        raise UsageError(str(error)) from None
