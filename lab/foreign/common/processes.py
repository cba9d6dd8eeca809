"""A server of others as a process: how it is started, watched, paused and ended.

A server runs with its own interpreter, in an environment of its own, and never in the project's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lab.bench.common.client import Server, Unreachable
from lab.launch.nodes import Node, spawn

HOW = "run scripts/bench.py engine --help for how to install it"
POLL_S = 0.1
SAY_EVERY_S = 20.0
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Program:
    """A server that can be started. '{port}' in argv is replaced by a free port."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # added to `environment()`
    backend: str = "openai"  # argument of lab.bench.common.client.Client
    body: Mapping[str, Any] = field(default_factory=dict)  # fields of every request
    model: str = ""  # model name in requests; "" = the one in /v1/models
    version: str = ""
    max_model_len: int | None = None  # tokens


def environment(more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """That of this process, and `more`. Without its PYTHONPATH, and without the folder of a program on its path: there
    may be this checkout, whose mooncake.py hides upstream's package of that name."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return own | {"PYTHONSAFEPATH": "1"} | dict(more)


def installed_version(python: Path, package: str, module: str) -> str:
    """Version of `package` in that interpreter's environment. Raises Unreachable if package or module is missing."""
    code = (
        "import importlib.metadata as m, importlib.util as u, sys\n"
        f"sys.exit(3) if u.find_spec({module!r}) is None else print(m.version({package!r}))"
    )
    try:
        done = subprocess.run([str(python), "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise Unreachable(f"there is no interpreter {python} ({error.strerror}): {HOW}") from None
    if done.returncode:
        raise Unreachable(f"{package} (with {module}) is not installed for {python}: {HOW}")
    return done.stdout.strip()


class Process:
    """A running server, to be paused between its turns."""

    def __init__(self, program: Program, run_dir: Path) -> None:
        self.program = program
        port = free_port()
        argv = [part.replace("{port}", str(port)) for part in program.argv]
        self._node: Node = spawn(program.name, "mixed", argv, run_dir, environment(program.env))
        self.url = f"http://127.0.0.1:{port}"

    @property
    def log(self) -> Path:
        """Its standard error, appended to by every process of this name in the same directory."""
        return self._node.log

    def wait_ready(self, timeout_s: float, say: Callable[[str], None] | None = None) -> Server:
        """`say` hears from time to time how far it is. Raises Unreachable with the end of its log when it dies or is
        not healthy in time."""
        begun = time.monotonic()
        told = begun
        while time.monotonic() < begun + timeout_s and self._node.alive:
            if get(f"{self.url}/health") is not None:
                return self._describe()
            time.sleep(POLL_S)
            if say is not None and time.monotonic() > told + SAY_EVERY_S:
                told = time.monotonic()
                last = next((line for line in reversed(self._node.last_lines()) if line.strip()), "")
                say(f"{self.program.name} has been starting for {told - begun:.0f} s: {last}")
        tail = "\n    ".join(self._node.last_lines(8))
        what = f"was not ready in {timeout_s:.0f} s" if self._node.alive else "ended"
        raise Unreachable(f"{self.program.name} {what}; end of {self._node.log}:\n    {tail}")

    def _describe(self) -> Server:
        """Name, model and, for ours, the resolved Config."""
        model, config = self.program.model, None
        if not model:
            model = json.loads(get(f"{self.url}/v1/models") or b"{}")["data"][0]["id"]
            config = json.loads(get(f"{self.url}/debug/state") or b"{}").get("config")
        return Server(self.program.name, self.url, model, self.program.max_model_len, config)

    def ended(self) -> bool:
        """Whether it has ended or ends within a moment: its connections break first."""
        with suppress(subprocess.TimeoutExpired):
            self._node.process.wait(1.0)
        return not self._node.alive

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group; returns when it is gone."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._node.process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group; returns when it is gone."""
        self._signal(signal.SIGKILL)
        self._node.destroy()

    def _signal(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._node.pid, signum)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def get(url: str) -> bytes | None:
    """Body of a 200 answer, None for anything else."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            body: bytes = answer.read()
            return body if answer.status == 200 else None
    except (OSError, ValueError):
        return None
