"""`python mooncake.py explain [REQUEST-ID] --url http://HOST:PORT`: explains a request's placement, as a table.

It asks the node at --url; that node asks the other nodes of its cluster. The acceptor of the request has the record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import count, takewhile
from typing import Any
from urllib.parse import quote

from engine.observe.estimate_errors import WINDOW_S, merged
from engine.observe.node_client import NoAnswer, NodeClient, add_flags

PREFILL_COLUMNS = (
    *("wait_s", "transfer_s", "prefill_s", "ttft_s", "toll_s"),
    *("local_tokens", "pool_tokens", "ssd_tokens", "prefix_source"),
)
DECODE_COLUMNS = ("wait_s", "handover_s", "step_s", "token_s", "decode_s", "toll_s", "running", "headroom_blocks")
COST_COLUMNS = ("node_cost", "cost")
"""Per hour, and of this request, with --placement mooncake-cost."""
PROBE_COLUMNS = ("wait_s", "gossiped_wait_s", "gossip_age_s", "local_tokens", "round_trip_s", "one_sided")


def main(argv: Sequence[str]) -> int:
    """Exit code 1 if no node knows the request, 2 if no node answers."""
    parser = argparse.ArgumentParser(
        prog="mooncake explain", description="Explains a request's placement and its measured times."
    )
    known = "the id in the API's answer (default: the last request of the cluster that ended or was refused)"
    parser.add_argument("request_id", metavar="REQUEST-ID", nargs="?", help=known)
    add_flags(parser, "any node of the cluster")
    parser.add_argument(
        "--json", action="store_true", help="print the record as JSON, those of several choices as a list"
    )
    args = parser.parse_args(argv)
    try:
        node = NodeClient.from_flags(args)
        speaking = [one for one in node.get("/live")["nodes"] if "error" not in one]
        request_id = args.request_id or newest(speaking)
        if request_id is None:
            print("mooncake explain: no request has ended or was refused yet", file=sys.stderr)
            return 1
        records = of_all_choices(node, request_id)
    except NoAnswer as error:
        print(f"mooncake explain: {error}", file=sys.stderr)
        return 2
    if not records:
        print(f"mooncake explain: no node knows {request_id} (any more)", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(records[0] if len(records) == 1 else records, indent=1))
    else:
        lines = recent_errors(speaking)
        print("\n\n".join([*map(table, records), *(["\n".join(lines)] if lines else [])]))
    return 0


def newest(nodes: Sequence[dict[str, Any]]) -> str | None:
    """The last request that ended or was refused, of those that the nodes of /live still know."""
    recent = [one["recent"] for one in nodes]
    rows = [row for one in recent for row in (*one["requests"], one["refused"]) if row is not None]
    return max(rows, key=lambda row: float(row["ended"]))["id"] if rows else None


def find(node: NodeClient, request_id: str) -> dict[str, Any] | None:
    """The record of a request from the node that has it; the asked node asks the others. None if no node knows it (any
    more). Raises NoAnswer."""
    try:
        return node.get(f"/live/requests/{quote(request_id, safe='')}")
    except NoAnswer as error:
        if error.status == 404:
            return None
        raise


def of_all_choices(node: NodeClient, request_id: str) -> list[dict[str, Any]]:
    """The record of a request; one for each choice of a request with several (n > 1, or several prompts), which are
    requests of their own to the nodes: ID-0, ID-1 and so on. Empty if no node knows it. Raises NoAnswer."""
    if (record := find(node, request_id)) is not None:
        return [record]
    asked = (find(node, f"{request_id}-{choice}") for choice in count())
    return [record for record in takewhile(lambda one: one is not None, asked) if record is not None]


def table(record: dict[str, Any]) -> str:
    """Every decision of the request with its candidates, then estimates with the measured times."""
    summary = record["summary"]
    lines = [
        f"request {record['request_id']}: {summary['prompt_tokens']} prompt tokens, {summary['cached_tokens']} of them "
        f"cached, {summary['output_tokens']} output tokens, accepted by {summary['nodes'].get('acceptor', '?')}"
    ]
    if (refused := record["refused"]) is not None:
        lines += _refused(refused)
    lines += _moves(record["events"])
    for number, decision in enumerate(record["decisions"]):
        if len(record["decisions"]) > 1:
            lines += ["", f"decision {number + 1} of {len(record['decisions'])}"]
        lines += _decision(decision)
    lines += [_load(event["detail"]) for event in record["events"] if event["event"] == "prefix_fetched"]
    lines += [_dropped(event) for event in record["events"] if event["event"] == "experts_dropped"]
    lines += stages([event for event in record["events"] if event["event"] == "stage"])
    if record["truth"]:
        rows = [
            (name, t["estimated_s"], t["measured_s"], t["error_s"], _share(t["error"]))
            for name, t in record["truth"].items()
        ]
        lines += ["", *_columns(("", "estimated", "measured", "difference", "error"), rows)]
    return "\n".join(lines)


def _moves(events: Sequence[dict[str, Any]]) -> list[str]:
    """One line per move to another decode node."""
    return [
        f"moved from {event['node']} to {move['to']} ({move['reason']}): paused {1000 * move['pause_s']:.1f} ms, "
        f"{move['bytes']} bytes, {move['stages']} copies while it decoded"
        for event in events
        if event["event"] == "moved"
        for move in (event["detail"],)
    ]


def _dropped(event: dict[str, Any]) -> str:
    detail = event["detail"]
    ranks = ", ".join(map(str, detail["ranks"]))
    return f"{event['node']} did without {detail['pairs']} results of experts: rank {ranks} of its ranks was masked"


def recent_errors(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """The errors of all estimates of the last minutes, by the reports of the nodes in /live."""
    errors = merged(one["recent"].get("estimates", {}) for one in nodes)  # nodes of an older version report none
    rows = [(name, one["requests"], one["error_s"], _share(one["mape"])) for name, one in errors.items()]
    title = f"estimates of the last {WINDOW_S / 60:g} minutes"
    return _columns((title, "requests", "mean difference", "MAPE"), rows) if rows else []


def _refused(refused: dict[str, Any]) -> list[str]:
    """The client's error message, and the missed objective if there is one."""
    lines = [f"refused{_by(refused)}: {refused['reason']}; retry after {refused['retry_after_s']:g} s"]
    if "objective" in refused:
        missed, limit_s = refused["objective"], refused["limit_s"]
        lines.append(
            f"missed {missed} of {refused['service_class']}: {limit_s:g} s, estimated {refused['estimated_s']:.3g} s"
        )
    return lines


