"""Which differences between cases a table shows: those that the 95 % intervals over the seeds separate.

With one seed there is no interval, and no difference is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lab.ablations.common.ablation import Estimated

Values = Mapping[str, Mapping[str, Estimated]]

SATURATED = 0.95
"""Busy share of the prefill nodes from which a queue has no steady length: its mean depends on the length of the
run."""


def change(values: Values, metric: str, case: str, baseline: str) -> Estimated:
    """The case minus the baseline. The interval is that of two independent means; with common seeds it is too wide
    rather than too narrow."""
    ours, theirs = values[case][metric], values[baseline][metric]
    return Estimated(ours.mean - theirs.mean, math.hypot(ours.half, theirs.half))


def sign(values: Values, metric: str, case: str, baseline: str) -> int:
    """1 if the case is above the baseline, -1 if it is below, 0 if the intervals do not tell."""
    found = change(values, metric, case, baseline)
    if math.isnan(found.half) or math.isnan(found.mean) or abs(found.mean) <= found.half:
        return 0
    return 1 if found.mean > 0 else -1


def relative(values: Values, metric: str, case: str, baseline: str) -> str:
    """The change in percent of the baseline; "no change" where the intervals do not separate them."""
    theirs = values[baseline][metric].mean
    if not sign(values, metric, case, baseline) or not theirs:
        return "no change"
    found = change(values, metric, case, baseline)
    return f"{found.mean / theirs:+.0%} (±{found.half / abs(theirs):.0%})"


def above(found: Estimated, least: float) -> bool:
    """Whether the whole interval is above `least`."""
    return not math.isnan(found.half) and found.mean - found.half > least


def saturation(values: Values, case: str) -> str:
    """A sentence if the prefill nodes of the case have no time left; else empty. Needs the metric `prefill
    utilisation`."""
    busy = values[case]["prefill utilisation"].mean
    if not busy >= SATURATED:
        return ""
    return f' "{case}" is saturated ({busy:.0%} busy): its mean grows with the length of the run.'
