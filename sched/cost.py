"""Predicts the time of prefills, decode steps and transfers with small regressions, fitted online to measurements.

    prefill   t = a0 + a1 n + a2 n (n + 2 ctx)      n new tokens after ctx known ones; attention sees n (n + 2 ctx) / 2
    decode    t = d0 + d1 batch + d2 sum ctx        one step
    transfer  t = latency + bytes / bandwidth

n (n + 2 ctx) adds up over the chunks of a prompt, so a chunked prefill costs the same plus one a0 per chunk.

Coefficients are never negative. Errors are relative and symmetric (half and double are equally wrong), so short steps
count as much as long ones; single outliers count little. The prior gives the initial shape: the first observation only
scales it, later ones change it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

WINDOW = 128
"""Number of observations in the window. After half as many new ones, the fit follows a machine that has changed."""

PRIOR_WEIGHT = 0.3
"""Most weight of the scaled prior, in observations."""

LEAST_TRUST = 0.03
"""The least part of that weight. The part is the variance of the relative errors that the fit leaves, next to that of
OUTLIER: measurements that agree with each other outweigh the prior, and noisy ones do not."""

OUTLIER = 0.3
"""Relative error above which the pull of an observation is constant (Huber)."""

ROUNDS = 4
"""Rounds of reweighted least squares per fit; more rounds change the coefficients by less than the noise."""


class Regression:
    """t = sum c_i x_i with c >= 0, robust least squares of relative errors over a window."""

    def __init__(self, prior: Sequence[float], window: int = WINDOW) -> None:
        """`prior`: initial coefficients, all > 0; only their ratios matter after the first observation. `window`:
        number of observations to fit."""
        if not all(c > 0 for c in prior):
            raise ValueError(f"prior coefficients must be positive, got {list(prior)}")
        self.observations = 0
        self.error = 0.0  # moving average of |predicted - measured| / measured, before learning from it
        self.least = 0.0  # of the first coefficient, in its unit, whatever the fit says
        self._prior: Vector = np.asarray(prior, dtype=np.float64)
        self._coefficients = tuple(float(c) for c in prior)
        self._window = window
        self._features: Vector = np.zeros((window, len(prior)))
        self._seconds: Vector = np.zeros(window)
        self._unseen = 0  # observations since the last fit

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Add a measurement. Raises ValueError unless seconds > 0, all features are >= 0 and at least one is > 0."""
        _check(features, seconds)
        miss = abs(self.estimate(features) - seconds) / seconds
        self._add(features, seconds)
        self.error += (miss - self.error) / min(self.observations, 32)

    def calibrate(self, features: Sequence[float], seconds: float) -> None:
        """`observe`, but `error` stays as it is: it takes a fit after each of the first measurements."""
        _check(features, seconds)
        self._add(features, seconds)

    def _add(self, features: Sequence[float], seconds: float) -> None:
        row = self.observations % self._window
        self._features[row], self._seconds[row] = features, seconds
        self.observations += 1
        self._unseen += 1

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients, fitted again if an eighth of the window (at most 16 observations) is new."""
        if self._unseen > min(self.observations, self._window) // 8:
            self.refit()
        return self._bounded()

    def refit(self) -> tuple[float, ...]:
        """Fit to all observations in the window now, and return the coefficients."""
        if self._unseen:
            self._coefficients, self._unseen = tuple(float(c) for c in self._fit()), 0
        return self._bounded()

    def observed(self) -> list[tuple[tuple[float, ...], float]]:
        """The (features, seconds) in the window, the oldest first."""
        count = min(self.observations, self._window)
        rows = [row % self._window for row in range(self.observations - count, self.observations)]
        return [(tuple(self._features[row].tolist()), float(self._seconds[row])) for row in rows]

    def _bounded(self) -> tuple[float, ...]:
        found = self._coefficients
        return found if found[0] >= self.least else (self.least, *found[1:])

    def estimate(self, features: Sequence[float]) -> float:
        """Seconds."""
        seconds = 0.0
        for c, x in zip(self.coefficients, features, strict=True):  # sum() over a generator takes twice as long
            seconds += c * x
        return seconds

    def _fit(self) -> Vector:
        """Minimise the sum of (x c - t)^2 / (t t'), where t' is the last round's estimate, plus the pull of the prior.

        The pull is weighted by its effect on the predictions, so a prior that is wrong by orders of magnitude in an
        important term cannot outweigh the data.
        """
        count = min(self.observations, self._window)
        x, t = self._features[:count], self._seconds[:count]
        prior = self._prior * _median((t / (x @ self._prior)).tolist())
        least, most = t / 100, t * 100
        c, free = prior, count - len(prior)
        for _ in range(ROUNDS):
            estimate = np.minimum(np.maximum(x @ c, least), most)
            product = estimate * t
            miss = np.abs(estimate - t) / np.sqrt(product)
            trust = np.minimum(1.0, OUTLIER / np.maximum(miss, 1e-9))
            weight = trust / product
            a = (x.T * weight) @ x
            variance = float(trust @ (miss * miss)) / free if free > 0 else math.inf
            part = min(1.0, max(LEAST_TRUST, variance / OUTLIER**2))
            pull = PRIOR_WEIGHT * part / count * a.diagonal()
            pull = np.where(pull > 0, pull, 1e-30)  # an unseen feature keeps its scaled prior
            a.flat[:: len(c) + 1] += pull
            c = _nonnegative(a, x.T @ (weight * t) + pull * prior)
        return c


def _check(features: Sequence[float], seconds: float) -> None:
    if not seconds > 0 or not min(features) >= 0 or not max(features) > 0:
        raise ValueError(f"cannot learn from {seconds} s for {list(features)}")


def _median(values: list[float]) -> float:
    """Of at least one value; numpy's takes as long as a round of the fit."""
    values.sort()
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def _nonnegative(a: Vector, b: Vector) -> Vector:
    """argmin of c^T a c - 2 b^T c over c >= 0, by trying the few sets of coefficients that may be positive."""
    free = _minimum(a, b)
    if (free >= 0).all() and float(b @ free) > 0:
        return free  # the free minimum is allowed
    size = len(b)
    best, best_value = np.zeros(size), 0.0
    for count in range(size - 1, 1, -1):
        for chosen in combinations(range(size), count):
            index = np.array(chosen)
            c = _minimum(a[np.ix_(index, index)], b[index])
            value = -float(b[index] @ c)
            if (c >= 0).all() and value < best_value:
                best, best_value = np.zeros(size), value
                best[index] = c
    for i in range(size if size > 1 else 0):  # numpy takes ten times as long for one equation
        square, wanted = float(a[i, i]), float(b[i])
        unit = math.sqrt(square)
        alone = wanted / unit / (square / (unit * unit)) / unit
        if alone >= 0 and -wanted * alone < best_value:
            best, best_value = np.zeros(size), -wanted * alone
            best[i] = alone
    return best


def _minimum(a: Vector, b: Vector) -> Vector:
    """argmin of c^T a c - 2 b^T c."""
    unit = np.sqrt(a.diagonal())  # features differ by many orders of magnitude
    found: Vector = np.linalg.solve(a / (unit[:, None] * unit), b / unit) / unit
    return found


class PrefillModel:
    """Time of one prefill step or of a whole prompt."""

    def __init__(self, prior: Sequence[float] = (2e-3, 1e-3, 1e-8)) -> None:
        """Prior: seconds, seconds per token, seconds per attended pair of tokens. The default is a small CPU model."""
        self.regression = Regression(prior)

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """A step computed `tokens` prompt tokens after `context` known ones."""
        self.regression.observe(prefill_features(tokens, context), seconds)

    def estimate(self, tokens: int, context: int = 0, chunks: int = 1) -> float:
        return prefill_seconds(self.coefficients, tokens, context, chunks)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        a0, a1, a2 = self.regression.coefficients
        return a0, a1, a2


def prefill_features(tokens: int, context: int, chunks: int = 1) -> tuple[float, float, float]:
    return float(chunks), float(tokens), float(tokens) * (tokens + 2 * context)


def prefill_seconds(coefficients: Sequence[float], tokens: int, context: int = 0, chunks: int = 1) -> float:
    """Seconds of a prefill by a model with these coefficients; 0 for 0 tokens."""
    if tokens <= 0:
        return 0.0
    return sum(c * x for c, x in zip(coefficients, prefill_features(tokens, context, chunks), strict=True))


class DecodeModel:
    """Time of one decode step."""

    def __init__(self, prior: Sequence[float] = (1e-2, 1e-3, 1e-7)) -> None:
        """Prior: seconds, seconds per request, seconds per token of context."""
        self.regression = Regression(prior)

    def observe(self, batch: int, context_sum: int, seconds: float) -> None:
        """A step computed one token for each of `batch` requests with `context_sum` tokens of context in total."""
        self.regression.observe((1.0, batch, context_sum), seconds)

    def estimate(self, batch: int, context_sum: int) -> float:
        return self.regression.estimate((1.0, batch, context_sum))

    @property
    def coefficients(self) -> tuple[float, float, float]:
        d0, d1, d2 = self.regression.coefficients
        return d0, d1, d2


class TransferModel:
    """Time of one transfer over one path."""

    def __init__(self, latency_s: float = 5e-4, bytes_per_s: float = 1e9) -> None:
        self.regression = Regression((latency_s, 1 / bytes_per_s))

    def observe(self, nbytes: int, seconds: float) -> None:
        self.regression.observe((1.0, nbytes), seconds)

    def estimate(self, nbytes: int) -> float:
        """Seconds; 0 for 0 bytes."""
        return self.regression.estimate((1.0, nbytes)) if nbytes > 0 else 0.0

    @property
    def latency_s(self) -> float:
        return self.regression.coefficients[0]

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of a long transfer; infinite if the measurements show no cost per byte."""
        per_byte = self.regression.coefficients[1]
        return 1 / per_byte if per_byte > 0 else float("inf")
