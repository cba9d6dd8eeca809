"""Controls a contender's two processes and the two arenas, and verifies their content."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np

from lab.bench.transfer.agent import grown

ROOT = Path(__file__).resolve().parents[3]
ANSWER_S = 60.0
EDGE = 64  # bytes at both ends of every destination block that are overwritten before a cell


BUSY_SHARE = 0.1
"""A thread counts as used if its CPU time is at least this share of the cell's time."""

UNCHECKED = {"stream"}  # it stores no bytes


class Missing(Exception):
    """A contender cannot take part; the text says why."""


class Arenas:
    """The local and the remote arena, mapped by every process of every contender."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memfds: dict[str, int] = {}
        self._bytes: dict[str, Any] = {}
        random = np.random.default_rng(4)
        for name in ("local", "remote"):
            memfd = self.memfds[name] = os.memfd_create(name, os.MFD_ALLOW_SEALING)
            os.ftruncate(memfd, nbytes)
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._bytes[name] = np.frombuffer(mmap.mmap(memfd, nbytes), np.uint8)
            self._bytes[name][:] = random.integers(0, 256, nbytes, np.uint8)
        self._mark = 0

    def begin(self, op: str, size: int) -> None:
        """Make every block of the destination differ from what should arrive."""
        self._mark = self._mark % 250 + 1
        blocks = self._blocks("local" if op == "read" else "remote", size)
        blocks[:, :EDGE] = blocks[:, -EDGE:] = self._mark

    def wrong(self, result: dict[str, Any], size: int) -> int:
        """Number of blocks of the first and last call of the cell that did not arrive."""
        local, remote = self._blocks("local", size), self._blocks("remote", size)
        pairs = [pair for call in ("first", "last") for pair in zip(*result[call], strict=True)]
        return sum(not np.array_equal(local[a // size], remote[b // size]) for a, b in pairs)

    def _blocks(self, name: str, size: int) -> Any:
        count = self.nbytes // size
        return self._bytes[name][: count * size].reshape(count, size)


class Process:
    """One side of a contender, stopped between its turns, because some engines poll without pause."""

    def __init__(self, name: str, role: str, python: str, arenas: Arenas, congestion: str) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        local, remote = arenas.memfds["local"], arenas.memfds["remote"]
        command = [python, "-m", "lab.bench.transfer.agent", name, role, "--control", theirs.fileno(), "--local", local]
        command += ["--remote", remote, "--nbytes", arenas.nbytes]
        command += ["--congestion", congestion]
        self._child = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=os.environ | {"UCX_KEEPALIVE_INTERVAL": "inf", "GLOG_minloglevel": "3"},
            pass_fds=(theirs.fileno(), local, remote),
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        ours.settimeout(ANSWER_S)
        self._socket = ours
        self._stream = ours.makefile("rw")

    def say(self, order: dict[str, Any]) -> None:
        self._stream.write(json.dumps(order) + "\n")
        self._stream.flush()

    def hear(self) -> dict[str, Any]:
        """The next answer. Raises Missing when the process reports a failure or ends."""
        try:
            line = self._stream.readline()
        except TimeoutError:
            raise Missing(f"no answer within {ANSWER_S:g} s") from None
        if not line:
            raise Missing(f"its process ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Missing(answer["error"])
        return dict(answer)

    def _last_words(self) -> str:
        self._child.wait(5)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][-200:] if lines else f"exit status {self._child.returncode}"

    def signal(self, number: int) -> None:
        if self._child.poll() is None:
            self._child.send_signal(number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._child.wait()
        self._stream.close()
        self._socket.close()
        self._log.close()


class Pair:
    """Owner and client of one contender. Raises Missing when it cannot be started."""

    def __init__(self, name: str, python: str, arenas: Arenas, congestion: str) -> None:
        """`congestion`: the congestion control of every connection, equal to the network's default."""
        self.name = name
        self._arenas = arenas
        self._processes: list[Process] = []
        try:
            self._processes = [Process(name, role, python, arenas, congestion) for role in ("owner", "client")]
            self.owner, self.client = self._processes
            self.client.say({"owner": self.owner.hear()["ready"]})
            self.client.hear()
        except (Missing, OSError) as error:
            self.close()
            raise Missing(str(error)) from None
        self._rest()

    def _rest(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGSTOP)

    def _wake(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGCONT)

    def cell(self, op: str, size: int, batch: int, seconds: float) -> dict[str, Any]:
        """Measure; raises Missing when it fails or moves wrong bytes."""
        self._arenas.begin(op, size)
        self._wake()
        try:
            before = self._owner_threads()
            self.client.say({"op": op, "size": size, "batch": batch, "seconds": seconds})
            result = self.client.hear()
            there = grown(before, self._owner_threads())
        finally:
            self._rest()
        if self.name not in UNCHECKED and (wrong := self._arenas.wrong(result, size)):
            raise Missing(f"{wrong} blocks of {size} bytes did not arrive ({op}, batch {batch})")
        used = [*result["threads_s"], *there]
        return {
            **{key: result[key] for key in ("n", "gbs", "p50_us", "p99_us")},
            "cpu_s_per_gb": sum(used) / (result["n"] * size * batch / 1e9),
            # At least the one that calls: on a busy machine even that may get less than its share of a short round.
            "threads": max(1, sum(cpu_s >= BUSY_SHARE * result["wall_s"] for cpu_s in used)),
        }

    def stall(self, order: dict[str, Any]) -> dict[str, Any]:
        """How late the two event loops run under load: {"client": ..., "owner": ...}."""
        self._wake()
        try:
            for process in self._processes:
                process.say({"stall": True} | order)
            return {"owner": self.owner.hear(), "client": self.client.hear()}
        finally:
            self._rest()

    def _owner_threads(self) -> dict[str, float]:
        self.owner.say({"cpu": True})
        return dict(self.owner.hear()["cpu"])

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
