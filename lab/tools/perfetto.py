"""Requests across nodes as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing.

  scripts/tools.py perfetto REQUEST_ID --url http://127.0.0.1:8000 -o trace.json
  scripts/tools.py perfetto --minutes 2              all requests of the cluster that ended in the last two minutes

--url is any node of the cluster; the acceptor of a request keeps the last 1,000. A process of the trace is a node, and
a row an activity: states, prefill chunks, KV to the decode node, prefix loads, decode steps. With --minutes, rows are
repeated for activities at the same time, and every activity names its request; each node has a row of its batch steps,
as far as they computed these requests, and a counter of those that waited. A node knows its last 200 requests: if more
ended in the window, a notice names the node. Nodes use their own clocks. Those of one
host are equal; others are shifted by the acceptors' estimates from calls, whose error is in the process name.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.observe.activities import DECODE, PREFILL, ROWS, STATE, Activity, activities
from engine.observe.explain import find, of_all_choices
from engine.observe.node_client import NoAnswer, NodeClient, add_flags
from engine.observe.recent import MAX_RECENT_REQUESTS
from lab.flag_types import above_zero, file_to_write

Json = Mapping[str, Any]
STEPS = "batch steps"
LANES = 1000  # numbers of rows between two activities: more requests run at no time


def window_trace(records: Sequence[Json]) -> dict[str, Any]:
    """Answers of GET /debug/requests/<id> in the trace event format: times in microseconds from the first event, on the
    clock of the first request's acceptor."""
    errors = {node: clock.get("error_s", 0.0) for record in records for node, clock in record.get("clocks", {}).items()}
    nodes = list(dict.fromkeys(node for record in records for node in _nodes_of(record)))
    shifts = _shifts(records)
    found = [
        (one, one.begin - shift, one.end - shift, record["request_id"])
        for record, shift in zip(records, shifts, strict=True)
        for one in activities(record)
    ]
    found.sort(key=lambda item: (item[1], -item[2]))
    origin = min((begin for _, begin, _, _ in found), default=0.0)
    lanes: dict[tuple[str, str], list[float]] = {}  # (node, row) -> end of the last activity of each lane
    events, rows = [*_steps(found, nodes, origin), *_waiting(found, nodes, origin)], set[tuple[int, int, str]]()
    rows |= {(event["pid"], event["tid"], STEPS) for event in events if event["ph"] == "X"}
    for one, begin, end, request_id in found:
        lane = _lane(lanes.setdefault((one.node, one.row), []), begin, end)
        place = {"pid": nodes.index(one.node) + 1, "tid": ROWS.index(one.row) * LANES + lane + 1}
        rows.add((place["pid"], place["tid"], one.row if not lane else f"{one.row} {lane + 1}"))
        at = {"ts": 1e6 * (begin - origin), "dur": 1e6 * (end - begin)}
        events.append({"name": one.name, "ph": "X", "cat": one.row, "args": _facts(one, request_id)} | at | place)
    titles = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": _title(node, errors.get(node, 0.0))}}
        for pid, node in enumerate(nodes, 1)
    ]
    named = [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": row}}
        for pid, tid, row in sorted(rows)
    ]
    return {"traceEvents": [*titles, *named, *events], "displayTimeUnit": "ms"}


Found = Sequence[tuple[Activity, float, float, str]]
"""Activities with their begin and end on one clock, and the id of their request, by begin."""


def _steps(found: Found, nodes: Sequence[str], origin: float) -> Iterator[dict[str, Any]]:
    """The steps of each node, from what they computed of these requests. The acceptors' clocks differ, so activities
    are of one step if more than half of the longer one is at the same time."""
    steps: dict[str, list[list[tuple[Activity, float, float, str]]]] = {}
    for item in found:
        one, begin, end, _ = item
        if one.row not in (PREFILL, DECODE):
            continue
        own = steps.setdefault(one.node, [])
        if own and _together(own[-1][0][1:3], (begin, end)):
            own[-1].append(item)
        else:
            own.append([item])
    for node, own in steps.items():
        lanes: list[float] = []
        for items in own:
            tokens = {row: sum(one.amount or 0 for one, *_ in items if one.row == row) for row in (PREFILL, DECODE)}
            facts = {"requests": len(items), "prompt tokens": tokens[PREFILL], "decodes": tokens[DECODE]}
            _, begin, end, _ = items[0]
            lane = _lane(lanes, begin, end)
            yield {
                "name": f"{sum(tokens.values()):,} tokens of {len(items)} requests", "ph": "X", "cat": STEPS,
                "args": facts, "ts": 1e6 * (begin - origin), "dur": 1e6 * (end - begin),
                "pid": nodes.index(node) + 1, "tid": len(ROWS) * LANES + lane + 1,
            }  # fmt: skip


def _together(one: tuple[float, float], other: tuple[float, float]) -> bool:
    shared = min(one[1], other[1]) - max(one[0], other[0])
    return shared > max(one[1] - one[0], other[1] - other[0]) / 2


