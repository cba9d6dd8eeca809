"""Gossip under random faults, many seeds: invariants after every event, agreement at the end. A failing seed can be
replayed.

    python scripts/faults.py chaos --seeds 1000 --start 0
    python scripts/faults.py chaos --seeds 1 --start 4711      # one failing seed; prints its schedule

A seed draws the number of nodes, the weather (loss, duplicates, delays that reorder) and a schedule of crashes,
restarts under the same name and address, leaves, new nodes, pauses, partitions, one-way cuts and clock steps. Then the
faults end, and within a bound every node must see exactly the running nodes, and hold their newest load.
"""

from __future__ import annotations

import random
import time
from argparse import ArgumentParser
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from lab.bench.common.results import Row, add_result_flags, commit, quicken, report
from lab.flag_types import natural, positive
from lab.virtual.cluster import GossipNode, VirtualCluster
from lab.virtual.network import VirtualNode, Weather
from sched.gossip.core import GossipCore
from sched.gossip.state import NodeRecord, node_key
from sched.membership.events import Event, MemberDown, MemberUp, SendPacket, Tick
from sched.membership.member import Status, presets
from sched.membership.packet import PACKET_BYTES

ROOT = "aa" * 16
FAULTS = 10
KINDS = ("crash", "leave", "pause", "partition", "one way", "heal", "restart", "add", "clock", "load")
CALM_S = 90.0
"""Time after the last fault until which all must agree again: a few comparisons of member lists."""

LIMIT_S = 600.0
"""A thousand seeds should take less on two cores."""

PRESET = replace(presets["local"], state_period_s=0.6)
"""The local timing with fewer records, which cost most of the work and find no faults."""


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class Seen:
    """What one process has reported so far."""

    here: set[str] = field(default_factory=set)
    orders: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # (node, life) -> (inc, status)
    records: dict[str, int] = field(default_factory=dict)
    effects: int = 0


