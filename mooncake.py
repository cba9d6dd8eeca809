#!/usr/bin/env python3
"""Mooncake: one command per node.

    python mooncake.py                                             a one-node server with the embedded model
    python mooncake.py --role prefill --port 8000                  the first node of a cluster
    python mooncake.py --role decode  --port 8001 --join HOST:8000
    python mooncake.py --role store   --port 8002 --join HOST:8000
    python mooncake.py --role store --model none                   a store by itself (cache/store/client.py talks to it)
    python mooncake.py doctor [--peer HOST:8000]                   what this machine offers, and the path to a peer
    python mooncake.py explain [REQUEST-ID] [--url HOST:8000]      why it (or the last request) went where it went
    python mooncake.py top [--url HOST:8000]                       the cluster as it is now, in the terminal
    python mooncake.py drain --url HOST:8000                       that node leaves without dropping a request
    python mooncake.py expert-rank --join HOST:PORT                a share of the experts of a node on another host

This file is the table of contents: flags -> Config -> Node -> run. engine/node/node.py wires a node.
"""

from __future__ import annotations

import time

BEGUN = time.monotonic()  # before the imports: they are a part of the start-up

import asyncio
import gc
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Coroutine, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# The rooms lie next to this file, also where a wheel was installed (setup.py). First on the path, because the standard
# library has a module named sched, too.
sys.path.insert(0, str(Path(__file__).resolve().parent))
if find_spec("uvloop") is None:
    sys.exit("mooncake: this Python lacks mooncake's packages: run scripts/setup, then .venv/bin/python mooncake.py")

from cache.ssd.claim import SsdError
from engine.checkpoint.model_source import ModelSource, adopt, describe, no_model, with_weights_in
from engine.config.config import NO_MODEL, Config
from engine.config.fits import beyond_free_memory
from engine.config.flags import UsageError, as_dict, parse, show
from engine.config.machine import survey
from engine.config.net_options import api_key, open_cluster_key
from engine.config.resolve import resolve
from engine.doctor.run import main as doctor
from engine.experts.rank_command import main as expert_rank
from engine.model.model_error import ModelError
from engine.node.drain import main as drain
from engine.node.node import Node
from engine.node.phases import Phases
from engine.node.report import ready_line
from engine.observe.explain import main as explain
from engine.observe.logs import configure as configure_logs
from engine.observe.top import main as top
from engine.speculation.draft_source import draft_source, with_draft_layer
from net.channel.sockets import ListenError, listen
from net.http.client import ClusterError, fetch_cluster
from net.loop.tasks import awaited

GIL_SWITCH_S = 0.001
COLLECT_AFTER = 5_000, 10, 20
"""gc.set_threshold of a serving node: young objects per collection, and collections of a generation per collection of
the next. Python's own (700, 10, 10) makes 85 young collections and a full one while the largest body is parsed, and a
full one holds every thread for 10 to 40 ms: it looks at the timelines of the last thousand requests."""

SPIN_COUNT = "3000"
"""How often libgomp's threads look for work before they sleep. 3,000 looks take about 0.1 ms. The first import of torch
reads it. libgomp's default is 300,000, which starves other threads on the same cores, also those of the model:
decode steps of 14 ms took 560 ms next to one busy process. With 3,000 they take 42 ms there. With 10,000 they take
63 ms, without a gain on an idle machine. With 1,000 they take 38 ms, but steps of 32 requests on an idle machine take
2 ms longer."""

COMMANDS = {"doctor": doctor, "explain": explain, "drain": drain, "top": top, "expert-rank": expert_rank}
"""Commands other than running a node: `mooncake.py NAME ...`."""

SUMMARIES = {
    "doctor": "what this machine offers, what is missing, the path to a peer",
    "explain": "why a request went where it went, and how it did",
    "drain": "a node leaves without dropping a request",
    "top": "the cluster as it is now, in the terminal",
    "expert-rank": "a share of the experts of a node on another host",
}
"""One line for each command in --help; each command has its own --help."""

PRIVATE = 0o077
"""Mask of the files a node makes: pooled KV on disk and recorded traces are its own user's to read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one node until SIGINT or SIGTERM. Returns the exit code; 1 = it could not go on, 2 = something the user must
    change."""
    # The engine thread and the event loop share the interpreter lock. A thread gives it up around every kernel, then
    # waits for the other thread up to this interval (5 ms by default). Far below 1 ms, the switches cost more than
    # the shorter waits save.
    sys.setswitchinterval(GIL_SWITCH_S)
    gc.disable()  # until the node is up
    limit_spinning()
    try:
        arguments = sys.argv[1:] if argv is None else argv
        if arguments and arguments[0] in COMMANDS:
            return COMMANDS[arguments[0]](arguments[1:])
        config = parse(arguments, commands=SUMMARIES)
        configure_logs(config.log_level, config.log_format)
        os.umask(PRIVATE)
        phases = Phases(BEGUN)
        phases.end("imports", time.monotonic())
        if config.model == NO_MODEL:
            source = no_model(config.value_bytes, config.block_size)
        else:
            source = describe(config.model, config.load_format, config.seed, config.weights_from_store)
            source = with_draft_layer(config, with_weights_in(source, config.weight_dtype))
        return _run(serve(config, source, draft_source(config), phases))
    except (UsageError, ModelError, ClusterError, ListenError, SsdError) as error:
        print(f"mooncake: {error}", file=sys.stderr)
        return 2


def limit_spinning() -> None:
    """Unless the environment says otherwise; it has an effect before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


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
            # Objects from the start-up live as long as the node. A full collection over them would hold every thread
            # for half a second, so none runs during the start-up either.
            gc.freeze()
            gc.set_threshold(*COLLECT_AFTER)
            gc.enable()
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


if __name__ == "__main__":
    sys.exit(main())
