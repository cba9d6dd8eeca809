"""Reports of a transfer engine on its peers: rows for metrics and /debug/state, and rates for the scheduler. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from net.transfer.common.path import LOCAL, Path, Reached

RailRows = Sequence[dict[str, Any]]
"""net.transfer.common.rails.Rail.row of every rail to a peer."""


def peer_row(peer_id: str, peer: Reached, path: Path | None, rails: RailRows) -> dict[str, Any]:
    """See TransferEngine.snapshot."""
    how = {
        "peer": peer_id,
        "transport": path.transport if path else None,
        "reason": path.reason if path else None,
        "refused": path.refused if path else {},
        "why": path.why() if path else None,
    }
    return how | peer.traffic.row() | {"retries": sum(rail["resent"] for rail in rails), "rails": rails}


def rates(peer: Reached, path: Path | None, rails: RailRows, most: float | None) -> dict[str, float]:
    """See TransferEngine.bandwidth. most: limit in bytes/s of all rails together; None: no limit."""
    if path is None or path is LOCAL:
        return {}
    lanes: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in rails:
        if row["up"] and row["gb_per_s"]:
            lanes[row.get("lane", "")][row["rail"]] = 1e9 * row["gb_per_s"]
    found = max(lanes.values(), key=lambda lane: sum(lane.values()), default={})  # one transfer has one lane
    if not rails and peer.traffic.bytes_per_s:
        found = {path.transport: peer.traffic.bytes_per_s}
    total = sum(found.values())
    if most is None or total <= most:
        return found
    return {rail: rate * most / total for rail, rate in found.items()}
