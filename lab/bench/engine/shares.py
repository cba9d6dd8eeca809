"""Use of the machine by our server: bytes per token against the floor, and shares of the measured rates, by case.

    bytes per token     at most those that the memory delivers in the measured time of a token; the floor has the least
    share of memory     the least bytes / the measured time, by the measured rate of reading
    share of products   the least operations / the measured time, by the measured peak (floors.Ceilings.peak)

A decode step is bound by memory, a prompt by products, so one of the two shares is small in every case. Percentiles of
the open loop have no share: a request waits there for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.bench.common.results import Row, columns
from lab.bench.engine.cases import Case
from lab.bench.engine.floors import Ceilings, Work, need_of
from lab.bench.engine.verdict import Line


@dataclass(frozen=True, slots=True)
class Use:
    """Of one case and metric."""

    bytes_per_token: float
    floor_bytes_per_token: float
    of_memory: float
    of_products: float


Uses = Mapping[tuple[str, str], Use]
"""(case, metric) -> what ours used."""


def uses(listed: Sequence[Case], found: Sequence[Line], work: Work, ceilings: Ceilings) -> Uses:
    """Of every line that has a value of ours and no percentile."""
    cases = {case.name: case for case in listed if case.section != "open-loop"}
    made = {}
    for line in found:
        if line.case in cases and line.ours is not None:
            need, seconds = need_of(cases[line.case], line.metric, work), line.ours / 1000
            made[line.case, line.metric] = Use(
                ceilings.memory_bytes_per_s * seconds / need.tokens,
                need.read_bytes / need.tokens,
                need.read_bytes / seconds / ceilings.memory_bytes_per_s,
                need.operations / seconds / ceilings.peak(work),
            )
    return made


def share_table(found: Uses, threads: int) -> str:
    """One line per case and metric of ours."""
    rows = [["ours", "metric", "MB per token, at most", "floor", "of memory", "of products", "threads"]]
    for (case, metric), use in found.items():
        numbers = f"{use.bytes_per_token / 1e6:.2f}", f"{use.floor_bytes_per_token / 1e6:.2f}"
        rows.append([case, metric, *numbers, f"{use.of_memory:.0%}", f"{use.of_products:.0%}", str(threads)])
    return columns(rows, range(2))


def share_rows(found: Uses, threads: int) -> list[Row]:
    """Rows for the result file, under cases of their own. `threads`: those that ours computes with."""
    rows = []
    for (case, metric), use in found.items():
        name, floor = f"ours, {case}: {metric}", {"floor": use.floor_bytes_per_token / 1e6}
        rows += [
            Row(name, "bytes per token", "MB", use.bytes_per_token / 1e6, limits=floor),
            Row(name, "share of memory", "", use.of_memory),
            Row(name, "share of products", "", use.of_products),
            Row(name, "threads", "", float(threads)),
        ]
    return rows
