"""A Ray cluster of several hosts on this one: a raylet for each, on loopback addresses of a network namespace.

The namespace has only `lo`, because Ray listens on all addresses. Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Self, TypeVar

import pytest

from lab.rdma_vm.image import user_cache

VERSION = "2.60.0"
HEAD = "127.0.0.1"
PORT, DASHBOARD = 6400, 6401
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
HEALTH = {"initial_delay_ms": "20000", "period_ms": "500", "timeout_ms": "5000", "failure_threshold": "4"}
"""A host that starts on a busy machine is not lost."""
Result = TypeVar("Result")


def ray_folder() -> Path:
    """The environment with Ray: $MOONCAKE_RAY, or one that is made in the user's cache at first use. Skips the test if
    that fails."""
    if told := os.environ.get("MOONCAKE_RAY"):
        return Path(told)
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("Ray's hosts need a network namespace: root and iproute2")
    folder = user_cache() / "mooncake" / f"ray-{VERSION}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        packages = [f"ray[default]=={VERSION}"]
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--no-input", *packages],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            if done.returncode:
                pytest.skip(f"no Ray here: {' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")
        (folder / "complete").touch()
    return folder


class RayHosts:
    """A context manager: the head on 127.0.0.1, and a host for each address in `resources`, which it declares."""

    def __init__(self, ray: Path, resources: Mapping[str, Mapping[str, float]]) -> None:
        self._ray, self._resources = ray, dict(resources)
        self.dir = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Ray's sockets want a short path
        self.namespace = f"mooncake-{os.getpid()}"
        (self.dir / "token").write_text(secrets.token_hex(16))
        self.env = os.environ | {f"RAY_health_check_{name}": value for name, value in HEALTH.items()}
        self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.dir / "token"), "HOME": str(self.dir)}
        self.env |= {"RAY_JOB_STOP_WAIT_TIME_S": "20", "PATH": f"{ray / 'bin'}:{os.environ['PATH']}"}
        self.env |= {"RAY_gcs_server_request_timeout_seconds": "120", "RAY_raylet_start_wait_time_s": "120"}
        self.env |= {"RAY_ADDRESS": f"http://{HEAD}:{DASHBOARD}", "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> Self:
        for command in (["netns", "add", self.namespace], ["-n", self.namespace, "link", "set", "lo", "up"]):
            done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespace: {done.stderr.strip()}")
        try:
            head = ["--head", f"--port={PORT}", f"--dashboard-port={DASHBOARD}", "--disable-usage-stats"]
            self._start(HEAD, "--num-cpus=0", *head, f"--dashboard-host={HEAD}", f"--temp-dir={self.dir / 'r'}")
            for address, resources in self._resources.items():
                self.add(address, resources)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def add(self, address: str, resources: Mapping[str, float]) -> None:
        self._start(address, "--num-cpus=4", f"--address={HEAD}:{PORT}", f"--resources={json.dumps(resources)}")

    def lose(self, address: str) -> None:
        """Kill the raylet of this address, its workers, and the nodes that they started, as if the power failed."""
        found = self._processes()
        is_it = {pid for pid, words in found if words[0].endswith("raylet") and f"--node_ip_address={address}" in words}
        (raylet,) = is_it
        family = [raylet, *descendants(raylet, {pid: parent(pid) for pid, _ in found})]
        assert len(family) > 2, "no node runs there"
        for pid in family:
            os.kill(pid, signal.SIGKILL)

    def command(self, *words: str) -> list[str]:
        """For a program in the namespace."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self.command(*words), env=self.env, cwd=self.dir, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}{self._logs()}"
        return done.stdout

    def inside(self, function: Callable[[], Result]) -> Result:
        """The result of a function that runs in a thread in the namespace."""
        found: list[Result | BaseException] = []
        thread = Thread(target=lambda: found.append(self._called(function)))
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def enter(self) -> None:
        """Move the calling thread into the namespace for good."""
        with open(f"/run/netns/{self.namespace}") as file:
            if LIBC.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    # --- inside

    def _called(self, function: Callable[[], Result]) -> Result | BaseException:
        try:
            self.enter()
            return function()
        except BaseException as error:
            return error

    def _start(self, address: str, *flags: str) -> None:
        ports = ["--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=80000000"]
        self.run("ray", "start", f"--node-ip-address={address}", *ports, *flags)

    def _logs(self) -> str:
        """The ends of the logs of raylets."""
        logs = self.dir.glob("r/session_latest/logs/raylet*")
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)

    def _processes(self) -> list[tuple[int, list[str]]]:
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [(int(pid), command_line(int(pid))) for pid in listed.stdout.split()]

    def _stop(self) -> None:
        """Never `ray stop`, which ends every Ray process of the machine."""
        for signum, wait_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 2.0)):
            for pid, _ in self._processes():
                try:
                    os.kill(pid, signum)
                except ProcessLookupError:
                    continue
            deadline = time.monotonic() + wait_s
            while self._processes() and time.monotonic() < deadline:
                time.sleep(0.1)
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True, check=False)
        shutil.rmtree(self.dir, ignore_errors=True)


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def descendants(pid: int, parents: Mapping[int, int]) -> list[int]:
    children = [one for one, above in parents.items() if above == pid]
    return children + [one for child in children for one in descendants(child, parents)]
