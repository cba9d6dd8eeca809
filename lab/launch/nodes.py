"""One node process on this machine: its command, a start that lets no process outlive the launcher, its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from engine.config.config import ROLES
from engine.config.flags import UsageError


def parse_nodes(text: str) -> list[tuple[str, str]]:
    """'prefill=2,decode+store=1' -> [('prefill-0', 'prefill'), ('prefill-1', 'prefill'), ('decode+store-0', ...)].

    A name alone means one node; roles of one node are joined by '+'. Raises UsageError.
    """
    nodes: list[tuple[str, str]] = []
    for part in text.split(","):
        kind, _, count = part.strip().partition("=")
        try:
            check_kind(kind)
        except ValueError as error:
            raise UsageError(f"--nodes: {error}") from None
        if not (count or "1").isdecimal() or int(count or 1) > 64:
            raise UsageError(f"--nodes: {part.strip()!r} needs a number of nodes from 0 to 64 after '='")
        first = sum(name.rpartition("-")[0] == kind for name, _ in nodes)
        nodes += [(f"{kind}-{first + i}", kind.replace("+", ",")) for i in range(int(count or 1))]
    if not nodes:
        raise UsageError(f"--nodes {text!r} names no node; write for example prefill=1,decode=1,store=1")
    return nodes


def check_kind(kind: str) -> None:
    """Whether 'prefill' or 'decode+store' are roles. Raises ValueError."""
    for role in kind.split("+"):
        if role not in (*ROLES, "mixed"):
            near = get_close_matches(role, (*ROLES, "mixed"), 1)
            hint = f"; did you mean {near[0]}?" if near else "; write for example prefill=2,decode=1,store=1"
            raise ValueError(f"{role!r} is no role{hint}")


@dataclass(slots=True)
class Node:
    """One process of the cluster. `url`, `control` and `ready_s` are known once it is ready."""

    name: str
    role: str
    argv: list[str]
    log: Path  # its stderr
    out: Path  # its stdout: the ready line
    process: subprocess.Popen[bytes]
    begun: float
    url: str = ""
    control: tuple[str, int] | None = None
    ready_s: float | None = None
    expected_dead: bool = field(default=False, repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def left(self) -> bool:
        """The node was ready and has ended by itself: by `mooncake.py drain`, or by an external signal."""
        return bool(self.url) and self.process.poll() == 0

    def last_lines(self, count: int = 15) -> list[str]:
        """The end of its log."""
        return self.log.read_text(errors="replace").splitlines()[-count:]

    @property
    def ready(self) -> bool:
        """Whether its ready line has appeared on stdout; fills in url, control and ready_s."""
        if self.url:
            return True
        for line in self.out.read_text().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                event = json.loads(line)
                if event.get("event") == "ready":
                    host, port = event["control"]
                    self.url, self.control = event["url"], (host, port)
                    self.ready_s = time.monotonic() - self.begun
        return bool(self.url)

    def shoot(self) -> None:
        """SIGKILL to the node and its children."""
        if self.alive:
            os.killpg(self.process.pid, signal.SIGKILL)

    def destroy(self) -> None:
        """`shoot`; returns when it is gone."""
        self.shoot()
        self.process.wait()


_parent = ThreadPoolExecutor(1, thread_name_prefix="parent-of-nodes")

started: list[Node] = []
"""Every node that this process has started; the tests look into their logs."""


Start = Callable[[str, Sequence[str], Mapping[str, str], IO[bytes], IO[bytes]], Any]
"""(role, argv, environment, stdout, stderr) -> a process with the interface of subprocess.Popen."""


def execute(
    role: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    stdout: IO[bytes] | None,
    stderr: IO[bytes] | None,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Run `argv`; without `stdout` or `stderr` it writes to those of this process. It gets a separate session, so
    Ctrl-C reaches only the launcher, and it dies with this process: util-linux's setpriv asks the kernel for SIGTERM at
    the parent's death and then becomes the node. The kernel counts the end of the thread that forked as that death, so
    one thread that lives as long as this process starts them all."""
    setpriv = shutil.which("setpriv")
    guard = [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
    return _parent.submit(
        subprocess.Popen,
        [*guard, *argv],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=True,
    ).result()


def spawn(
    name: str, role: str, argv: Sequence[str], run_dir: Path, env: Mapping[str, str], start: Start = execute
) -> Node:
    """Start `argv` with its stderr in NAME.log (appended) and its stdout in NAME.out."""
    log, out = run_dir / f"{name}.log", run_dir / f"{name}.out"
    with log.open("ab") as stderr, out.open("wb") as stdout:
        process = start(role, argv, env, stdout, stderr)
    node = Node(name, role, list(argv), log, out, process, time.monotonic())
    started.append(node)
    return node


def pin(pid: int, index: int) -> None:
    """Pin every thread of the process to one core of this process, `index` modulo their number; new threads inherit
    it."""
    cores = sorted(os.sched_getaffinity(0))
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {cores[index % len(cores)]})


def threads_per_node(plan: Sequence[tuple[str, str]], cores: int | None = None) -> int:
    """CPU threads for each node that runs a model: an equal share of the cores, at least one."""
    engines = sum(role != "store" for _, role in plan)
    return max(1, (cores or len(os.sched_getaffinity(0))) // max(1, engines))


def thread_environment(plan: Sequence[tuple[str, str]], threads: int) -> dict[str, str]:
    """Environment of nodes with `threads` threads each. If several models share the cores, OpenMP workers sleep between
    two operations, because spinning workers take time from the other nodes. A model that is alone is 1.6 times as fast
    with spinning workers."""
    engines = sum(role != "store" for _, role in plan)
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"} if engines > 1 else {}
    return {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"} | waiting
