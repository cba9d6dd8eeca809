"""One line of the result: the measurement, its limit, and whether it is good enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.bench.common.results import columns


@dataclass(frozen=True, slots=True)
class Check:
    """A measured number and its limit.

    A rate should approach its limit from below, a time from above. A line with a goal passes or is short; it has failed
    if there is nothing to compare with. A line without a goal is for information. A line without a measured number
    failed or was skipped; its note says why."""

    section: str
    what: str
    unit: str
    measured: float | None
    limit: float | None = None  # the ceiling of a rate, the floor of a time, the peer's value
    goal: float | None = None  # the minimum share
    lower_is_better: bool = False
    note: str = ""
    skipped: bool = False  # a tool or peer is missing

    @property
    def share(self) -> float | None:
        """Share of the limit; 1 = reached."""
        if self.measured is None or self.limit is None:
            return None
        above, below = (self.limit, self.measured) if self.lower_is_better else (self.measured, self.limit)
        return above / below if below else None

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "skipped" if self.skipped else "FAILED"
        if self.goal is None:
            return ""
        if self.share is None:
            return "FAILED"
        return "pass" if self.share >= self.goal else "SHORT"


def failed(section: str, what: str, why: str) -> Check:
    """A line for a measurement that failed."""
    return Check(section, what, "", None, note=why)


def skipped(section: str, what: str, why: str) -> Check:
    """A line for something that this machine lacks."""
    return Check(section, what, "", None, note=why, skipped=True)


def exit_code(checks: Sequence[Check]) -> int:
    """0 = all goals were reached; 1 = a line failed or is short."""
    return int(any(check.verdict in ("FAILED", "SHORT") for check in checks) or not checks)


def table(checks: Sequence[Check]) -> str:
    """The lines in aligned columns, then their notes."""
    head = ["section", "what", "measured", "limit", "unit", "share", "goal", ""]
    lines = [head, *(cells(check) for check in checks)]
    notes = [f"{check.section}, {check.what}: {check.note}" for check in checks if check.note]
    return "\n".join([columns(lines, (0, 1, 4)), *notes])


def cells(check: Check) -> list[str]:
    goal = "" if check.goal is None else f"{check.goal:.0%}"
    share = "" if check.share is None else f"{check.share:.1%}"
    numbers = [number(check.measured), number(check.limit)]
    return [check.section, check.what, *numbers, check.unit, share, goal, check.verdict]


def number(value: float | None) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and value < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