def _by(refused: dict[str, Any]) -> str:
    return f" by {refused['node']}" if "node" in refused else ""


def _load(load: dict[str, Any]) -> str:
    """A fetched prefix: its tiers and nodes, the measured time, and the time that the fetching node expected."""
    tiers = ", ".join(f"{blocks} {tier}" for tier, blocks in load["tiers"].items())
    what = f"loaded {load['blocks']} blocks ({tiers}) from {', '.join(load['sources'])}"
    return f"{what} in {1000 * load['seconds']:.2f} ms, expected {1000 * load['estimated_s']:.2f} ms"


def stages(events: Sequence[dict[str, Any]]) -> list[str]:
    """What each node of the prompt's groups did (docs/long-prompts.md)."""
    rows = [
        (
            f"  {stage['index']} on {event['node']}",
            _part(stage),
            *(stage[name] for name in ("prefix_tokens", "chunks")),
            stage.get("pauses"),  # a node of an earlier release tells none
            stage["compute_s"],
            stage.get("waited_s"),
            *(stage[name] for name in ("seconds", "sent_bytes")),
        )
        for event in events
        for stage in [event["detail"]]
    ]
    head = (
        "part",
        "of the prompt",
        "prefix_tokens",
        "chunks",
        "pauses",
        "compute_s",
        "waited_s",
        "seconds",
        "sent_bytes",
    )
    return ["", *_columns(head, sorted(rows, key=lambda row: row[0]))] if rows else []


def _part(stage: dict[str, Any]) -> str:
    if "layers" in stage:
        return f"layers {stage['layers'][0]} to {stage['layers'][1] - 1}"
    return f"{stage['tokens']} tokens"


def _group(group: dict[str, Any]) -> str:
    if group["layers"]:
        each = zip(group["nodes"], group["layers"], strict=True)
        parts = ", ".join(f"{node} (layers {begin} to {end - 1})" for node, (begin, end) in each)
    else:
        parts = f"{', '.join(group['nodes'])}, each with some of the tokens"
    return f"computed by a group of {len(group['nodes'])}: {parts}; expected {group['prefill_s']:.3g} s of prefill"


def _beyond(decision: dict[str, Any]) -> str:
    estimates = decision["estimates"]
    return (
        f"no arena holds its KV: {decision['decode']} keeps {estimates['cold_bytes'] / 1e6:.3g} MB of the prompt "
        f"beyond its own and reads them for each token; expected {estimates['ttft_s']:.3g} s to the first token, "
        f"{1e3 * estimates['step_s']:.3g} ms for each one after it"
    )


def _decision(decision: dict[str, Any]) -> list[str]:
    lines = [""]
    if (group := decision.get("group")) is not None:  # nodes of an older version report none
        lines += [_group(group), ""]
    if decision.get("beyond_memory"):
        lines += [_beyond(decision), ""]
    priced = COST_COLUMNS if any("cost" in row for row in decision["considered"]) else ()
    for stage, known in (("prefill", PREFILL_COLUMNS), ("decode", DECODE_COLUMNS)):
        columns = (*known, *priced)
        rows = [
            (
                ("* " if row["node"] == decision[stage] else "  ") + row["node"],
                *(row.get(c, "") for c in columns),  # nodes of an older version tell no tolls
                row["skipped"],
            )
            for row in decision["considered"]
            if row["stage"] == stage
        ]
        lines += [*_columns((f"{stage} on (* chosen)", *columns, ""), rows), ""]
    probes = [("  " + p["node"], *(p[c] for c in PROBE_COLUMNS)) for p in decision["probes"]]
    if probes:
        lines += _columns((f"asked {decision['asked']}", *PROBE_COLUMNS), probes)
    lines += [
        f"{one['node']} was computing {one['blocks']} blocks of it, ready in {one['ready_s']:.3g} s"
        for one in decision["computing"]
    ]
    claim = decision["claim"]
    how = "no claim" if claim is None else f"claimed {claim['amount'] / 1e6:.3f} s" + " one-sided" * claim["one_sided"]
    took = f"decided in {1000 * decision['decision_s']:.2f} ms"
    return [*lines, f"{took}, {how}, given up for a runner-up {decision['runners_up']} times"]


def _columns(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Aligned lines: the first column is left-aligned, the others are right-aligned."""
    cells = [list(head)] + [[_text(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    aligned = (
        [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in cells
    )
    return ["  ".join(row).rstrip() for row in aligned]


def _share(error: float | None) -> str | None:
    return None if error is None else f"{100 * error:.0f} %"


def _text(value: Any) -> str:
    """A cell; floats have three significant digits."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
