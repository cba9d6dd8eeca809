#!/usr/bin/env python3
"""A cluster on Ray: every node process is an actor in a placement group, which Ray starts again where it was lost.

    ray job submit --no-wait -- python scripts/deploy/ray_mooncake.py up --root /opt/mooncake \\
        --nodes prefill=2,decode=4,store=1 --take prefill=H100:1 --take store=bigmem:1 -- --model /models/llama
    python scripts/deploy/ray_mooncake.py status            # on any host of the Ray cluster: the URL of each node
    python scripts/deploy/ray_mooncake.py scale decode=6    # more nodes, or fewer: those drain
    python scripts/deploy/ray_mooncake.py node start decode NAME    # one node, for an autoscaler: start, stop

It runs in Ray's own Python and needs only Ray and the standard library. Nodes run in the checkout's, which every host
has at --root. A host declares what --take names: `ray start --resources '{"H100": 8}'`. SIGTERM (`ray job stop`) and
Ctrl-C let all nodes drain. Ray kills a stopped job after RAY_JOB_STOP_WAIT_TIME_S, by default 3 s; a node whose actor
is killed gets SIGTERM and goes on draining by itself.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

BOARD = "board"
ROLES = ("prefill", "decode", "store", "mixed")
REFUSED = 2
"""The exit code of a node with wrong flags: at its first start, another one would not help."""
PR_SET_PDEATHSIG = 1
TELL_S = 1.0
"""How often a node tells the board where it is. A board that Ray has restarted knows nothing until then."""


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Board:
    """Where the nodes are, and how many of a kind somebody wants."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._wanted: dict[str, int] = {}
        self._orders: list[tuple[str, str, str]] = []

    def tell(self, name: str, url: str) -> None:
        self._urls[name] = url

    def forget(self, name: str) -> None:
        self._urls.pop(name, None)

    def urls(self) -> dict[str, str]:
        return dict(self._urls)

    def want(self, kind: str, count: int) -> None:
        self._wanted[kind] = count

    def order(self, action: str, kind: str, name: str) -> None:
        self._orders.append((action, kind, name))

    def news(self) -> tuple[dict[str, str], dict[str, int], list[tuple[str, str, str]]]:
        """Where the nodes are; what was wanted and ordered since the last call."""
        told = dict(self._urls), self._wanted, self._orders
        self._wanted, self._orders = {}, []
        return told


