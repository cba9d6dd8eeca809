"""Which differences between cases a table shows: those that 95 % intervals over the seeds separate.

Cases of an ablation get the same requests under the same seed, so a difference is taken seed by seed and has its own
interval; without the values of the seeds the intervals of two means are added up. With one seed there is no interval,
and no difference is shown. Every sentence of a report about a difference asks one of these functions: with intervals
too wide for any difference it says the same, whatever the means are (tests/lab/ablations/test_readings.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lab.ablations.common.ablation import Estimated, estimated

Values = Mapping[str, Mapping[str, Estimated]]

BUSY = "prefill utilisation"
SATURATED = 0.95
"""Busy share of the prefill nodes from which a queue has no steady length: its mean depends on the length of the
run."""

UNSHOWN = "no difference shown"


# --- differences and quotients


def weighted(*terms: tuple[float, Estimated]) -> Estimated:
    """The sum of weight times value, seed by seed if all values have the same seeds."""
    if _paired([found for _, found in terms]):
        rows = zip(*(found.samples for _, found in terms), strict=True)
        weights = [weight for weight, _ in terms]
        return estimated([sum(w * value for w, value in zip(weights, row, strict=True)) for row in rows])
    mean = sum(weight * found.mean for weight, found in terms)
    return Estimated(mean, math.hypot(*(weight * found.half for weight, found in terms)))


def quotient(over: Estimated, under: Estimated) -> Estimated:
    """NaN if there is a zero below."""
    if _paired([over, under]):
        pairs = list(zip(over.samples, under.samples, strict=True))
        return estimated([a / b for a, b in pairs]) if all(b for _, b in pairs) else Estimated(math.nan, math.nan)
    if not under.mean or not over.mean:
        return Estimated(over.mean / under.mean if under.mean else math.nan, math.nan)
    mean = over.mean / under.mean
    return Estimated(mean, abs(mean) * math.hypot(over.half / over.mean, under.half / under.mean))


def _paired(all_: Sequence[Estimated]) -> bool:
    counts = {len(found.samples) for found in all_}
    return len(counts) == 1 and counts.pop() > 1


def shown(found: Estimated) -> int:
    """1 if the whole interval is above zero, -1 if it is below, else 0."""
    if math.isnan(found.half) or math.isnan(found.mean) or abs(found.mean) <= found.half:
        return 0
    return 1 if found.mean > 0 else -1


def above(found: Estimated, least: float) -> bool:
    """Whether the whole interval is above `least`."""
    return not math.isnan(found.half) and found.mean - found.half > least


def change(values: Values, metric: str, case: str, baseline: str) -> Estimated:
    """The case minus the baseline."""
    return weighted((1.0, values[case][metric]), (-1.0, values[baseline][metric]))


def sign(values: Values, metric: str, case: str, baseline: str) -> int:
    """1 if the case is above the baseline, -1 if it is below, 0 if the intervals do not tell."""
    return 0 if case == baseline else shown(change(values, metric, case, baseline))


def times(values: Values, metric: str, case: str, baseline: str) -> Estimated:
    """The case over the baseline."""
    return quotient(values[case][metric], values[baseline][metric])


# --- words


def told(found: Estimated, form: str = ".3g", unit: str = "") -> str:
    """A value with half of its interval; it claims no difference."""
    if math.isnan(found.mean):
        return "no value"
    half = "" if math.isnan(found.half) else f" ±{found.half:{form}}"
    return f"{found.mean:{form}}{half}{unit}"


def relative(values: Values, metric: str, case: str, baseline: str) -> str:
    """The change in percent of the baseline; "no difference shown" where the intervals do not separate them."""
    theirs = values[baseline][metric].mean
    if not sign(values, metric, case, baseline) or not theirs:
        return UNSHOWN
    found = change(values, metric, case, baseline)
    return f"{found.mean / theirs:+.0%} (±{found.half / abs(theirs):.0%})"


def points(values: Values, metric: str, case: str, baseline: str) -> str:
    """The change of a share in points of a hundred; "no difference shown" where the intervals do not separate them."""
    if not sign(values, metric, case, baseline):
        return UNSHOWN
    found = change(values, metric, case, baseline)
    return f"{100 * found.mean:+.1f} points (±{100 * found.half:.1f})"


def leaders(values: Values, metric: str, cases: Sequence[str], most: bool = True) -> list[str]:
    """The cases that no other one is shown to surpass, in the given order. `most`: the greatest value is the best."""
    better = 1 if most else -1
    return [case for case in cases if all(sign(values, metric, other, case) != better for other in cases)]


def best_of(values: Values, metric: str, cases: Mapping[str, str], most: bool = True) -> str:
    """The name of the best case, or of those that are not shown to differ. cases: label -> name."""
    found = leaders(values, metric, list(cases), most)
    if len(found) == len(cases) > 1:
        return "no one is shown to be best"
    names = [cases[label] for label in found]
    return f"{names[0]} is best" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are best, {UNSHOWN}"


def compared(values: Values, metric: str, case: str, others: Mapping[str, str]) -> str:
    """Which of the others the case is above and below. others: label -> name."""
    words = {1: "above", -1: "below", 0: "not shown to differ from"}
    by_sign: dict[int, list[str]] = {side: [] for side in words}
    for label, name in others.items():
        by_sign[sign(values, metric, case, label)].append(name)
    return " and ".join(
        f"{words[side]} {'all others' if len(names) == len(others) > 1 else ', '.join(names)}"
        for side, names in by_sign.items()
        if names
    )


def in_order(values: Values, metric: str, cases: Sequence[str]) -> str:
    """Whether each case is above the next one: "shown", "not shown", or "contradicted"."""
    signs = [sign(values, metric, case, after) for case, after in pairwise(cases)]
    return "contradicted" if -1 in signs else "shown" if all(signs) else "not shown"


def near_from(values: Values, metric: str, cases: Sequence[str], factor: float) -> str:
    """The first case from which on every one is shown to be within `factor` times the last one: at least that for a
    factor below 1, at most for one above."""
    side, last, enough = 1 if factor < 1 else -1, values[cases[-1]][metric], cases[-1]
    for case in reversed(cases[:-1]):
        if shown(weighted((1.0, values[case][metric]), (-factor, last))) != side:
            break
        enough = case
    return enough


def saturated(values: Values) -> str:
    """A sentence that names all saturated cases; else empty."""
    found = [f'"{case}"' for case, of in values.items() if BUSY in of and of[BUSY].mean >= SATURATED]
    if not found:
        return ""
    return (
        f" Saturated, with prefill nodes busy for at least {SATURATED:.0%} of the time, so that a mean grows with the "
        f"length of the run: {', '.join(found)}."
    )
