"""Percentiles by rank: one definition for every benchmark that times calls. Only the standard library."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed. Raises ValueError without values."""
    if not values:
        raise ValueError("there is no percentile of no values")
    exact = share * len(values)
    return sorted(values)[max(0, math.ceil(exact - 1e-9 * len(values)) - 1)]
