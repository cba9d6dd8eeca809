"""The history of a cluster: the intervals of its nodes (engine/observe/history.py) added up. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.observe.history import middle_of
from engine.observe.moved import top
from engine.observe.recent import PERCENTILES

Json = dict[str, Any]

SUMS = (
    *("answered", "refused", "resumed", "prompt_tokens", "found_tokens", "output_tokens"),
    *("running", "waiting"),
)
MAX_RAILS = 24
SAME_S = 15.0
"""Every node marks the loss of a member when it learns of it: marks of one kind about one node within this time are
one."""


def merged(answers: Sequence[Mapping[str, Any]]) -> Json:
    """The answers of History.since of several nodes as one. An interval has SUMS, `rails` (bytes), `tiers` ({tier:
    [used, capacity]}, bytes), and `ttft` and `tbt`: {"count", "p50", "p90", "p99"} in ms, absent without times."""
    by_number: dict[int, list[Mapping[str, Any]]] = {}
    for answer in answers:
        for interval in answer["intervals"]:
            by_number.setdefault(interval["number"], []).append(interval)
    intervals = [_added(at, by_number[at]) for at in sorted(by_number)]
    return {"intervals": intervals, "marks": _distinct(mark for answer in answers for mark in answer["marks"])}


def _added(at: int, parts: Sequence[Mapping[str, Any]]) -> Json:
    rails: dict[str, int] = {}
    tiers: dict[str, list[int]] = {}
    for part in parts:
        for name, nbytes in part.get("rails", {}).items():
            rails[name] = rails.get(name, 0) + nbytes
        for name, sizes in part.get("tiers", {}).items():
            known = tiers.setdefault(name, [0, 0])
            tiers[name] = [known[0] + sizes[0], known[1] + sizes[1]]
    sums = {name: sum(part.get(name, 0) for part in parts) for name in SUMS}
    times = {name: _percentiles([part[name] for part in parts if name in part]) for name in ("ttft", "tbt")}
    known_times = {name: found for name, found in times.items() if found}
    return {"number": at, **sums, "rails": top(rails, MAX_RAILS), "tiers": tiers, **known_times}


def _percentiles(counts: Sequence[Mapping[str, int]]) -> Json | None:
    """By the nearest rank, as engine.observe.recent.percentiles."""
    bins: dict[int, int] = {}
    for one in counts:
        for name, count in one.items():
            bins[int(name)] = bins.get(int(name), 0) + count
    whole = sum(bins.values())
    if not whole:
        return None
    found: Json = {"count": whole}
    for share in PERCENTILES:
        left = min(whole - 1, whole * share // 100)
        for at in sorted(bins):
            left -= bins[at]
            if left < 0:
                found[f"p{share}"] = middle_of(at)
                break
    return found


def _distinct(marks: Iterable[Json]) -> list[Json]:
    """Oldest first; of several nodes' marks about one event the first."""
    kept: list[Json] = []
    last: dict[tuple[str, str, str], float] = {}
    for mark in sorted(marks, key=lambda mark: float(mark["unix_s"])):
        what = mark["kind"], mark["node_id"], mark["text"]
        if what not in last or mark["unix_s"] - last[what] > SAME_S:
            kept.append(mark)
            last[what] = mark["unix_s"]
    return kept
