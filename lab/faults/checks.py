"""The checks after a fault: the same tokens, balanced books, no growth; and how long the streams paused."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cache.protocol import Deadlines
from lab.bench.common.results import Row
from lab.faults.client import Stream
from lab.launch import rest
from lab.launch.cluster import LocalCluster

SETTLE_S = 30.0
LEASED_S = Deadlines().lease_s + 15.0
"""A lease whose holder has vanished ends by its deadline."""

FORM_S = 60.0
GOAL_S = 2.0
"""Longest pause of a stream at the 99th percentile (reference/scheduling.md, G9)."""

RESTART_GOAL_S = 15.0
"""The same if the only node of a role must start first: about 5 s on two cores, half of it imports."""


GROWTH_BYTES = 48 << 20
"""The limit of a node's growth in resident memory, from the first sample to the last."""


def differences(case: str, expected: Sequence[Stream], streams: Sequence[Stream]) -> list[str]:
    """Requests that failed or whose tokens differ from the undisturbed run; `expected[i]` belongs to `streams[i]`."""
    found = []
    for number, (calm, disturbed) in enumerate(zip(expected, streams, strict=True)):
        if disturbed.error:
            found.append(f"{case}: stream {number} failed: {disturbed.error}")
        elif not disturbed.tokens:
            found.append(f"{case}: stream {number} has no token")
        elif disturbed.tokens != calm.tokens:
            same = next((i for i, (a, b) in enumerate(zip(calm.tokens, disturbed.tokens, strict=False)) if a != b), -1)
            found.append(f"{case}: stream {number} differs from token {same} on ({len(disturbed.tokens)} tokens)")
    return found


def settle(cluster: LocalCluster) -> list[str]:
    """Wait until no living node holds anything for a request, and no share of the pool a slot for a lease. Returns the
    faults if that does not happen."""
    begin = time.monotonic()
    while True:
        states = [_state(cluster, node.name, node.url) for node in cluster.nodes if node.alive]
        wrong = [text for name, state in states for text in _held(name, state)]
        leased = [text for name, state in states for text in _leased(name, state)]
        waited_s = time.monotonic() - begin
        if (wrong and waited_s > SETTLE_S) or waited_s > LEASED_S or not wrong + leased:
            return wrong + leased
        time.sleep(0.2)


def _state(cluster: LocalCluster, name: str, url: str) -> tuple[str, dict[str, Any] | str]:
    """(name of the node, its state or why it does not tell it)"""
    try:
        return name, dict(rest.get(f"{url}/debug/state", cluster.api_key))
    except rest.RestError as error:
        return name, str(error)


def _leased(name: str, state: dict[str, Any] | str) -> list[str]:
    """Slots of the node's share that somebody reads or writes. Pinned ones are held for their values, or are on SSD."""
    if isinstance(state, str) or state["store"] is None:
        return []
    dram = state["store"]["dram"]
    held = {"held": max(0, dram["held"] - dram["pinned"]), "reserved": dram["reserved"]}
    return [f"{name}: {count} slots of its share are still {what}" for what, count in held.items() if count]


def _held(name: str, state: dict[str, Any] | str) -> list[str]:
    if isinstance(state, str):
        return [f"{name} does not answer: {state}"]
    engine = state["engine"]
    if engine is None:
        return []
    books = [] if engine["integrity"] is None else [f"{name}: {engine['integrity']}"]
    held = {**engine["references"], **engine["held_for_requests"], "blocks": engine["blocks"]["held"]}
    return books + [f"{name} still holds {count} {what}" for what, count in held.items() if count]


def blocks_held(cluster: LocalCluster) -> int:
    """Blocks that requests or transfers of living nodes hold."""
    urls = [f"{node.url}/debug/state" for node in cluster.nodes if node.alive]
    engines = [rest.get(url, cluster.api_key)["engine"] for url in urls]
    return sum(engine["blocks"]["held"] for engine in engines if engine is not None)


def form(cluster: LocalCluster, within_s: float = FORM_S) -> None:
    """Wait until every living node is ready and counts exactly the living ones as members. Raises TimeoutError."""
    deadline = time.monotonic() + within_s
    while not (all(node.ready for node in cluster.nodes if node.alive) and cluster.formed()):
        cluster.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"the living nodes are not one cluster after {within_s:g} s")
        time.sleep(0.1)


def pause_rows(case: str, streams: Sequence[Stream], since: float, goal_s: float = GOAL_S) -> list[Row]:
    """Pauses of all streams that had begun before `since` and were not finished, and the longest wait for a first token
    of later streams and of those without a token at `since`."""
    cut = [one for one in streams if one.at and one.at[0] <= since < one.at[-1]]
    gaps = sorted(one.longest_gap(since) for one in cut)
    rows = [
        Row(case, "streams cut", "", float(len(gaps))),
        Row(case, "reconnects", "", float(sum(one.reconnects for one in streams))),
    ]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        value = gaps[min(len(gaps) - 1, int(share * len(gaps)))] if gaps else None
        rows.append(Row(case, f"longest pause {name}", "s", value, limits={"goal": goal_s} if name == "p99" else {}))
    waits = [one.at[0] - max(one.begun, since) for one in streams if one.at and one.at[0] > since]
    longest = max(waits, default=None)
    return [*rows, Row(case, "longest wait for a first token", "s", longest, limits={"goal": goal_s})]


def own_bytes(pid: int) -> int:
    """Private resident memory of the process, without arenas, which are shared memory and fill up."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) << 10


class Memory:
    """The private memory of node processes, compared with their first sample. A restarted node is another process, so
    its comparison begins again."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], int] = {}

    def growth(self, cluster: LocalCluster) -> dict[str, float]:
        """Takes a sample. Returns the name of each living node whose process was sampled before -> MiB since then."""
        now = {(node.name, node.pid): own_bytes(node.pid) for node in cluster.nodes if node.alive}
        grown = {
            name: (size - self._first[name, pid]) / 2**20
            for (name, pid), size in now.items()
            if (name, pid) in self._first
        }
        self._first = now | self._first
        return grown


def growth_row(case: str, grown: Mapping[str, float], most_bytes: int = GROWTH_BYTES) -> tuple[Row, list[str]]:
    """(row with the largest growth and a note with all of them, nodes that grew by more than `most_bytes`)"""
    most = most_bytes / 2**20
    note = f"{case}: memory " + ", ".join(f"{name} {size:+.1f} MiB" for name, size in grown.items())
    row = Row(
        case,
        "memory growth",
        "MiB",
        max(grown.values(), default=None),
        limits={"most": most},
        note=note if grown else "",
    )
    return row, [f"{case}: {name} grew by {size:.1f} MiB" for name, size in grown.items() if size > most]
