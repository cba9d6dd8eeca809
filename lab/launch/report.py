"""The launcher's output: the table of nodes and the timeline of a request. Data in, rich renderables out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.observe.top import nbytes

PHASES = (
    ("placement", "placement_ms"),
    ("queue", "queue_ms"),
    ("prefix fetch", "prefix_fetch_ms"),
    ("prefill", "prefill_ms"),
    ("transfer", "transfer_ms"),
    ("  hidden", "transfer_hidden_ms"),
    ("  not hidden", "transfer_exposed_ms"),
    ("first token", "ttft_ms"),
    ("decode", "decode_ms"),
    ("end to end", "e2e_ms"),
)
BAR_WIDTH = 32
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def nodes_table(nodes: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One row per node. Each has name, role, url, `pid` or `host`, and paths (as in GET /debug/state; None = the node
    does not tell us)."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    place = "host" if any("host" in node for node in nodes) else "pid"
    for column in ("node", "role", "URL", place, "transport in use"):
        table.add_column(column, no_wrap=column in ("node", "URL"))
    for node in nodes:
        paths = "told with an API key only" if node["paths"] is None else _transports(node["paths"])
        table.add_row(node["name"], node["role"], node["url"], str(node[place]), paths)
    return table


def _transports(paths: Sequence[Mapping[str, Any]]) -> str:
    """'shm to decode-0, store-0; tcp to store-1'; a path is opened by the first transfer over it."""
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(str(path["transport"]), []).append(str(path["peer"]))
    return "; ".join(f"{name} to {', '.join(sorted(peers))}" for name, peers in by_name.items()) or "none opened yet"


def timeline(record: Mapping[str, Any]) -> RenderableType:
    """The answer of GET /debug/requests/<id>: phases with bars, the nodes, the moved KV, the reasons of the placement,
    and each event."""
    summary = record["summary"]
    parts: list[RenderableType] = [
        Text(
            f"request {record['request_id']}: {summary['prompt_tokens']} prompt tokens "
            f"({summary['cached_tokens']} from cache), {summary['output_tokens']} output tokens"
        ),
        Text(f"nodes    {_pairs(summary['nodes'])}"),
        Text(f"moved    {_moved(summary['bytes_moved'])}"),
    ]
    if summary["placement"]:
        parts.append(Text(f"placed   {_placement(summary['placement'])}"))
        parts.append(Text(f"         why: python mooncake.py explain {record['request_id']} --url ..."))
    return Group(*parts, Text(), phases(summary), Text(), events(record["events"]))


def phases(summary: Mapping[str, Any]) -> Table:
    """Milliseconds of each phase as a bar of its length. Phases may overlap: a transfer runs in parallel with its
    prefill, and only its part after the prefill's end is not hidden."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column()
    longest = max((summary.get(key) or 0.0 for _, key in PHASES), default=0.0)
    for name, key in PHASES:
        value = summary.get(key)
        if value is None:
            table.add_row(name, "-", "")
        else:
            table.add_row(name, f"{value:,.1f}", _bar(value, longest))
    return table


def events(log: Sequence[Mapping[str, Any]]) -> Table:
    """Every event with milliseconds since the first, in order of time."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms", justify="right")
    for column in ("node", "event", "detail"):
        table.add_column(column)
    ordered = sorted(log, key=lambda event: float(event["t"]))
    for event in ordered:
        since = (event["t"] - ordered[0]["t"]) * 1000
        table.add_row(f"{since:,.1f}", event["node"], event["event"], Text(_pairs(_brief(event["detail"]))))
    return table


def _brief(detail: Mapping[str, Any]) -> dict[str, Any]:
    """The detail with the number of intervals in place of the intervals, which are for scripts/tools.py perfetto."""
    return {name: len(value) if name == "intervals" else value for name, value in detail.items()}


def _bar(value: float, longest: float) -> str:
    """A bar in eighths of a character, so that short phases do not look long."""
    full, rest = divmod(round(8 * BAR_WIDTH * value / longest), 8) if value > 0 else (0, 0)
    return "█" * full + EIGHTHS[rest]


def _moved(by_transport: Mapping[str, int]) -> str:
    shares = [f"{nbytes(count)} by {name}" for name, count in by_transport.items() if count]
    return ", ".join(shares) or "nothing: all on one node"


def _placement(told: Mapping[str, Any]) -> str:
    """'prefill on a, decode on b; first token expected after 12.3 ms; 2 nodes asked, decided in 1.2 ms'"""
    where = [f"{role} on {told[role]}" for role in ("prefill", "decode") if role in told]
    facts = [", ".join(where)]
    if (expected := told.get("estimates", {}).get("ttft_s")) is not None:
        facts.append(f"first token expected after {1000 * expected:.1f} ms")
    if "decision_s" in told:
        facts.append(f"{told['asked']} nodes asked, decided in {1000 * told['decision_s']:.1f} ms")
    return "; ".join(facts)


def _pairs(values: Mapping[str, Any]) -> str:
    """'prefill prefill-0, estimates (ttft_ms 130.5), considered [(node a), (node b)]'"""
    return ", ".join(f"{name} {_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_pairs(value)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
