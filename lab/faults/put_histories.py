"""Clients put the same keys concurrently, in calm and across a cut: checks their reads against docs/store.md.

    python scripts/faults.py put-histories                    three store nodes, --replicas 2, under a minute; as root
    python scripts/faults.py put-histories --keys 1000 --cut-s 20 --json out.json
    python scripts/faults.py put-histories --cut-s 0          only the part in calm; as any user

Every node is a process in a separate network namespace that it shares with one client process. Calm: every client puts
every key, so one of them is first; the history of each key must be linearizable (lab/faults/histories.py). Then one
node and its client are cut off, all clients put the next keys, some of them on one side only, and the cut heals. Until
all nodes see each other, clients may see different values. Afterwards each key permanently has one of the values that
were put under it, the same for all clients; a value that was put on one side only must stay. Exit code 1 if a check
failed, 3 if network namespaces are not available, with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from lab.bench.common.results import Row
from lab.faults.checks import form
from lab.faults.histories import Operation, linearizable
from lab.faults.networks.namespaces import Namespaces
from lab.faults.put_client import Row as Seen
from lab.faults.runner import API_KEY, Run, Scenario, run
from lab.flag_types import not_negative, positive
from lab.launch.cluster import LocalCluster

NODES = "store=3"
NAMES = ("store-0", "store-1", "store-2")
ALONE = (1_000_000, 2_000_000, 3_000_000)
"""For each client, the first of the keys that only this client puts."""

ROOT = Path(__file__).resolve().parents[2]

FLAGS = ["--model", "none", "--dram-bytes", "64M", "--value-bytes", "4096", "--replicas", "2"]
FLAGS += ["--transport", "tcp", "--net", "local"]
CUT_OFF = "store-2"
AGREE_S = 60.0

Histories = dict[int, list[Operation]]
Answers = dict[int, set[str | None]]
"""Number of the key -> values that clients read."""


class Client:
    """A client process, in the node's namespace if there is a network of namespaces."""

    def __init__(self, cluster: LocalCluster, network: Namespaces | None, name: str, seed: int) -> None:
        address = cluster[name].url.removeprefix("http://")
        place = network.prefix(name) if network else []
        self.process = subprocess.Popen(
            [*place, sys.executable, "-m", "lab.faults.put_client", address, name, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"MOONCAKE_API_KEY": API_KEY},
        )
        if self._line() != "open\n":
            self.close()
            raise RuntimeError(f"the client of {name} did not start")

    def begin(self, puts: Sequence[int], gets: Sequence[int]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([list(puts), list(gets)]) + "\n")
        self.process.stdin.flush()

    def seen(self) -> list[Seen]:
        """The client's operations."""
        rows: list[Seen] = json.loads(self._line())
        return rows

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--keys", type=positive, default=400, help="keys put by all clients, in calm and across the cut"
    )
    parser.add_argument(
        "--cut-s",
        type=not_negative,
        default=8.0,
        help="minimum length of the cut, which also waits for the clients; 0 = no cut, and no namespaces",
    )


def play(this: Run) -> None:
    this.facts = {"nodes": NODES}
    with ExitStack() as opened:
        network = opened.enter_context(Namespaces(NAMES)) if this.args.cut_s else None
        cluster = opened.enter_context(this.cluster(NODES, FLAGS, network=network))
        this.rows, wrong = measure(this.args, cluster, network)
        this.wrong += wrong


