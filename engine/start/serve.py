"""Runs a node with the configuration from the command line until it is told to stop.

The modules of a node are imported here, and not with the command line: wrong flags, --help and the other commands do
not wait for them, and the import of torch has begun in a thread when Python gets to them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

from cache.ssd.claim import SsdError
from engine.checkpoint.model_source import ModelSource, adopt, describe, no_model, with_weights_in
from engine.config.config import NO_MODEL, Config
from engine.config.fits import beyond_free_memory
from engine.config.flags import UsageError, as_dict, show
from engine.config.machine import survey
from engine.config.net_options import api_key, open_cluster_key
from engine.config.resolve import resolve
from engine.model.model_error import ModelError
from engine.node.node import Node
from engine.node.phases import Phases
from engine.node.report import ready_line
from engine.observe.logs import configure as configure_logs
from engine.speculation.draft_source import draft_source, with_draft_layer
from engine.start.garbage import collect_seldom
from engine.start.torch_import import begin_engine
from net.channel.sockets import ListenError, listen
from net.http.client import ClusterError, fetch_cluster
from net.loop.tasks import awaited


def run(config: Config, begun: float) -> int:
    """The exit code; 1 = the node could not go on, 2 = something the user must change. `begun`: when the process did,
    in monotonic seconds. The caller has switched the garbage collector off."""
    phases = Phases(begun)
    phases.end("imports", time.monotonic())
    try:
        if config.model == NO_MODEL:
            source = no_model(config.value_bytes, config.block_size)
        else:
            source = describe(config.model, config.load_format, config.seed, config.weights_from_store)
            source = with_draft_layer(config, with_weights_in(source, config.weight_dtype))
        draft = draft_source(config)
        if config.computes:
            begin_engine()
        return _run(serve(config, source, draft, phases))
    except (UsageError, ModelError, ClusterError, ListenError, SsdError) as error:
        print(f"mooncake: {error}", file=sys.stderr)
        return 2


async def serve(config: Config, source: ModelSource, draft: ModelSource | None, phases: Phases) -> int:
    """Resolve, join, serve."""
    cluster = None
    if config.join is not None:
        cluster = await fetch_cluster(config.join, api_key(config), cluster_key=open_cluster_key(config))
    source = adopt(source, cluster)
    # 'auto' stays on the CPU until serving on a GPU has been seen to work.
    machine = survey(look_for_gpu=config.device == "cuda", ssd_path=config.ssd_path)
    wanted = config.max_connections
    config = resolve(
        config,
        source.config,
        machine,
        secrets.token_hex(2),
        cluster,
        draft.config if draft else None,
        sum(file.stat().st_size for file in source.files),
    )
    configure_logs(config.log_level, config.log_format, node_id=config.node_id)
    log = logging.getLogger("mooncake.node")
    if config.max_connections < wanted:
        log.warning(
            "--max-connections %d is limited to %d: this process may have %d open files (ulimit -n)",
            wanted,
            config.max_connections,
            machine.max_files,
        )
    if (short := beyond_free_memory(config, machine)) is not None:
        log.warning("%s", short)
    stop, hurry = _stop_on_signals()
    phases.end("model and machine", time.monotonic())
    with listen(config.host, config.port) as http_socket:
        node = Node(config, source, http_socket, cluster, phases, draft)
        # After the flags were accepted, so that the refusal of one does not stand below eighty lines.
        if config.log_format == "text":
            print(show(config), file=sys.stderr, flush=True)
        else:
            log.info("configuration: %s", json.dumps(as_dict(config)))
        try:
            await _first(node.start(), stop.wait(), node.given_up.wait())
            collect_seldom(node.gossip)
            if not stop.is_set() and not node.given_up.is_set():
                print(json.dumps(ready_line(node.gossip.me)), flush=True)
                await _first(stop.wait(), node.leaving.asked.wait(), node.given_up.wait())
                await _first(node.drain(), hurry.wait())
        finally:
            await node.stop()
    return 0 if node.lost is None else 1


async def _first(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first to end and cancel the others; raises what it raised."""
    tasks = [awaited(work) for work in works]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()


def _stop_on_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first signal, and by the second one."""
    stop, hurry, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    return stop, hurry


def _run(work: Any) -> int:
    """uvloop receives KV at the speed of plain sockets, asyncio's own loop at half of it."""
    import uvloop

    return int(uvloop.run(work))
