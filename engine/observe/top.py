"""`python mooncake.py top [--url http://HOST:PORT]`: the current state of the cluster, in a terminal.

The data is that of the live page: GET /live of any node (engine/observe/live.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engine.observe.node_client import NoAnswer, NodeClient, add_flags
from engine.observe.recent import SOURCES, percentiles

Json = dict[str, Any]
PIPED_COLUMNS = 160
NAMES = {"hbm": "arena", "arena": "other arenas", "dram": "DRAM", "ssd": "SSD", "computed": "computed"}


def main(argv: Sequence[str]) -> int:
    """Exit code 2 if the node does not answer the first question; later ones are repeated until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="mooncake top", description="Shows the cluster's current state.")
    add_flags(parser, "any node of the cluster")
    each = "time between two questions (default: 1000)"
    parser.add_argument("--interval-ms", metavar="MS", type=positive, default=1000, help=each)
    newest = "newest requests to show (default: 10)"
    parser.add_argument("--requests", metavar="N", type=positive, default=10, help=newest)
    parser.add_argument("--once", action="store_true", help="print the tables once and end")
    parser.add_argument("--json", action="store_true", help="print GET /live once, as JSON, and end")
    args = parser.parse_args(argv)
    try:
        node = NodeClient.from_flags(args)
        live = node.get("/live")
    except NoAnswer as error:
        print(f"mooncake top: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(live, indent=1))
    elif args.once:
        # A pipe has no width: rich would assume 80 columns and cut names.
        Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS).print(picture(live, args.requests))
    else:
        follow(node, live, args.requests, args.interval_ms / 1000)
    return 0


def positive(text: str) -> int:
    """The value of a flag."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def follow(node: NodeClient, live: Json, requests: int, interval_s: float) -> None:
    """Update the picture until Ctrl-C. If the node does not answer, show the error above the last picture."""
    try:
        with Live(picture(live, requests), screen=True, auto_refresh=False) as screen:
            while True:
                time.sleep(interval_s)
                try:
                    live = node.get("/live")
                    screen.update(picture(live, requests), refresh=True)
                except NoAnswer as error:
                    screen.update(Group(Text(str(error), "bold red"), picture(live, requests)), refresh=True)
    except KeyboardInterrupt:
        return


# --- the picture


def picture(live: Json, requests: int) -> Group:
    """The answer of /live in rich's form."""
    speaking = [node for node in live["nodes"] if "error" not in node]
    parts: list[Any] = [Text(summary(live, speaking), "bold"), nodes_table(live["nodes"])]
    if tenants := by_tenant(speaking):
        parts.append(tenants_table(tenants))
    if paths := [(node["node_id"], path) for node in speaking for path in node["paths"]]:
        parts.append(paths_table(paths))
    rows = [row | {"acceptor": node["node_id"]} for node in speaking for row in node["recent"]["requests"]]
    if rows:
        rows.sort(key=lambda row: float(row["ended"]), reverse=True)
        parts += [Text(figures(rows)), requests_table(rows[:requests])]
    return Group(*parts)


def summary(live: Json, speaking: Sequence[Json]) -> str:
    loads = [node["load"] for node in speaking if node["load"] is not None]
    running, waiting = sum(load["running"] for load in loads), sum(load["waiting"] for load in loads)
    nodes = count(len(live["nodes"]), "node")
    return f"{nodes}, {count(running, 'request')} running, {waiting} waiting; seen from {live['node_id']}"


def figures(rows: Sequence[Json]) -> str:
    """Percentiles over all nodes, and the sources of the prompts' KV."""
    parts = []
    for name, field in (("TTFT", "ttft_ms"), ("TBT", "tpot_ms")):
        if known := percentiles(row[field] for row in rows):
            parts.append(f"{name} " + ", ".join(f"{share} {ms(value)}" for share, value in known.items()))
    tokens = {source: sum(row["tokens_from"][source] for row in rows) for source in SOURCES}
    if whole := sum(tokens.values()):
        sources = ", ".join(f"{NAMES[source]} {100 * count / whole:.0f} %" for source, count in tokens.items())
        parts.append(f"prompt tokens from: {sources}")
    return f"last {count(len(rows), 'request')}: " + "; ".join(parts)


