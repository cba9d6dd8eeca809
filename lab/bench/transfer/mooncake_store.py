"""Upstream's store over TCP: its master and a holder in the owner's process, a client without a segment."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench.transfer.agent import Arena, Call, most_puts, timed

LOADED_BYTES = 64 << 20  # of blocks of at most 64 KiB, as in ours_store
FOREVER = str(1 << 24)  # seconds: a paused holder is not dead
BUFFER_BYTES = 64 << 20


def make(name: str, role: str, congestion: str) -> Any:
    return Holder() if role == "owner" else Client()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _setup(segment_bytes: int, master: str) -> Any:
    from mooncake.store import MooncakeDistributedStore  # installed in the peer's interpreter

    store = MooncakeDistributedStore()
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", master)
    if status:
        raise RuntimeError(f"setup returned {status}")
    return store


class Holder:
    """One segment, half again as large as the blocks that a cell puts: it would evict at 90 %, so it never does."""

    def start(self, remote: Arena) -> dict[str, Any]:
        port = free_port()
        setpriv = shutil.which("setpriv")
        guard = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        flags = [f"--rpc_port={port}", f"--metrics_port={free_port()}", f"--client_ttl={FOREVER}"]
        self._master = subprocess.Popen([*guard, Path(sys.executable).parent / "mooncake_master", *flags])
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self._store = _setup(remote.nbytes * 3 // 2, f"127.0.0.1:{port}")
        return {"master": f"127.0.0.1:{port}"}


class Client:
    """put_from and get_into, with their batch forms. `remote` is set before `connect`, as in ours_store."""

    remote: Arena

    def connect(self, info: dict[str, Any], local: Arena) -> None:
        self._store = _setup(0, info["master"])
        self._here, self._there = local.address, self.remote.address
        for arena in (local, self.remote):
            if status := self._store.register_buffer(arena.address, arena.nbytes):
                raise RuntimeError(f"register_buffer returned {status}")
        self._run = secrets.token_hex(4)
        self._loaded = 0  # number of calls whose blocks are in the store
        self._count = 0

    def prepare(self, size: int, calls: Sequence[Call]) -> Sequence[Any]:
        self._store.remove_all(True)
        self._loaded = 0
        most = max(2, LOADED_BYTES // (size * len(calls[0][0]))) if size <= 64 << 10 else len(calls)
        here, there = self._here, self._there
        return [
            ([f"{size}/{b}" for b in theirs], [here + a for a in ours], [there + b for b in theirs], [size] * len(ours))
            for ours, theirs in calls[:most]
        ]

    def measure(self, op: str, prepared: Sequence[Any], seconds: float) -> list[float]:
        size = prepared[0][3][0]
        if op == "read":
            for keys, _, there, sizes in prepared[self._loaded :]:
                self._put(keys, there, sizes)
            self._loaded = len(prepared)
            return timed(self._get_call, prepared, seconds)
        most = most_puts(size * len(prepared[0][0]), self.remote.nbytes)
        took = timed(partial(self._fresh, size), prepared, seconds, most)
        last = prepared[(len(took) - 1) % len(prepared)]
        self._get(self._last_keys, last[2], last[3])
        self._fresh(size, prepared[0])
        self._get(self._last_keys, prepared[0][2], prepared[0][3])
        return took

    def _fresh(self, size: int, call: Any) -> None:
        _, here, _, sizes = call
        first = self._count
        self._count += len(here)
        self._last_keys = [f"{self._run}/{i}" for i in range(first, self._count)]
        self._put(self._last_keys, here, sizes)

    def _put(self, keys: list[str], addresses: list[int], sizes: list[int]) -> None:
        if len(keys) == 1:
            answers = [self._store.put_from(keys[0], addresses[0], sizes[0])]
        else:
            answers = self._store.batch_put_from(keys, addresses, sizes)
        if any(answers):
            raise RuntimeError(f"a put returned {min(answers)}")

    def _get_call(self, call: Any) -> None:
        keys, here, _, sizes = call
        self._get(keys, here, sizes)

    def _get(self, keys: list[str], addresses: list[int], sizes: list[int]) -> None:
        if len(keys) == 1:
            answers = [self._store.get_into(keys[0], addresses[0], sizes[0])]
        else:
            answers = self._store.batch_get_into(keys, addresses, sizes)
        if list(answers) != sizes:
            raise RuntimeError(f"a get returned {min(answers)}")