@ray.remote(max_concurrency=3, max_task_retries=-1)
class Node:
    """One node process. If it fails, so does this actor, and Ray starts another."""

    def __init__(self, name: str, command: Sequence[str], first: bool) -> None:
        """`command`: of the node, without its address and the node that it joins; `first`: it may start the cluster."""
        self._name, self._first, self._board = name, first, ray.get_actor(BOARD)
        self._command = [*command, "--host", ray.util.get_node_ip_address()]
        self._again = ray.get_runtime_context().was_current_actor_reconstructed
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._drains = False
        self._code = 0
        # The kernel ends a node when the thread ends that started it, so that thread lives as long as the node.
        self._thread = threading.Thread(target=self._run, name="parent-of-node")
        self._thread.start()

    def drain(self) -> None:
        """SIGTERM to the node."""
        with self._lock:
            self._drains = True
            if self._process is not None:
                self._process.terminate()

    def end(self) -> int:
        """The exit code of a node that has left or refused its flags. Raises RayActorError in the caller once Ray has
        given up this actor; a restart is no end."""
        self._thread.join()
        return self._code

    def _run(self) -> None:
        self._code = 1
        try:
            self._code = self._node()
        finally:
            if not self._drains and self._code and (self._code != REFUSED or self._again):
                print(f"{self._name}: ended with exit code {self._code}", file=sys.stderr, flush=True)
                os._exit(1)
        self._board.forget.remote(self._name)

    def _node(self) -> int:
        other = self._other()
        while other is None and not self._first and not self._drains:
            time.sleep(TELL_S)
            other = self._other()
        join = ["--join", other.removeprefix("http://")] if other else []
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it is for Ray's Python
        prctl = ctypes.CDLL(None).prctl  # the node gets SIGTERM when this actor's process dies, for whatever reason
        with self._lock:
            if self._drains:
                return 0
            self._process = subprocess.Popen(
                [*self._command, *join],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        threading.Thread(target=self._tell, args=[self._process], daemon=True).start()
        return self._process.wait()

    def _other(self) -> str | None:
        """The URL of another node that answers."""
        urls = ray.get(self._board.urls.remote())
        return next((url for name, url in urls.items() if name != self._name and answers(url)), None)

    def _tell(self, process: subprocess.Popen[str]) -> None:
        """Once the node is ready, tell the board where it is, again and again."""
        assert process.stdout is not None
        url = None
        for line in process.stdout:
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "ready":
                url = event["url"]
                break
        while url is not None and process.poll() is None and not self._drains:
            ray.get(self._board.tell.remote(self._name, url))
            time.sleep(TELL_S)


def answers(url: str) -> bool:
    """Whether a node is there; 503 is an answer."""
    try:
        urllib.request.urlopen(f"{url}/health", timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Shape:
    """What a node of a kind takes from its host."""

    cpus: float
    more: Mapping[str, float]

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": self.cpus, **self.more}

    @property
    def options(self) -> dict[str, Any]:
        own = {name: amount for name, amount in self.more.items() if name != "GPU"}
        return {"num_cpus": self.cpus, "num_gpus": self.more.get("GPU", 0), "resources": own}


class Cluster:
    """The nodes that `up` started, as actors by name."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._nodes: dict[str, Any] = {}
        self._kinds: dict[str, str] = {}
        self._ends: dict[Any, str] = {}  # the call of Node.end -> its node
        self._draining: set[str] = set()
        self._urls: dict[str, str] = {}
        try:
            self._board = Board.options(name=BOARD).remote()
        except ValueError:
            sys.exit(
                f"ray_mooncake.py: --name {args.name}: this cluster runs already; scale it, or give another --name"
            )

    def start(self) -> None:
        """All nodes: a placement group gives them room at once, or not at all. Raises SystemExit."""
        kinds = [kind for kind, count in self._args.nodes.items() for _ in range(count)]
        bundles = [self._shape(kind).bundle for kind in kinds]
        group = placement_group(bundles, strategy=self._args.strategy)
        if not group.wait(self._args.place_s):
            there = {name: amount for name, amount in ray.cluster_resources().items() if not name.startswith("node:")}
            sys.exit(f"ray_mooncake.py: no room for {bundles} in {there}: add hosts, or change --nodes, --cpus, --take")
        first = kinds.index("store") if "store" in kinds else 0  # it loads no weights, so it is there first
        for i, kind in enumerate(kinds):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            self._add(kind, place, first=i == first)

    def watch(self) -> None:
        """Print where nodes are, and follow what `scale` asks for, until no node is left. Raises SystemExit."""
        while self._nodes:
            urls, wanted, orders = ray.get(self._board.news.remote())
            for name, url in urls.items():
                if self._urls.get(name) != url:
                    print(f"{name}: ready at {url}", flush=True)
            self._urls = self._urls | urls
            for kind, count in wanted.items():
                self._scale(kind, count)
            for action, kind, name in orders:
                if action == "stop" and name in self._nodes:
                    self._drain(name)
                elif action == "start" and name not in self._nodes:  # who is not sure asks again
                    self._add(kind, "SPREAD", name=name)
            ended, _ = ray.wait(list(self._ends), timeout=TELL_S)
            for call in ended:
                self._forget(call)
        sys.exit("ray_mooncake.py: no node is left")

    def drain(self) -> None:
        """Let all nodes drain, and wait for their ends."""
        for node in self._nodes.values():
            node.drain.remote()
        ended, late = ray.wait(list(self._ends), num_returns=len(self._ends), timeout=self._args.drain_s + 10)
        print(f"{len(ended)} nodes have drained, {len(late)} are killed", flush=True)

    def _scale(self, kind: str, count: int) -> None:
        """Those that were started last leave first."""
        own = [name for name in self._nodes if self._kinds[name] == kind and name not in self._draining]
        for name in own[count:]:
            self._drain(name)
        for _ in range(count - len(own)):
            self._add(kind, "SPREAD")

    def _drain(self, name: str) -> None:
        print(f"{name}: drains", flush=True)
        self._draining.add(name)
        self._nodes[name].drain.remote()

    def _add(self, kind: str, place: Any, first: bool = False, name: str | None = None) -> None:
        name = name or next(f"{kind}-{i}" for i in range(10_000) if f"{kind}-{i}" not in self._nodes)
        args = self._args
        command = [args.python or f"{args.root}/.venv/bin/python", f"{args.root}/mooncake.py"]
        command += ["--role", kind.replace("+", ","), "--node-id", name, "--net", "lan", "--port", "0"]
        command += ["--num-threads", str(max(1, int(args.cpus))), "--drain-timeout-ms", str(int(1000 * args.drain_s))]
        options = self._shape(kind).options | {"scheduling_strategy": place, "max_restarts": args.max_restarts}
        node = Node.options(**options).remote(name, [*command, *args.flags], first)
        self._nodes[name], self._kinds[name] = node, kind
        self._ends[node.end.remote()] = name
        print(f"{name}: starts", flush=True)

    def _forget(self, call: Any) -> None:
        name = self._ends.pop(call)
        node = self._nodes.pop(name)
        self._draining.discard(name)
        try:
            code = ray.get(call)
        except RayActorError as error:
            print(f"{name}: given up after {self._args.max_restarts} restarts: {error}", file=sys.stderr, flush=True)
            return
        ray.kill(node)
        if code == REFUSED:
            sys.exit(f"ray_mooncake.py: {name} refused its flags; its last line says why")
        print(f"{name}: has left", flush=True)

    def _shape(self, kind: str) -> Shape:
        return Shape(self._args.cpus, self._args.take.get(kind, {}))


def counts(text: str) -> dict[str, int]:
    """'prefill=2,decode+store=1' -> {'prefill': 2, 'decode+store': 1}."""
    found: dict[str, int] = {}
    for part in text.split(","):
        kind, _, count = part.partition("=")
        if any(role not in ROLES for role in kind.split("+")) or not count.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r} is not ROLE=COUNT; roles are {', '.join(ROLES)}")
        found[kind] = found.get(kind, 0) + int(count)
    return found


def taken(text: str) -> tuple[str, str, float]:
    """'prefill=H100:1' -> ('prefill', 'H100', 1.0)."""
    kind, _, resource = text.partition("=")
    name, _, amount = resource.partition(":")
    try:
        return kind, name, float(amount or 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=RESOURCE:AMOUNT") from None


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster, and stay until it ends")
    up.add_argument("--nodes", type=counts, default=counts("prefill=1,decode=1,store=1"), help="ROLE=COUNT,...")
    up.add_argument("--root", default=str(Path.cwd()), help="the checkout, on every host (default: this folder)")
    up.add_argument("--python", help="its interpreter (default: .venv/bin/python in --root)")
    up.add_argument("--cpus", type=float, default=1.0, help="CPUs and threads of a node (default: 1)")
    up.add_argument(
        "--take",
        type=taken,
        action="append",
        default=[],
        metavar="ROLE=RESOURCE:AMOUNT",
        help="GPU, or what hosts declare",
    )
    up.add_argument("--strategy", default="SPREAD", choices=["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"])
    up.add_argument("--max-restarts", type=int, default=10, help="of each node, by Ray; -1 = always (default: 10)")
    up.add_argument("--place-s", type=float, default=60.0, help="how long to wait for room (default: 60)")
    up.add_argument("--drain-s", type=float, default=60.0, help="how long a node may drain (default: 60)")
    up.add_argument("flags", nargs="*", metavar="-- FLAGS", help="for every node")
    scale = commands.add_parser("scale", help="change how many nodes of a kind there are")
    scale.add_argument("counts", type=counts, metavar="ROLE=COUNT,...")
    status = commands.add_parser("status", help="where the nodes are")
    node = commands.add_parser("node", help="start one node if it does not run, or let it drain; for autoscalers")
    node.add_argument("action", choices=["start", "stop"])
    node.add_argument("kind", metavar="ROLE")
    node.add_argument("node_name", metavar="NAME")
    for one in (up, scale, status, node):
        one.add_argument("--address", default="auto", help="of the Ray cluster (default: the one of this host)")
        one.add_argument("--name", default="mooncake", help="of the cluster, a namespace of Ray (default: mooncake)")
    args = parser.parse_args()
    if args.command == "up":
        by_kind: dict[str, dict[str, float]] = {}
        for kind, name, amount in args.take:
            by_kind.setdefault(kind, {})[name] = amount
        args.take = by_kind
    return args


def running_board(name: str) -> Any:
    try:
        return ray.get_actor(BOARD)
    except ValueError:
        sys.exit(f"ray_mooncake.py: --name {name}: no such cluster runs here")


def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    args = read_arguments()
    ray.init(address=args.address, namespace=args.name)
    if args.command == "status":
        print(json.dumps(ray.get(running_board(args.name).urls.remote()), indent=2))
    elif args.command == "scale":
        ray.get([running_board(args.name).want.remote(kind, count) for kind, count in args.counts.items()])
    elif args.command == "node":
        kind = args.kind.replace(",", "+")
        ray.get(running_board(args.name).order.remote(args.action, kind, args.node_name))
    else:
        cluster = Cluster(args)
        signal.signal(signal.SIGTERM, interrupt)  # after ray.init, which has a handler of its own
        try:
            cluster.start()
            cluster.watch()
        except KeyboardInterrupt:
            print("stopping: the nodes drain", flush=True)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            cluster.drain()


if __name__ == "__main__":
    main()
