"""Predicts the time of a step with both decodes and prefill.

    t = c0 + c1 batch + c2 sum ctx + c3 n + c4 n (n + 2 ctx_p)      batch decodes plus n new tokens after ctx_p

sum ctx includes the context of the prompt: a chunk reads it once, like a decode. Such a step has a separate regression,
because it is not the sum of its parts: it reads the weights once for both, and small chunks compute less efficiently.
Before the first measurement, the estimate is that sum without the fixed cost a0 of the prefill.
"""

from __future__ import annotations

import math

from sched.cost import DecodeModel, PrefillModel, Regression

MIN_SLOPE = 0.25
"""Minimum cost of a prefill token in a mixed step, as a share of its cost in a prefill step. Noise may yield a slope of
zero, and then the chunk would have no limit."""


class StepModel:
    """Predicts mixed steps and inverts the prediction. Feed it every measured mixed step."""

    def __init__(self, prefill: PrefillModel, decode: DecodeModel) -> None:
        self.prefill = prefill
        self.decode = decode
        self.regression: Regression | None = None

    def decode_seconds(self, decodes: int, decode_context: int) -> float:
        """Seconds of a step with decodes only."""
        return self.decode.estimate(decodes, decode_context)

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """Seconds of a step that only computes `tokens` tokens of a prompt after `context` known ones."""
        return self.prefill.estimate(tokens, context)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """c0 .. c4"""
        if self.regression is not None:
            self.regression.least = self.decode.regression.least
            return self.regression.coefficients
        return *self.decode.coefficients, *self.prefill.coefficients[1:]

    @property
    def error(self) -> float:
        """Moving average of |predicted - measured| / measured."""
        return 0.0 if self.regression is None else self.regression.error

    def estimate(self, decodes: int, decode_context: int, tokens: int, prefill_context: int) -> float:
        """Seconds of a step with `decodes` > 0 rows and one chunk of `tokens` after `prefill_context` known ones."""
        features = _features(decodes, decode_context, tokens, prefill_context)
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def observe(self, decodes: int, decode_context: int, tokens: int, prefill_context: int, seconds: float) -> None:
        """A mixed step took `seconds` > 0; several chunks count as one after their mean context."""
        if self.regression is None:
            self.regression = Regression([max(c, 1e-12) for c in self.coefficients])
        self.regression.observe(_features(decodes, decode_context, tokens, prefill_context), seconds)

    def largest_chunk(self, seconds: float, decodes: int, decode_context: int, prefill_context: int) -> int:
        """Maximum n with estimate(...) <= seconds; negative if no time is left for prefill. It is the positive root of
        c4 n^2 + (c3 + 2 c4 ctx_p) n = seconds - estimate without n."""
        c3, c4 = self.coefficients[3:]
        _, a1, a2 = self.prefill.coefficients
        left = seconds - self.estimate(decodes, decode_context, 0, prefill_context)
        slope = max(c3 + 2 * c4 * prefill_context, MIN_SLOPE * (a1 + 2 * a2 * prefill_context))
        return _tokens(left, slope, c4)

    def largest_prefill(self, seconds: float, context: int) -> int:
        """Maximum number of tokens after `context` known ones that a prefill step computes in `seconds`; negative if
        its fixed cost takes longer."""
        a0, a1, a2 = self.prefill.coefficients
        return _tokens(seconds - a0, a1 + 2 * a2 * context, a2)


def _tokens(seconds: float, slope: float, square: float) -> int:
    """The largest n with slope n + square n^2 <= seconds; -1 if `seconds` is negative."""
    if seconds < 0:
        return -1
    if square * seconds <= 1e-12 * slope * slope:  # as good as linear
        return int(min(seconds / slope, 1 << 30)) if slope > 0 else 1 << 30
    return int((math.sqrt(slope * slope + 4 * square * seconds) - slope) / (2 * square))


def _features(
    decodes: int, decode_context: int, tokens: int, prefill_context: int
) -> tuple[float, float, float, float, float]:
    pairs = float(tokens) * (tokens + 2 * prefill_context)
    return 1.0, float(decodes), float(decode_context + prefill_context), float(tokens), pairs