class Chaos(VirtualCluster):
    """A cluster that checks itself."""

    def __init__(self, seed: int, log: Callable[[str], None]) -> None:
        rng = random.Random(seed)
        weather = Weather(
            loss=rng.choice([0.0, 0.0, 0.01, 0.1, 0.3]),
            duplicate=rng.choice([0.0, 0.05, 0.3]),
            delay_s=(0.0002, rng.choice([0.002, 0.02, 0.08])),
        )
        super().__init__(rng, random.Random, PRESET, weather)
        self.say = log
        self.random = rng
        self._seen: dict[VirtualNode[Any], Seen] = {}
        self._issued: dict[tuple[str, int], int] = {}  # (node, life) -> the greatest incarnation it gave itself
        self.watches.append(self.check)
        log(f"{weather}")

    # --- the schedule

    def play(self) -> None:
        for number in range(self.random.randint(3, 8)):
            self.add(f"n{number}", root=ROOT)
            if number:
                self.join(f"n{number}", f"n{self.random.randrange(number)}")
        self.run(self.random.uniform(0.0, 3.0))
        for _ in range(FAULTS):
            self.fault()
            self.run(self.random.uniform(0.05, 2.0))
        self.say(f"{self.now:.2f} calm")
        self.heal()
        self.weather = Weather()
        self.run(8.0)  # suspicions from the faults expire; pauses end
        self.help_the_stranded()
        if self.run_until(self.agreed, CALM_S, 0.1) is None:
            raise Broken(
                f"no agreement {CALM_S:g} s after the faults: { {n.name: sorted(n.sees()) for n in self.up()} }"
            )
        self.run(1.0)
        if not self.agreed():
            raise Broken("agreement did not last")

    def fault(self) -> None:
        rng, up = self.random, [node.name for node in self.up()]
        down = [name for name, node in self.nodes.items() if not node.up]
        kind = rng.choice(KINDS)
        name = rng.choice(up)
        self.say(f"{self.now:.2f} {kind} {name}")
        if kind in ("crash", "leave") and len(up) > 2:
            getattr(self, kind)(name)
        elif kind == "pause":
            self.pause(name, rng.uniform(0.1, 6.0))
        elif kind == "partition" and len(up) > 1:
            rng.shuffle(up)
            cut = rng.randrange(1, len(up))
            self.partition(up[:cut], up[cut:])
        elif kind == "one way":
            self.cut([name], [other for other in up if other != name and rng.random() < 0.6])
        elif kind == "heal":
            self.heal()
        elif kind == "restart" and down:
            again = rng.choice(down)
            self.add(again, self.nodes[again].address, root=ROOT)
            self.join(again, name)
        elif kind == "add":
            fresh = f"n{len(self.nodes)}"
            self.add(fresh, root=ROOT)
            self.join(fresh, name)
        elif kind == "clock":
            self.step_clock(name, rng.choice([-3600.0, -2.0, -0.3, 0.3, 2.0, 3600.0]))
        elif kind == "load":
            self.node(name).load = NodeRecord(
                blocks_total=100, blocks_used=rng.randrange(101), waiting=rng.randrange(9)
            )

    def help_the_stranded(self) -> None:
        """Nodes whose --join node died before it answered form an island that no running node knows: their operator
        gives them another node."""
        up = self.up()
        mainland = [up[0]]
        for node in mainland:  # grows during the loop
            mainland += [other for other in up if other not in mainland and (knows(node, other) or knows(other, node))]
        for node in up:
            if node not in mainland:
                self.join(node.name, up[0].name)

    def agreed(self) -> bool:
        """Whether all nodes see exactly the running nodes as alive, and hold the present load of each."""
        if not self.converged():
            return False
        up = self.up()
        for node in up:
            if any(member.status is not Status.ALIVE for member in node.core.membership.alive()):
                return False
            records = node.core.view.records(self.now + node.clock_offset)
            for other in up:
                held = records.get(other.name)
                if held is None or (held.blocks_used, held.waiting) != (other.load.blocks_used, other.load.waiting):
                    return False
        return True

    # --- invariants

    def _send(self, node: VirtualNode[GossipCore], packet: SendPacket) -> None:
        if len(packet.payload) > PACKET_BYTES:
            raise Broken(f"{node.name} sends a packet of {len(packet.payload)} bytes")
        super()._send(node, packet)

    def check(self, node: VirtualNode[Any], event: Event) -> None:
        seen = self._seen.setdefault(node, Seen())
        membership = node.core.membership
        if isinstance(event, Tick) and node.core.wake_at() <= self.now + node.clock_offset:
            raise Broken(f"{node.name} wants another tick at the same time: it would spin")
        self.check_ups_and_downs(node, seen)
        me = membership.me
        if me.incarnation < self._issued.get((node.name, me.life), 0):
            raise Broken(f"{node.name} took its incarnation back")
        self._issued[node.name, me.life] = me.incarnation
        for key in [key for key in seen.orders if membership.get(key[0]) is None]:
            del seen.orders[key]  # it was dead for so long that the node forgot it
        for member in membership.others():
            self.check_entry(node, seen, member)
        self.check_records(node, seen)

    def check_ups_and_downs(self, node: VirtualNode[Any], seen: Seen) -> None:
        """A node gets alternating up and down events for every other node, and their result is the set of nodes that it
        sees."""
        for _, effect in node.log[seen.effects :]:
            if isinstance(effect, MemberUp):
                if effect.member.node_id in seen.here:
                    raise Broken(f"{node.name} was told twice that {effect.member.node_id} is up")
                seen.here.add(effect.member.node_id)
            elif isinstance(effect, MemberDown):
                if effect.node_id not in seen.here:
                    raise Broken(f"{node.name} was told that {effect.node_id} is down, which was not up")
                seen.here.remove(effect.node_id)
        seen.effects = len(node.log)
        if seen.here != {member.node_id for member in node.core.membership.others()}:
            raise Broken(f"{node.name} sees other nodes than it was told of")

    def check_entry(self, node: VirtualNode[Any], seen: Seen, member: Any) -> None:
        """Statements about a process only get newer, and only processes of that name raise its incarnation. A verdict
        names no process, so a verdict on a restarted node may reach nodes that know only its previous process."""
        key = (member.node_id, member.life)
        if member.order < seen.orders.get(key, (0, 0)):
            raise Broken(f"{node.name} goes back on {member.node_id}: {seen.orders[key]} -> {member.order}")
        seen.orders[key] = member.order
        if member.incarnation > max((own for (name, _), own in self._issued.items() if name == key[0]), default=-1):
            raise Broken(f"{node.name} has an incarnation of {member.node_id} that it never gave itself")

    def check_records(self, node: VirtualNode[Any], seen: Seen) -> None:
        """Records of a member that stays only get newer; there are none of other nodes."""
        view = node.core.view
        held = dict(zip(view.keys.tolist(), view.orders.tolist(), strict=True))
        expected = {node_key(name): name for name in [*seen.here, node.name]}
        if held.keys() != expected.keys():
            raise Broken(f"{node.name} has records of nodes that are no members")
        fresh = {expected[key]: order for key, order in held.items()}
        for name, order in fresh.items():
            if order < seen.records.get(name, 0) and not self.was_replaced(node, name):
                raise Broken(f"{node.name} took an older record of {name}")
        seen.records = fresh

    def was_replaced(self, node: VirtualNode[Any], name: str) -> bool:
        """Whether the node lost `name` in the last event, or saw it restart: then its records start again."""
        return any(isinstance(e, MemberDown) and e.node_id == name and t == self.now for t, e in node.log[-64:])


