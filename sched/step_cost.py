"""Time of a step that decodes and prefills at once, from the models of steps that do one of both.

    t = c0 decode(batch, sum ctx) + c1 + c2 (a1 n + a2 n (n + 2 ctx))

a0 of the prefill model is left out: it is mostly the reading of weights, which happens once for both. What a mixed step
really costs is fitted (c >= 0, from 1, 2 ms, 1 on): a small chunk has a cost of its own and computes less efficiently,
reading weights hides behind computing.
"""

from __future__ import annotations

import math

from sched.cost import DecodeModel, PrefillModel, Regression

PRIOR = (1.0, 2e-3, 1.0)

LEAST_SLOPE = 0.25
"""c2 is taken as at least this when a chunk is chosen: prefill tokens are never nearly free, whatever noise says."""


class StepModel:
    """Predicts mixed steps and inverts the prediction. Feed it every measured mixed step."""

    def __init__(self, prefill: PrefillModel, decode: DecodeModel) -> None:
        self.prefill = prefill
        self.decode = decode
        self.regression = Regression(PRIOR)

    def decode_seconds(self, decodes: int, decode_context: int) -> float:
        """A step of decodes alone."""
        return self.decode.estimate(decodes, decode_context)

    def estimate(self, decodes: int, decode_context: int, tokens: int, prefill_context: int) -> float:
        """Seconds of a step with `decodes` > 0 rows and one chunk of `tokens` behind `prefill_context` known ones."""
        return self.regression.estimate(self._features(decodes, decode_context, tokens, prefill_context))

    def observe(self, decodes: int, decode_context: int, tokens: int, prefill_context: int, seconds: float) -> None:
        """A mixed step took `seconds` > 0; several chunks count as one behind their mean context."""
        self.regression.observe(self._features(decodes, decode_context, tokens, prefill_context), seconds)

    def _features(
        self, decodes: int, decode_context: int, tokens: int, prefill_context: int
    ) -> tuple[float, float, float]:
        _, a1, a2 = self.prefill.coefficients
        prefill = a1 * tokens + a2 * tokens * (tokens + 2 * prefill_context)
        return self.decode.estimate(decodes, decode_context), 1.0, prefill

    def largest_chunk(self, seconds: float, decodes: int, decode_context: int, prefill_context: int) -> int:
        """Most tokens n with estimate(...) <= seconds; negative when nothing is left for prefill. The positive root of
        a2 n^2 + (a1 + 2 a2 ctx) n = (seconds - c0 decode - c1) / c2."""
        _, a1, a2 = self.prefill.coefficients
        c0, c1, c2 = self.regression.coefficients
        left = (seconds - c0 * self.decode.estimate(decodes, decode_context) - c1) / max(c2, LEAST_SLOPE)
        if left < 0:
            return -1
        slope = a1 + 2 * a2 * prefill_context
        if a2 * left <= 1e-12 * slope * slope:  # as good as linear
            return int(min(left / slope, 1 << 30)) if slope > 0 else 1 << 30
        return int((math.sqrt(slope * slope + 4 * a2 * left) - slope) / (2 * a2))