def _waiting(found: Found, nodes: Sequence[str], origin: float) -> Iterator[dict[str, Any]]:
    """A counter per node: these requests that wait there for a seat, blocks or the budget of a step."""
    changes: dict[str, list[tuple[float, int]]] = {}
    for one, begin, end, _ in found:
        if (one.row, one.name) == (STATE, "waiting"):
            changes.setdefault(one.node, []).extend([(begin, 1), (end, -1)])
    for node, own in changes.items():
        depth = 0
        for at, change in sorted(own):
            depth += change
            counter = {"name": "waiting requests", "ph": "C", "pid": nodes.index(node) + 1}
            yield counter | {"ts": 1e6 * (at - origin), "args": {"requests": depth}}


def _nodes_of(record: Json) -> Iterator[str]:
    yield from record["summary"]["nodes"].values()
    yield from (event["node"] for event in record["events"])


def _shifts(records: Sequence[Json]) -> list[float]:
    """Seconds by which each record's acceptor is ahead of the first one's: by an estimate of either of the two, else
    zero, as for nodes of one host."""
    acceptors = [record["summary"]["nodes"].get("acceptor") for record in records]
    first = acceptors[0] if acceptors else None
    ahead: dict[Any, float] = {}
    for acceptor, record in zip(acceptors, records, strict=True):
        for node, clock in record.get("clocks", {}).items():
            if acceptor == first:
                ahead.setdefault(node, clock.get("offset_s", 0.0))
            elif node == first:
                ahead.setdefault(acceptor, -clock.get("offset_s", 0.0))
    return [0.0 if acceptor == first else ahead.get(acceptor, 0.0) for acceptor in acceptors]


def _lane(ends: list[float], begin: float, end: float) -> int:
    """The first lane that is free at `begin`; it is then taken until `end`."""
    for lane, busy_until in enumerate(ends):
        if busy_until <= begin:
            ends[lane] = end
            return lane
    ends.append(end)
    return len(ends) - 1


def _facts(one: Activity, request_id: str) -> dict[str, Any]:
    amount = {} if one.amount is None else {one.unit: one.amount}
    return {**one.facts, **amount, "request": request_id}


def _title(node: str, error_s: float) -> str:
    return f"{node} (clock +-{1000 * error_s:.2f} ms)" if error_s else node


def truncated(live: Json, minutes: float) -> list[str]:
    """Nodes whose list of recent requests is full and begins within the last minutes: older ones are missing."""
    since = live["unix_s"] - 60 * minutes
    heard = [(one["node_id"], one["recent"]["requests"]) for one in live["nodes"] if "error" not in one]
    return [
        name
        for name, rows in heard
        if len(rows) >= MAX_RECENT_REQUESTS and min(float(row["ended"]) for row in rows) > since
    ]


def recent(node: NodeClient, minutes: float) -> list[Json]:
    """The records of all requests that ended in the last minutes, on any node, as far as nodes still know them. Raises
    NoAnswer."""
    live = node.get("/live")
    for name in truncated(live, minutes):
        print(
            f"notice: {name} keeps its last {MAX_RECENT_REQUESTS} requests, and all of them ended in these {minutes:g} "
            "minutes: older ones are missing",
            file=sys.stderr,
        )
    rows = [row for one in live["nodes"] if "error" not in one for row in one["recent"]["requests"]]
    wanted = [row for row in rows if row["ended"] >= live["unix_s"] - 60 * minutes]
    found: list[Json] = []
    for row in sorted(wanted, key=lambda row: float(row["ended"])):
        if (record := find(node, row["id"])) is not None:  # otherwise the acceptor has forgotten it since
            found.append(record)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("request_id", nargs="?", help="the id in the answer")
    parser.add_argument("--minutes", type=above_zero, help="all requests that ended in the last MINUTES")
    add_flags(parser, "any node of the cluster")
    parser.add_argument("-o", "--output", type=file_to_write, default=Path("trace.json"), help="default %(default)s")
    args = parser.parse_args(argv)
    if (args.request_id is None) == (args.minutes is None):
        parser.error("give the id of a request, or --minutes")
    try:
        node = NodeClient.from_flags(args)
        if args.minutes is None:
            if not (chosen := of_all_choices(node, args.request_id)):
                print(f"trace: no node knows {args.request_id} (any more)", file=sys.stderr)
                return 1
            trace = window_trace(chosen) | {"otherData": {"request_id": args.request_id}}
        elif records := recent(node, args.minutes):
            trace = window_trace(records)
            print(f"{len(records)} requests")
        else:
            print(f"trace: no request ended in the last {args.minutes:g} minutes", file=sys.stderr)
            return 1
    except NoAnswer as error:
        print(f"trace: {error}", file=sys.stderr)
        return 1
    args.output.write_text(json.dumps(trace))
    print(f"{args.output}: open it in https://ui.perfetto.dev")
    return 0
