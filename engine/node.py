"""One node, wired: channel and transfer engine, gossip, store share, engine, acceptor, HTTP API.

Read `start` as the order of things: listen first, so that a taken port or a cluster that refuses us is known before
weights are loaded; serve HTTP last.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket

from cache.block import root_key
from cache.store import Store
from engine.config import Config
from engine.engine import Engine
from engine.model_config import ModelSource
from engine.resolve import geometry
from engine.share import open_share
from engine.tokenizer import Tokenizer
from net.channel import Channel
from net.gossip import Gossip
from net.http.server import HttpServer
from net.metrics import Metrics
from net.transfer import TransferEngine
from sched.member import presets

log = logging.getLogger("mooncake.node")

TRANSPORTS = {"auto": ("shm", "tcp"), "shm": ("shm",), "tcp": ("tcp",)}


class Node:
    """Everything of one node. `config` is resolved; `http_socket` is bound and listening."""

    def __init__(self, config: Config, source: ModelSource, http_socket: socket.socket) -> None:
        self.config = config
        self.source = source
        self.geometry = geometry(config, source.config, config.kv_cache_dtype)
        self.root = root_key(source.fingerprint, self.geometry)
        self.metrics = Metrics(config.served_model_name, config.node_id)
        self.channel = Channel(config.node_id, self._hello(), self._check_peer)
        self.transfer = TransferEngine(self.channel, TRANSPORTS[config.transport])
        self.share = None if config.dram_bytes == 0 else open_share(config, self.geometry, self.root)
        self.engine: Engine | None = None
        self._http_socket = http_socket
        self._rng = random.Random()
        self._http: HttpServer | None = None
        self._gossip: Gossip | None = None

    # --- life

    async def start(self, stop: asyncio.Event) -> bool:
        """Join and load; False when `stop` was set meanwhile."""
        config = self.config
        control = await self.channel.start(config.host, config.control_port)
        self.store = Store(config.node_id, self.channel, self.transfer, self.share, self._homes)
        self._gossip = Gossip(self._member(control), presets[config.net], self._rng, self._record)
        self._gossip.on_up(self._member_up)
        self._gossip.on_down(self._member_down)
        self.channel.on_lost(self._gossip.suspect)
        await self._gossip.start(config.host, control[1])
        if config.join is not None:
            await self._join(config.join)
        tokenizer = Tokenizer.load(self.source, config.tokenizer)
        if "prefill" in config.roles or "decode" in config.roles:
            self.engine = await self._load_engine(stop)
            if self.engine is None:
                return False
            self.engine.start()
        self.acceptor = self._build_acceptor(tokenizer)
        self._http = HttpServer(self._build_frontend(tokenizer), api_key=config.api_key)
        await self._http.start(self._http_socket)
        self._gossip.announce_ready()
        return True

    async def stop(self) -> None:
        """Leave the cluster and give everything back, in reverse order."""
        if self._http is not None:
            await self._http.close()
        if self._gossip is not None:
            await self._gossip.leave()
        if self.engine is not None:
            await self.engine.close()
        if self._gossip is not None:
            self._gossip.close()
        await self.transfer.close()
        await self.channel.close()
        if self.share is not None:
            await self.share.close()