def knows(node: GossipNode, other: GossipNode) -> bool:
    """Whether `node` knows this process of `other`, alive or dead: nodes also contact dead nodes that they know."""
    member = node.core.membership.get(other.name)
    return member is not None and member.life == other.core.membership.me.life


def run_seed(seed: int, verbose: bool = False) -> str | None:
    """None, or the failure."""
    log: list[str] = []
    try:
        Chaos(seed, log.append).play()
    except Exception as error:  # an exception counts like a broken invariant
        return f"seed {seed}: {error!r}" + ("\n  " + "\n  ".join(log) if verbose else "")
    if verbose:
        print(*log, sep="\n  ")
    return None


def rows_of(seeds: int, failed: int, took_s: float) -> list[Row]:
    case = "random faults"
    return [
        Row(case, "seeds", "", float(seeds)),
        Row(case, "failed", "", float(failed), limits={"limit": 0.0}),
        Row(case, "wall time", "s", took_s, limits={"limit": LIMIT_S * seeds / 1000}),
    ]


def main() -> int:
    parser = ArgumentParser(description="gossip under random faults")
    parser.add_argument("--seeds", type=positive, default=1000, help="how many")
    parser.add_argument("--start", type=natural, default=0, help="the first seed")
    parser.add_argument("--jobs", type=positive, default=2, help="processes")
    add_result_flags(parser)
    args = quicken(parser.parse_args(), seeds=50)
    started, failures = time.monotonic(), []
    seeds = range(args.start, args.start + args.seeds)
    with ProcessPoolExecutor(args.jobs) as pool:
        for number, failure in enumerate(pool.map(run_seed, seeds, chunksize=4), 1):
            if failure is not None:
                failures.append(failure)
                print(
                    f"{failure}\n  replay: python scripts/faults.py chaos --seeds 1 --start {failure.split()[1][:-1]}"
                )
            if number % 100 == 0:
                print(f"{number} seeds, {time.monotonic() - started:.0f} s, {len(failures)} failed", flush=True)
    took_s = time.monotonic() - started
    print(f"{args.seeds} seeds from {args.start} at {commit()}: {len(failures)} failed, {took_s:.0f} s")
    if args.json:
        report({"start": args.start, "jobs": args.jobs}, rows_of(args.seeds, len(failures), took_s), args.json)
    if failures and args.seeds == 1:
        print(run_seed(args.start, verbose=True))
    return 1 if failures else 0
