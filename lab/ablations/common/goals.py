"""Goals held against a measured value and its interval: met or missed by the whole interval, otherwise open.

With one seed there is no interval, and the mean decides; the report says that it is of one seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from lab.ablations.common.ablation import Estimated, Goal
from lab.ablations.common.evidence import told, weighted


def at_most(text: str, wanted: str, found: Estimated, limit: float, form: str = ".3g", unit: str = "") -> Goal:
    """The value should be at most `limit`."""
    half = 0.0 if math.isnan(found.half) else found.half
    met = True if found.mean + half <= limit else None if found.mean - half <= limit else False
    return Goal(text, wanted, told(found, form, unit), met)


def at_least(text: str, wanted: str, found: Estimated, limit: float, form: str = ".3g", unit: str = "") -> Goal:
    """The value should be at least `limit`."""
    turned = at_most(text, wanted, weighted((-1.0, found)), -limit)
    return Goal(text, wanted, told(found, form, unit), turned.met)


def percent(found: Estimated) -> Estimated:
    """A quotient as the change in percent."""
    hundred = Estimated(100.0, 0.0, (100.0,) * len(found.samples))
    return weighted((100.0, found), (-1.0, hundred))


def largest(found: Iterable[Estimated]) -> Estimated:
    """The one with the largest mean. Values that are missing (NaN) come last."""
    return max(found, key=lambda one: -math.inf if math.isnan(one.mean) else one.mean)
