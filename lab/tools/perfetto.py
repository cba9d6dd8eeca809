"""One request across nodes as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing.

  scripts/tools.py perfetto REQUEST_ID --url http://127.0.0.1:8000 -o trace.json

--url is any node of the cluster; the acceptor of a request keeps the last 1,000. A process of the trace is a node, and
a row an activity: states, prefill chunks, KV to the decode node, prefix loads, decode steps. Nodes use their own
clocks. Those of one host are equal; others are shifted by the acceptor's estimate from calls, whose error is in the
process name.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.observe.activities import ROWS, activities
from engine.observe.explain import find
from engine.observe.node_client import NoAnswer, NodeClient, add_flags


def chrome_trace(record: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of GET /debug/requests/<id> in the trace event format; times in microseconds from its first event."""
    clocks, found = record.get("clocks", {}), activities(record)
    origin = min((one.begin for one in found), default=0.0)
    nodes = list(dict.fromkeys([*record["summary"]["nodes"].values(), *(event["node"] for event in record["events"])]))
    out = [item for pid, node in enumerate(nodes, 1) for item in _names(pid, node, clocks)]
    for one in found:
        facts = dict(one.facts) if one.amount is None else {**one.facts, one.unit: one.amount}
        place = {"pid": nodes.index(one.node) + 1, "tid": ROWS.index(one.row) + 1}
        at = {"ts": 1e6 * (one.begin - origin), "dur": 1e6 * (one.end - one.begin)}
        out.append({"name": one.name, "ph": "X", "cat": one.row, "args": facts} | at | place)
    return {"traceEvents": out, "displayTimeUnit": "ms", "otherData": {"request_id": record["request_id"]}}


def _names(pid: int, node: str, clocks: Mapping[str, Any]) -> list[dict[str, Any]]:
    error = clocks.get(node, {}).get("error_s", 0.0)
    title = f"{node} (clock +-{1000 * error:.2f} ms)" if error else node
    rows = [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": row}}
        for tid, row in enumerate(ROWS, 1)
    ]
    return [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}}, *rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("request_id", help="the id in the answer")
    add_flags(parser, "any node of the cluster")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="default %(default)s")
    args = parser.parse_args(argv)
    try:
        record = find(NodeClient.from_flags(args), args.request_id)
    except NoAnswer as error:
        print(f"trace: {error}", file=sys.stderr)
        return 1
    args.output.write_text(json.dumps(chrome_trace(record)))
    print(f"{args.output}: open it in https://ui.perfetto.dev")
    return 0