def measure(args: Namespace, cluster: LocalCluster, network: Namespaces | None) -> tuple[list[Row], list[str]]:
    """(rows, faults)"""
    with ExitStack() as opened:
        clients: dict[str, Client] = {}
        for name in NAMES:
            clients[name] = Client(cluster, network, name, args.seed)
            opened.callback(clients[name].close)
        calm = histories(together(clients, dict.fromkeys(clients, range(args.keys))))
        rows, wrong = judged_calm(calm)
        if network is None:
            return rows, wrong
        network.cut(CUT_OFF, "both")
        cut_at = time.monotonic()
        both = range(args.keys, 2 * args.keys)
        alone = {name: range(first, first + args.keys // 4) for first, name in zip(ALONE, NAMES, strict=True)}
        cut = histories(together(clients, {name: [*both, *alone[name]] for name in NAMES}))
        time.sleep(max(0.0, args.cut_s - (time.monotonic() - cut_at)))
        network.heal(CUT_OFF)
        form(cluster)
        at_once, at_last, agree_s = until_agreed(clients, [*calm, *cut])
    uneven = [number for number, found in at_last.items() if len(found) > 1]
    for number, history in (calm | cut).items():
        if not at_last[number] <= may_stay(history):
            wrong.append(f"key {number} is read as {at_last[number]} after the cut: {history}")
    wrong += [f"key {number} is read as {at_last[number]} {agree_s:.0f} s after the cut" for number in uneven]
    twice = sum(len(put_by(history)) > 1 for history in cut.values())
    wrong += not_parted(cut)
    rows += [
        Row("cut", "keys put", "", float(len(cut))),
        Row("cut", "keys first put on both sides", "", float(twice)),
        Row("cut", "puts that failed", "", float(sum(one.failed for history in cut.values() for one in history))),
        Row("healed", "keys read differently at once", "", float(sum(len(found) > 1 for found in at_once.values()))),
        Row("healed", "keys read differently at last", "", float(len(uneven))),
        Row("healed", "until all clients read the same", "s", agree_s),
    ]
    return rows, wrong


def judged_calm(calm: Histories) -> tuple[list[Row], list[str]]:
    """(rows, faults) of histories without a fault. A history in which no put was answered is linearizable whatever the
    store does, so it is wrong here."""
    bent = [number for number, history in calm.items() if not linearizable(history)]
    mute = [number for number, history in calm.items() if all(one.failed for one in history if one.kind == "put")]
    failed = sum(one.failed for history in calm.values() for one in history)
    rows = [
        Row("calm", "keys put by all clients", "", float(len(calm))),
        Row("calm", "histories not linearizable", "", float(len(bent))),
        Row("calm", "puts that failed", "", float(failed)),
    ]
    wrong = [f"key {number} in calm: {calm[number]}" for number in bent]
    return rows, wrong + [f"key {number} in calm: no put was answered" for number in mute]


def not_parted(cut: Histories) -> list[str]:
    """What is wrong if the nodes saw each other during the cut: no key was first put on both sides."""
    if any(len(put_by(history)) > 1 for history in cut.values()):
        return []
    return ["no key was first put on both sides, so the cut did not part the nodes"]


def until_agreed(clients: Mapping[str, Client], numbers: Sequence[int]) -> tuple[Answers, Answers, float]:
    """(first reads, last reads, seconds until all clients read the same)"""
    begin = time.monotonic()
    first = last = answers(clients, numbers)
    while any(len(found) > 1 for found in last.values()) and time.monotonic() - begin < AGREE_S:
        time.sleep(0.5)
        last = answers(clients, numbers)
    return first, last, time.monotonic() - begin


def may_stay(history: Sequence[Operation]) -> set[str | None]:
    """Values whose put was answered as the first, or was not answered."""
    puts = [one for one in history if one.kind == "put" and one.value is not None]
    said: set[str | None] = {one.value.decode() for one in puts if one.value and (one.answer or one.failed)}
    return said if any(one.answer for one in puts) else said | {None}


def together(clients: Mapping[str, Client], puts: Mapping[str, Sequence[int]]) -> list[Seen]:
    """All clients concurrently put their keys, and get each twice."""
    for name, client in clients.items():
        client.begin(puts[name], [*puts[name], *puts[name]])
    return [row for client in clients.values() for row in client.seen()]


def histories(rows: Sequence[Seen]) -> Histories:
    """Histories by number of the key."""
    out: Histories = {}
    for number, kind, called, returned, value, answer, failed in rows:
        found = answer.encode() if isinstance(answer, str) else answer
        put = None if value is None else value.encode()
        operation = Operation("get" if kind == "get" else "put", called, returned, put, found, failed)
        out.setdefault(number, []).append(operation)
    return out


def put_by(history: Sequence[Operation]) -> set[bytes]:
    """Values whose put was answered as the first."""
    return {one.value for one in history if one.kind == "put" and one.answer and one.value is not None}


def answers(clients: Mapping[str, Client], numbers: Sequence[int]) -> Answers:
    """The values that clients read now; each reads twice."""
    for client in clients.values():
        client.begin([], [*numbers, *numbers])
    out: Answers = {number: set() for number in numbers}
    for client in clients.values():
        for number, _, _, _, _, answer, _ in client.seen():
            out[number].add(answer)
    return out


main = partial(run, Scenario(__doc__, add_flags, play, quick={"keys": 100, "cut_s": 4.0}))
