#!/usr/bin/env python3
"""Mooncake: one command per node.

    python mooncake.py                                             a one-node server with the embedded model
    python mooncake.py --role prefill --port 8000                  the first node of a cluster
    python mooncake.py --role decode  --port 8001 --join HOST:8000
    python mooncake.py --role store   --port 8002 --join HOST:8000
    python mooncake.py --role store --model none                   a store by itself (mooncake_client.py talks to it)
    python mooncake.py doctor [--peer HOST:8000]                   what this machine offers, and the path to a peer
    python mooncake.py explain [REQUEST-ID] [--url HOST:8000]      why it (or the last request) went where it went
    python mooncake.py top [--url HOST:8000]                       the cluster as it is now, in the terminal
    python mooncake.py drain --url HOST:8000                       that node leaves without dropping a request
    python mooncake.py expert-rank --join HOST:PORT                a share of the experts of a node on another host

This file is the table of contents: flags -> Config -> engine/start/serve.py, which runs engine/node/node.py.
"""

from __future__ import annotations

import time

BEGUN = time.monotonic()  # before the imports: they are a part of the start-up

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

# The rooms lie next to this file, also where a wheel was installed (setup.py). First on the path, because the standard
# library has a module named sched, too.
sys.path.insert(0, str(Path(__file__).resolve().parent))
if find_spec("uvloop") is None:
    sys.exit("mooncake: this Python lacks mooncake's packages: run scripts/setup, then .venv/bin/python mooncake.py")

from engine.config.flags import UsageError, parse
from engine.observe.logs import configure as configure_logs
from engine.start.torch_import import begin_library
from net.loop.leaving import leave

GIL_SWITCH_S = 0.001
SPIN_COUNT = "3000"
"""How often libgomp's threads look for work before they sleep. 3,000 looks take about 0.1 ms. The first import of torch
reads it. libgomp's default is 300,000, which starves other threads on the same cores, also those of the model:
decode steps of 14 ms took 560 ms next to one busy process. With 3,000 they take 42 ms there. With 10,000 they take
63 ms, without a gain on an idle machine. With 1,000 they take 38 ms, but steps of 32 requests on an idle machine take
2 ms longer."""

COMMANDS = {
    "doctor": "engine.doctor.run",
    "explain": "engine.observe.explain",
    "drain": "engine.node.drain",
    "top": "engine.observe.top",
    "expert-rank": "engine.experts.rank_command",
}
"""Commands other than running a node: `mooncake.py NAME ...` -> the module whose main runs it."""

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
    limit_spinning()
    try:
        arguments = sys.argv[1:] if argv is None else argv
        if arguments and arguments[0] in COMMANDS:
            return int(import_module(COMMANDS[arguments[0]]).main(arguments[1:]))
        gc.disable()  # until the node is up
        config = parse(arguments, commands=SUMMARIES)
        configure_logs(config.log_level, config.log_format)
        os.umask(PRIVATE)
        if config.computes:
            begin_library()
        from engine.start.serve import run  # half a second of imports: not for wrong flags, --help and other commands

        return run(config, BEGUN)
    except UsageError as error:
        print(f"mooncake: {error}", file=sys.stderr)
        return UsageError.exit_code


def limit_spinning() -> None:
    """Unless the environment says otherwise; it has an effect before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def command() -> NoReturn:
    """`main` as a process."""
    leave(main())


if __name__ == "__main__":
    command()
