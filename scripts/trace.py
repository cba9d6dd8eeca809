#!/usr/bin/env python3
"""One request across nodes as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing.

  scripts/trace.py REQUEST_ID --url http://127.0.0.1:8000 -o trace.json

--url is the node that took the request (its acceptor keeps the last 1,000). A process of the trace is a node, a row of
it an activity: states, prefill chunks, KV to the decode node, prefix loads, decode steps. Nodes stamp with their own
clocks; those of one host are equal, others are shifted by what the acceptor estimated from calls, whose error is in the
process name.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without installing

from scripts import rest

ROWS = ("acceptor", "state", "prefix loads", "prefill compute", "KV to the decode node", "decode")
STATES = ("waiting", "loading", "remote", "running", "finished")


def chrome_trace(record: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of GET /debug/requests/<id> in the trace event format; times in microseconds from its first event."""
    clocks = record.get("clocks", {})
    events = [_shifted(event, clocks) for event in record["events"]]
    origin = min((span["begin"] for span in _spans(events, record["summary"]["nodes"])), default=0.0)
    nodes = list(dict.fromkeys([*record["summary"]["nodes"].values(), *(event["node"] for event in events)]))
    out = [item for pid, node in enumerate(nodes, 1) for item in _names(pid, node, clocks)]
    for span in _spans(events, record["summary"]["nodes"]):
        place = {"pid": nodes.index(span["node"]) + 1, "tid": ROWS.index(span["row"]) + 1}
        at = {"ts": 1e6 * (span["begin"] - origin), "dur": 1e6 * (span["end"] - span["begin"])}
        out.append({"name": span["name"], "ph": "X", "cat": span["row"], "args": span["args"]} | at | place)
    return {"traceEvents": out, "displayTimeUnit": "ms", "otherData": {"request_id": record["request_id"]}}


def _shifted(event: Mapping[str, Any], clocks: Mapping[str, Any]) -> dict[str, Any]:
    """The event on the acceptor's clock."""
    return dict(event) | {"t": event["t"] - clocks.get(event["node"], {}).get("offset_s", 0.0)}


def _names(pid: int, node: str, clocks: Mapping[str, Any]) -> list[dict[str, Any]]:
    error = clocks.get(node, {}).get("error_s", 0.0)
    title = f"{node} (clock +-{1000 * error:.2f} ms)" if error else node
    rows = [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": row}}
        for tid, row in enumerate(ROWS, 1)
    ]
    return [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}}, *rows]


def _spans(events: Sequence[Mapping[str, Any]], nodes: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What took time, as {node, row, name, begin, end, args}."""
    events = sorted(events, key=lambda event: float(event["t"]))
    yield from _acceptor(events, nodes)
    yield from _states(events)
    prefilled = False
    for event in events:
        node, detail, name = event["node"], event["detail"], event["event"]
        if name == "computed":
            first = node == nodes.get("prefill") and not prefilled
            prefilled |= first
            unit = "tokens"
            row = "prefill compute" if first else "decode"
        elif name == "kv_moved":
            row, unit = "KV to the decode node", "bytes"
        elif name == "prefix_fetched":
            row, unit = "prefix loads", "bytes"
        else:
            continue
        facts = {key: value for key, value in detail.items() if key != "intervals"}
        for begin, end, amount in detail.get("intervals") or [[detail["seconds"], 0.0, detail["bytes"]]]:
            label = f"{detail['how']} {amount:,} {unit}" if name == "kv_moved" else f"{amount:,} {unit}"
            yield _span(node, row, label, event["t"] - begin, event["t"] - end, facts | {unit: amount})


def _acceptor(events: Sequence[Mapping[str, Any]], nodes: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Phases as the acceptor saw them."""
    at = {event["event"]: event["t"] for event in reversed(events) if event["node"] == nodes.get("acceptor")}
    end = at.get("answered", at.get("aborted"))
    for name, since, until in (
        ("place", at.get("accepted"), at.get("placed")),
        ("reserve blocks", at.get("placed"), at.get("reserved")),
        ("first token", at.get("reserved", at.get("placed")), at.get("first_token")),
        ("stream", at.get("first_token"), end),
    ):
        if since is not None and until is not None:
            yield _span(nodes["acceptor"], "acceptor", name, since, until, {})


def _states(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """From each state of the request on a node to the next."""
    for node in dict.fromkeys(event["node"] for event in events):
        log = [event for event in events if event["node"] == node and event["event"] in STATES]
        for event, following in pairwise(log):
            if event["event"] != "finished":
                yield _span(node, "state", event["event"], event["t"], following["t"], dict(event["detail"]))


def _span(node: str, row: str, name: str, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"node": node, "row": row, "name": name, "begin": begin, "end": end, "args": args}


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("request_id", help="as in the answer's id")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the node that took it (default %(default)s)")
    parser.add_argument("--api-key", help="as the node has it")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="default %(default)s")
    args = parser.parse_args(argv)
    try:
        record = rest.get(f"{args.url.rstrip('/')}/debug/requests/{args.request_id}", args.api_key)
    except rest.RestError as error:
        print(f"trace: {error}", file=sys.stderr)
        return 1
    args.output.write_text(json.dumps(chrome_trace(record)))
    print(f"{args.output}: open it in https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