def nodes_table(nodes: Iterable[Json]) -> Table:
    rows = list(nodes)
    priced = any(node.get("cost", 1.0) != 1.0 for node in rows)
    columns = ("node", "roles", "status", "#running", "#waiting", "#work", "#KV arena", "#DRAM", "#SSD")
    table = _table(*columns, *(("#cost/h",) if priced else ()), "notes")
    for node in rows:
        cost = (f"{node.get('cost', 1.0):g}",) if priced else ()
        fine = node["status"] == "alive" and "error" not in node
        status = Text(node["status"], "green" if fine else "red")
        name, roles = node["node_id"], "+".join(node["roles"])
        if "error" in node:
            table.add_row(name, roles, status, *[""] * 6, *cost, Text(str(node["error"]), "red"))
            continue
        load, blocks, size, slot = node["load"], node["blocks"], node["block_bytes"], node["slot_bytes"]
        busy = ("", "", "") if load is None else (load["running"], load["waiting"], ms(1000 * load["work_s"]))
        arena = "" if blocks is None else fill(blocks["held"] * size, blocks["total"] * size)
        tiers = node["tiers"] or {}
        shares = [
            fill(tiers[tier]["blocks"] * slot, tiers[tier]["capacity"] * slot) if tier in tiers else ""
            for tier in ("dram", "ssd")
        ]
        weights = f"weights {node['weights']}" if node.get("weights") else ""
        table.add_row(name, roles, status, *map(str, busy), arena, *shares, *cost, node["loading"] or weights)
    return table


def by_tenant(nodes: Iterable[Json]) -> dict[str, Json]:
    """The figures of --tenants over all shares; a quota is that of the nodes that have one."""
    found: dict[str, Json] = {}
    for node in nodes:
        for name, row in node["tenants"].items():
            known = found.setdefault(name, {"bytes": 0, "quota": None, "refused": 0, "nodes": 0})
            known["bytes"] += row["bytes"]
            known["refused"] += row["refused"]
            known["nodes"] += 1
            if row["quota"] is not None:
                known["quota"] = row["quota"] + (known["quota"] or 0)
    return found


def tenants_table(tenants: dict[str, Json]) -> Table:
    table = _table("tenant", "#used", "#quota", "#refused", "#nodes")
    for name, row in tenants.items():
        quota = "" if row["quota"] is None else fill(row["bytes"], row["quota"])
        table.add_row(name, nbytes(row["bytes"]), quota, str(row["refused"]), str(row["nodes"]))
    return table


def paths_table(paths: Iterable[tuple[str, Json]]) -> Table:
    table = _table(
        "from", "to", "transport", "#GB/s", "#read", "#written", "#p50", "#p99", "#retries", "#failures", "why"
    )
    for name, path in paths:
        rate = f"{path['gb_per_s']:.2f}" if path["gb_per_s"] else ""
        moved = (nbytes(path["bytes_read"]), nbytes(path["bytes_written"]))
        times = (ms(path["p50_ms"]), ms(path["p99_ms"]))
        faults = (str(path["retries"]), str(path["failures"]))
        table.add_row(name, path["peer"], path["transport"] or "", rate, *moved, *times, *faults, path["why"] or "")
    return table


def requests_table(rows: Iterable[Json]) -> Table:
    table = _table("request", "prefill", "decode", "class", "#prompt", "#found", "#output", "#TTFT", "#TBT", "end")
    for row in rows:
        found = row["prompt_tokens"] - row["tokens_from"]["computed"]
        share = f"{100 * found / row['prompt_tokens']:.0f} %" if row["prompt_tokens"] else ""
        where = (row["nodes"].get("prefill", ""), row["nodes"].get("decode", ""), row["class"])
        times = (ms(row["ttft_ms"]), ms(row["tpot_ms"]), row["reason"])
        table.add_row(row["id"], *where, str(row["prompt_tokens"]), share, str(row["output_tokens"]), *times)
    return table


def _table(*columns: str) -> Table:
    """A '#' before a column's name aligns it to the right. Names that do not fit continue in the next line."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        right = column.startswith("#")
        table.add_column(column.removeprefix("#"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def ms(value: float | None) -> str:
    """A time given in milliseconds, as text with a suitable unit."""
    if value is None:
        return ""
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def nbytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def fill(used: float, capacity: float) -> str:
    return f"{nbytes(capacity)} {100 * used / capacity:3.0f} %" if capacity else ""
