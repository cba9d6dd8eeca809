"""Nodes that are forked instead of executed: a start costs 4 seconds of CPU time less, which are the imports.

`forked_nodes` is a fixture for the folders whose tests start clusters. A node is a process of its own as before, with
its own arguments, session, streams and exit code; only the interpreter with its modules is a copy. Nodes in a network
namespace or with variables of their own, stand-ins for nodes, and clusters that a test starts in another process are
still executed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from lab.launch import cluster, nodes
from tests.fork_server import ORDER_BYTES

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = [sys.executable, str(ROOT / "mooncake.py")]
THREADS = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONUNBUFFERED"}
"""Variables that the launcher sets. OpenMP reads them when torch is imported, so each setting has a fork server."""
PYTESTS = "PYTEST_CURRENT_TEST"
"""A variable that pytest changes all the time."""


class ForkServer:
    """One process that forks nodes."""

    def __init__(self, kind: str, env: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), kind]
        with theirs:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )

    def ask(self, order: Mapping[str, object], *descriptors: int) -> dict[str, int | None]:
        with self._lock:
            socket.send_fds(self._link, [json.dumps(order).encode()], descriptors)
            answer = self._link.recv(ORDER_BYTES)
        assert answer, "the fork server has ended"
        return json.loads(answer)

    def close(self) -> None:
        self._link.close()
        self._process.wait()


class ForkedProcess:
    """A child of the fork server, with the part of subprocess.Popen that launchers and tests use."""

    def __init__(
        self,
        server: ForkServer,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._server = server
        self._lock = threading.Lock()
        order = {"start": self.args, "cwd": str(Path.cwd()), "env": dict(env)}
        started = server.ask(order, stdout.fileno(), stderr.fileno())
        assert started["pid"] is not None
        self.pid = started["pid"]

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._server.ask({"poll": self.pid})["returncode"]
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            end = os.pidfd_open(self.pid)
            try:
                if not select.select([end], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            finally:
                os.close(end)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServers:
    """The fork servers of this test process, each started when a node first needs it."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, frozenset[tuple[str, str]]], ForkServer] = {}

    def start(
        self, role: str, argv: Sequence[str], env: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        own = {name: value for name, value in env.items() if os.environ.get(name) != value and name != PYTESTS}
        if list(argv[:2]) != PROGRAM or own.keys() - THREADS:
            return nodes.execute(role, argv, env, stdout, stderr)
        key = "store" if role == "store" else "engine", frozenset(own.items())
        if key not in self._servers:
            self._servers[key] = ForkServer(key[0], env)
        return ForkedProcess(self._servers[key], argv[1:], env, stdout, stderr)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


@pytest.fixture(scope="session", autouse=True)
def forked_nodes() -> Iterator[None]:
    """The nodes of every LocalCluster of this process are forked."""
    servers = ForkServers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "spawn", partial(nodes.spawn, start=servers.start))
        yield
    servers.close()
