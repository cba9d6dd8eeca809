"""A cluster of node processes on this machine, for scripts/up, the end-to-end tests and the benchmarks.

    with LocalCluster("prefill=2,decode=1,store=1", ["--block-size", "32"], run_dir=path) as cluster:
        requests.post(cluster.nodes[0].url + "/v1/completions", ...)
        cluster.kill("prefill-1")

`async with` works too. If there is a store node it starts first, because it loads no weights; the others join it and
load in parallel.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from engine.config.config import Config
from lab.launch import rest
from lab.launch.nodes import Node, parse_nodes, spawn, thread_environment, threads_per_node

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
DEFAULT_NODES = "prefill=1,decode=1,store=1"


class NodeDied(Exception):
    """A node ended by itself; the message has its exit code and last log lines."""


class StartTimeout(Exception):
    """The cluster was not ready in time; the message names the missing nodes."""


class Network(Protocol):
    """The network of the nodes instead of 127.0.0.1, e.g. lab/faults/networks/namespaces.py."""

    def prefix(self, name: str) -> Sequence[str]:
        """Prefix for the command of this node."""

    def host(self, name: str) -> str:
        """The node's --host."""


@dataclass(frozen=True)
class Processes:
    """How node processes run. `env`: added to this process's environment; `program`: the command of a node, for which
    tests give a stand-in."""

    env: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = (sys.executable, str(ROOT / "mooncake.py"))
    start_timeout_s: float = 180.0
    stop_timeout_s: float = 10.0


@dataclass(frozen=True)
class Where:
    """Where nodes listen. `port`: HTTP port of the first node, the next ones count up; 0 = any free ports; `network`:
    None = 127.0.0.1."""

    port: int = 0
    network: Network | None = None


