"""Ranks with experts that are cut off, that join and leave, or that two nodes share: parts of ranks.py."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from lab.bench.common.results import Row
from lab.faults.checks import GOAL_S, pause_rows
from lab.faults.client import Body, Load, Stream
from lab.faults.networks.tcp_way import Way
from lab.faults.runner import Run
from lab.foreign.common.processes import free_port
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.expert_ranks import ExpertRanks

CHANGE_S = 120.0
"""Until a change is over, also if a process must start for it."""
POLL_S = 0.1
LEAST = 2
"""Ranks that the node has at the least; both are on its host."""
MOST = 4


def play_cut(this: Run, model: Sequence[str]) -> None:
    """The last rank joins over TCP, and has its weights from the node. Its connection is cut under load: for a while,
    after which it goes on, and until the node gives it up, after which the rank connects again."""
    port, remote, stop_s = free_port(), this.args.ranks - 1, this.args.stop_s
    flags = ["--expert-parallel-size", str(this.args.ranks), "--expert-remote-ranks", "1", "--expert-port", str(port)]
    with Way(port) as way, ExpertRanks(["--join", f"127.0.0.1:{way.port}"]) as ranks:
        ranks.start("elsewhere")
        with this.cluster("mixed=1", [*model, *flags, "--expert-replicas", "2"]) as cluster:
            node = cluster.nodes[0].name
            changes = Changes.of(this, cluster, node)

            def cut_for_a_while() -> None:
                with way.cut_off():
                    time.sleep(stop_s)

            def cut_until_given_up() -> None:
                deadline = time.monotonic() + CHANGE_S
                with way.cut_off():
                    while remote in changes.experts(node)["remote"]["connected"]:
                        if time.monotonic() > deadline:
                            this.wrong.append(f"a connection that is cut is not given up in {CHANGE_S:g} s")
                            return
                        time.sleep(POLL_S)

            case = f"rank {remote}, over TCP, is cut off"
            changes.play(case, cut_for_a_while, changes.masked_and_back(), GOAL_S)
            changes.play(f"{case} and given up", cut_until_given_up, changes.masked_and_back(), GOAL_S)
            changes.masked_at_most("a rank over TCP", {node: 2})
            if not changes.experts(node)["pairs_by_rank"][remote]:
                this.wrong.append(f"rank {remote}, over TCP, computed nothing")


def play_added(this: Run, model: Sequence[str]) -> None:
    """Two more ranks join and leave, under load: killed, stopped and continued, and by themselves."""
    port, stop_s = free_port(), this.args.stop_s
    flags = ["--expert-parallel-size", str(LEAST), "--max-expert-parallel-size", str(MOST), "--expert-port", str(port)]
    join = ["--join", f"127.0.0.1:{port}"]
    with this.cluster("mixed=1", [*model, *flags]) as cluster, ExpertRanks(join) as ranks:
        node = cluster.nodes[0].name
        changes = Changes.of(this, cluster, node)

        def width(number: int) -> Callable[[], bool]:
            return lambda: changes.experts(node)["width"] == number

        changes.play("a third rank joins", lambda: ranks.start("a"), width(3))
        changes.play("a fourth rank joins", lambda: ranks.start("b"), width(4))
        changes.play("an added rank is killed", lambda: ranks.end("b"), width(3), GOAL_S)
        changes.play("an added rank joins again", lambda: ranks.start("b"), width(4))
        changes.play("an added rank is stopped", lambda: _stopped(ranks, "b", stop_s), changes.whole, GOAL_S)
        changes.play("an added rank leaves", lambda: ranks.send("a", signal.SIGTERM), width(3), GOAL_S)
        changes.play("the last added rank leaves", lambda: ranks.send("b", signal.SIGTERM), width(LEAST), GOAL_S)
        for name in ("a", "b"):
            if code := ranks.code(name):
                this.wrong.append(f"the added rank {name} left with exit code {code}")
        pairs = changes.experts(node)["pairs_by_rank"]
        this.wrong += [f"added rank {rank} computed nothing" for rank in range(LEAST, MOST) if not pairs[rank]]
        changes.masked_at_most("added ranks", {node: 2})


def play_shared(this: Run, model: Sequence[str]) -> None:
    """Two nodes share all ranks, which have two copies of each expert. Every rank is killed and started again, then
    stopped and continued; then one of the nodes is killed."""
    port, size, stop_s = free_port(), this.args.ranks, this.args.stop_s
    flags = ["--expert-parallel-size", str(size), "--expert-remote-ranks", str(size), "--expert-replicas", "2"]
    first = {"mixed-0": ["--expert-port", str(port)]}
    join = ["--join", f"127.0.0.1:{port}"]
    with ExpertRanks(join) as ranks:
        names = [str(rank) for rank in range(size)]
        for name in names:
            ranks.start(name, "--rank", name)
        with this.cluster("mixed=2", [*model, *flags], role_flags=first) as cluster:
            nodes = [node.name for node in cluster.nodes]
            both = Changes.of(this, cluster, *nodes)
            for name in names:
                case = f"shared rank {name}"
                both.play(f"{case} is killed", partial(ranks.end, name), partial(both.lack, name), GOAL_S)
                both.play(f"{case} is back", partial(ranks.start, name, "--rank", name), both.whole)
                stop = partial(_stopped, ranks, name, stop_s)
                both.play(f"{case} is stopped", stop, both.masked_and_back(), GOAL_S)
            both.masked_at_most("shared ranks", dict.fromkeys(nodes, 2 * size))
            other = replace(both, nodes=nodes[1:])
            other.play("a node with shared ranks is killed", partial(_killed, cluster, nodes[0]), other.alone, GOAL_S)
            other.masked_at_most("after the loss of a node", {nodes[1]: 2 * size})


def _killed(cluster: LocalCluster, name: str) -> None:
    cluster.kill(name)


def _stopped(ranks: ExpertRanks, name: str, stop_s: float) -> None:
    ranks.send(name, signal.SIGSTOP)
    try:
        time.sleep(stop_s)
    finally:
        ranks.send(name, signal.SIGCONT)


@dataclass
class Changes:
    """Changes of the ranks of `nodes`, each under a load at all of these. `calm`: the bodies' undisturbed results."""

    this: Run
    cluster: LocalCluster
    nodes: list[str]
    bodies: list[Body]
    calm: list[Stream]

    @classmethod
    def of(cls, this: Run, cluster: LocalCluster, *nodes: str) -> Self:
        """With the bodies that the flags name. Their answers are of different lengths, from more than a third of
        --tokens to all of them: at any time, some requests begin and others end."""
        args = this.args
        bodies = this.bodies(cluster, args.streams, args.prompt_tokens, args.tokens, args.seed)
        least = args.tokens // 3
        for number, body in enumerate(bodies, 1):
            body["max_tokens"] = least + -(-(args.tokens - least) * number // len(bodies))
        return cls(this, cluster, [*nodes], bodies, this.calm(cluster, nodes[0], bodies))

    def play(self, case: str, act: Callable[[], None], over: Callable[[], bool], goal_s: float | None = None) -> None:
        """`act` under load; then until it is `over`, and until as many requests as there are clients have been served
        from their begin on. Every request must return its tokens. `goal_s`: of the longest pause."""
        load, began = self.under_load(case, act, over)
        self.this.judge(case, self.cluster, self.calm, load)
        if goal_s is not None:
            self.this.rows += pause_rows(case, load.streams, began, goal_s)

    def under_load(self, case: str, act: Callable[[], None], over: Callable[[], bool]) -> tuple[Load, float]:
        """As `play`, without its checks: (the load, when `act` began, monotonic)."""
        return asyncio.run(self._changed(case, act, over))

    async def _changed(self, case: str, act: Callable[[], None], over: Callable[[], bool]) -> tuple[Load, float]:
        least = self.this.args.tokens // 3
        doors = [self.cluster[name].url for name in self.nodes]
        async with Load(doors, self.bodies, case, salted=True, in_turn=True) as load:
            await load.until(lambda: load.with_tokens(least) >= len(self.bodies) / 2)
            began = time.monotonic()
            await asyncio.to_thread(act)
            while not await asyncio.to_thread(over):
                if time.monotonic() > began + CHANGE_S:
                    self.this.wrong.append(f"{case}: not over in {CHANGE_S:g} s")
                    break
                await asyncio.sleep(POLL_S)
            since = time.monotonic()

            def served() -> int:
                return sum(one.begun > since and len(one.tokens) >= least for one in load.streams)

            await load.until(lambda: served() >= len(self.bodies))
        return load, began

    # --- what is over

    def whole(self) -> bool:
        """No rank is masked."""
        return not any(self._masked(name) for name in self.nodes)

    def masked_and_back(self) -> Callable[[], bool]:
        """Whether every node has masked ranks once more than now, and none is masked."""
        now = {name: self.experts(name)["times_masked"] for name in self.nodes}
        # In this order: a rank that is masked between the two looks is not back.
        return lambda: all(self.experts(name)["times_masked"] > now[name] for name in self.nodes) and self.whole()

    def lack(self, rank: str) -> bool:
        """Every node does without this rank."""
        return all(rank in self._masked(name) for name in self.nodes)

    def alone(self) -> bool:
        """The nodes know of no other one that shares their ranks."""
        return all(len(self.experts(name)["remote"]["nodes"]) == 1 for name in self.nodes)

    def experts(self, name: str) -> dict[str, Any]:
        """Of /debug/state."""
        found: dict[str, Any] = rest.get(f"{self.cluster[name].url}/debug/state")["engine"]["experts"]
        return found

    def masked_at_most(self, case: str, faults: dict[str, int]) -> None:
        """No rank was masked without a fault. `faults`: of the ranks, by node."""
        for name, number in faults.items():
            masked = self.experts(name)["times_masked"]
            where = f"{case}, {name}"
            self.this.rows.append(Row(where, "ranks masked", "", float(masked), limits={"goal": float(number)}))
            if masked > number:
                self.this.wrong.append(f"{where}: ranks were masked {masked} times for {number} faults")

    def _masked(self, name: str) -> dict[str, str]:
        found: dict[str, str] = rest.get(f"{self.cluster[name].url}/health").get("masked_ranks") or {}
        return found
