"""The activities in the timeline of a request: what each of its nodes did and when, on one clock. Pure.

scripts/tools.py perfetto turns them into a Perfetto trace, engine/observe/otlp.py into OpenTelemetry spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

ACCEPTOR, STATE, LOADS, PREFILL, KV, DECODE = (
    *("acceptor", "state", "prefix loads", "prefill compute", "KV to the decode node", "decode"),
)
ROWS = (ACCEPTOR, STATE, LOADS, PREFILL, KV, DECODE)
STATES = ("waiting", "loading", "remote", "running", "finished")

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Activity:
    """`amount` tokens or bytes (`unit` says which; None for phases and states) from `begin` to `end`, unix seconds on
    the acceptor's clock. `event`: the index of its event in the timeline; one event can contain many activities."""

    node: str
    row: str
    name: str
    begin: float
    end: float
    facts: Json
    event: int = -1
    amount: int | None = None
    unit: str = ""


def activities(record: Json) -> list[Activity]:
    """The activities in an answer of GET /debug/requests/<id> (Timeline.as_dict). Times of other nodes are shifted by
    the acceptor's estimate of their clock offset; nodes on one host share a clock."""
    clocks, nodes = record.get("clocks", {}), record["summary"]["nodes"]
    events = sorted((on_one_clock(event, clocks) for event in record["events"]), key=lambda event: float(event["t"]))
    return [*_phases(events, nodes), *_states(events), *_work(events, nodes)]


def on_one_clock(event: Json, clocks: Json) -> dict[str, Any]:
    """The event, converted to the acceptor's clock."""
    return dict(event) | {"t": event["t"] - clocks.get(event["node"], {}).get("offset_s", 0.0)}


def _phases(events: Sequence[Json], nodes: Json) -> Iterator[Activity]:
    """The request as its acceptor saw it."""
    acceptor = nodes.get("acceptor")
    at = {event["event"]: event["t"] for event in reversed(events) if event["node"] == acceptor}
    end = at.get("answered", at.get("aborted"))
    for name, since, until in (
        ("place", at.get("accepted"), at.get("placed")),
        ("reserve blocks", at.get("placed"), at.get("reserved")),
        ("first token", at.get("reserved", at.get("placed")), at.get("first_token")),
        ("stream", at.get("first_token"), end),
    ):
        if since is not None and until is not None:
            yield Activity(nodes["acceptor"], ACCEPTOR, name, since, until, {})


def _states(events: Sequence[Json]) -> Iterator[Activity]:
    """From each state of the request on a node to the next."""
    for node in dict.fromkeys(event["node"] for event in events):
        log = [event for event in events if event["node"] == node and event["event"] in STATES]
        for event, following in pairwise(log):
            if event["event"] != "finished":
                yield Activity(node, STATE, event["event"], event["t"], following["t"], dict(event["detail"]))


def _work(events: Sequence[Json], nodes: Json) -> Iterator[Activity]:
    """The computations and transfers of the nodes, interval by interval."""
    prefilled = False
    for place, event in enumerate(events):
        node, detail, name = event["node"], event["detail"], event["event"]
        if name == "computed":
            first = node == nodes.get("prefill") and not prefilled
            prefilled |= first
            row, unit = PREFILL if first else DECODE, "tokens"
        elif name == "kv_moved":
            row, unit = KV, "bytes"
        elif name == "prefix_fetched":
            row, unit = LOADS, "bytes"
        else:
            continue
        facts = {key: value for key, value in detail.items() if key != "intervals"}
        for begin, end, amount in detail.get("intervals") or [[detail["seconds"], 0.0, detail["bytes"]]]:
            label = f"{detail['how']} {amount:,} {unit}" if name == "kv_moved" else f"{amount:,} {unit}"
            since, until = event["t"] - begin, event["t"] - end
            yield Activity(node, row, label, since, until, facts, place, amount, unit)