class LocalCluster:
    """Starts, watches and stops node processes.

    nodes      the nodes to start, in the format of `parse_nodes`
    flags      passed to every node; '{node}' in a flag becomes the node's name
    role_flags role ('store') or node ('store-0') -> more flags for the nodes that have this role, or for this one
    run_dir    existing directory for NAME.log and NAME.out
    api_key    used by our own calls, and given to every node unless `flags` name keys
    """

    def __init__(
        self,
        nodes: str = DEFAULT_NODES,
        flags: Sequence[str] = (),
        *,
        run_dir: Path,
        role_flags: Mapping[str, Sequence[str]] | None = None,
        api_key: str | None = None,
        processes: Processes = Processes(),
        where: Where = Where(),
    ) -> None:
        self.plan = parse_nodes(nodes)
        self.flags = tuple(flags)
        self.role_flags = dict(role_flags or {})
        self.run_dir = run_dir
        self.program = tuple(processes.program)
        self.port, self.network = where.port, where.network
        self.api_key = api_key
        self.start_timeout_s, self.stop_timeout_s = processes.start_timeout_s, processes.stop_timeout_s
        self.threads = threads_per_node(self.plan)
        self.env = {**os.environ, **thread_environment(self.plan, self.threads), **processes.env}
        self._nodes: dict[str, Node] = {}
        self.unheard = ""  # why a node that is ready did not tell us its members, the last time

    @property
    def nodes(self) -> list[Node]:
        """All nodes in the order of the plan; nodes added later follow."""
        order = {name: i for i, (name, _) in enumerate(self.plan)}
        return sorted(self._nodes.values(), key=lambda node: order.get(node.name, len(order)))

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    # --- start

    def starting(self) -> Iterator[None]:
        """Performs the start; yields whenever it can only wait. Raises NodeDied, StartTimeout."""
        deadline = time.monotonic() + self.start_timeout_s
        first = next((step for step in self.plan if step[1] == "store"), self.plan[0])
        for batch in ([first], [step for step in self.plan if step != first]):
            join = self._nodes[first[0]].url if self._nodes else None
            begun = [self._spawn(name, role, join) for name, role in batch]
            yield from self._until(partial(_all_ready, begun), deadline, "ready")
        yield from self._until(self.formed, deadline, "in one cluster")

    def start(self) -> None:
        """Start all nodes and wait until each sees all the others. On failure all nodes are stopped again."""
        try:
            for _ in self.starting():
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise

    def add(self, role: str, *flags: str, name: str | None = None) -> Node:
        """Start one more node, which joins through a living one. Raises NodeDied, StartTimeout; the others keep
        running."""
        kind = role.replace(",", "+")
        name = name or next(f"{kind}-{i}" for i in range(10_000) if f"{kind}-{i}" not in self._nodes)
        door = next((node.url for node in self.nodes if node.alive and node.url and node.name != name), None)
        node = self._spawn(name, role, door, flags)
        try:
            for _ in self._until(lambda: node.ready, time.monotonic() + self.start_timeout_s, "ready"):
                time.sleep(POLL_S)
        except BaseException:
            node.expected_dead = True
            node.destroy()
            raise
        return node

    def restart(self, name: str, *flags: str) -> Node:
        """Kill the node if it lives, and immediately start it again with the same name, role, flags and port."""
        old = self._nodes[name]
        self.kill(name)
        port = ["--port", old.url.rpartition(":")[2]] if old.url else []
        return self.add(old.role, *port, *flags, name=name)

    def repeat(self, name: str) -> Node:
        """Kill the node if it lives, and run the same command line again, on the same ports; returns immediately. The
        others find a node without --join, which is the first one, at its old address."""
        old = self._nodes[name]
        self.kill(name)
        assert old.control is not None, f"{name} was never ready"
        ports = ["--port", old.url.rpartition(":")[2], "--control-port", str(old.control[1])]
        self._nodes[name] = spawn(name, old.role, [*old.argv, *ports], self.run_dir, self.env)
        return self._nodes[name]

    def formed(self) -> bool:
        """Whether every living node counts exactly the living ones as members."""
        living = {node.name for node in self._nodes.values() if node.alive}
        try:
            formed, self.unheard = all(self.members(name) == living for name in living), ""
        except rest.RestError as error:
            formed, self.unheard = False, str(error)
        return formed

    def members(self, name: str) -> set[str]:
        """Ids of the nodes that this node considers alive, including its own. Raises RestError."""
        cluster = rest.get(self._nodes[name].url + "/cluster", self.api_key)
        return {member["node_id"] for member in cluster["members"] if member["status"] in ("alive", "suspect")} | {name}

    # --- stop

    def stop(self) -> None:
        """SIGTERM to all, and SIGKILL to nodes that still run after stop_timeout_s, or at a second Ctrl-C."""
        for node in self._nodes.values():
            node.expected_dead = True
            if node.alive:
                node.process.terminate()
        deadline = time.monotonic() + self.stop_timeout_s
        try:
            while any(node.alive for node in self._nodes.values()) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        finally:
            for node in self._nodes.values():  # all before a wait, which one more Ctrl-C would end
                node.shoot()
            for node in self._nodes.values():
                node.process.wait()

    def kill(self, name: str, signum: int = signal.SIGKILL) -> int:
        """Send `signum` and wait for the end; returns the exit code. Killing a dead node is a no-op."""
        node = self._nodes[name]
        node.expected_dead = True
        if node.alive:
            node.process.send_signal(signum)
        return node.process.wait(self.stop_timeout_s)

    def check(self) -> None:
        """Raises NodeDied if a node ended that was not stopped; a node that has left is no loss, unless it was the
        last."""
        for node in self._nodes.values():
            if not node.alive and not node.expected_dead and not (node.left and self.living):
                raise NodeDied(self.last_words(node))

    def last_words(self, node: Node) -> str:
        """The exit code of a node that has ended, and the end of its log."""
        tail = "\n".join(f"    {line}" for line in node.last_lines())
        return f"{node.name} ended with exit code {node.process.returncode}; end of {node.log}:\n{tail}"

    # --- context manager

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        try:
            for _ in self.starting():
                await asyncio.sleep(POLL_S)
        except BaseException:
            await asyncio.to_thread(self.stop)
            raise
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await asyncio.to_thread(self.stop)

    # --- inside

    def _until(self, condition: Callable[[], bool], deadline: float, what: str) -> Iterator[None]:
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                late = [node.name for node in self._nodes.values() if not node.url] or [*self._nodes]
                why = f" ({self.unheard})" if self.unheard else ""
                raise StartTimeout(f"{', '.join(late)} not {what} in time{why}; logs are in {self.run_dir}")
            yield

    def _spawn(self, name: str, role: str, join: str | None, flags: Sequence[str] = ()) -> Node:
        port = self.port + [step[0] for step in self.plan].index(name) if self.port and (name, role) in self.plan else 0
        place = self.network.prefix(name) if self.network else []
        argv = [*place, *self.program, "--role", role, "--node-id", name, "--num-threads", str(self.threads)]
        argv += ["--port", str(port)]
        argv += ["--host", self.network.host(name)] if self.network else []
        argv += self._entrance(join, self.flags)
        by_role = [flag for has in (*Config(role=role).roles, name) for flag in self.role_flags.get(has, ())]
        extra = [*self.flags, *by_role, *flags]
        argv += [flag.replace("{node}", name) for flag in extra]
        self._nodes[name] = spawn(name, role, argv, self.run_dir, self.env)
        return self._nodes[name]

    def _entrance(self, join: str | None, flags: Sequence[str]) -> list[str]:
        """The flags by which a node finds the others, and by which we may talk to it, if `flags` name no keys."""
        named = any(flag.partition("=")[0] in ("--api-key", "--api-key-file") for flag in flags)
        key = ["--api-key", self.api_key] if self.api_key and not named else []
        return [*(["--join", join.removeprefix("http://")] if join else []), *key]


def _all_ready(nodes: Sequence[Node]) -> bool:
    return all(node.ready for node in nodes)
