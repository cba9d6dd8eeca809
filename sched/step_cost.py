"""Time of a step that decodes and prefills at once, from the models of steps that do one of both.

    t = f (d0 + d1 batch + d2 sum ctx + a1 n + a2 n (n + 2 ctx))

The weights are read once for both, so a0 of the prefill model is left out. f is what such steps really took against
the sum, as a moving average: it holds whatever the sum gets wrong (small chunks compute less efficiently, reading
weights hides behind computing).
"""

from __future__ import annotations

import math

from sched.cost import DecodeModel, PrefillModel

LEARN = 0.15
"""Pull of one measured step on log f."""

SURPRISE = 2.0
"""A single step may tell of at most this factor: a hiccup of the machine is no trend."""


class StepModel:
    """Predicts mixed steps and inverts the prediction. Feed it every measured step."""

    def __init__(self, prefill: PrefillModel, decode: DecodeModel) -> None:
        self.prefill = prefill
        self.decode = decode
        self.factor = 1.0
        self.error = 0.0  # moving average of |predicted - measured| / measured of mixed steps
        self.observations = 0

    def estimate(self, decodes: int, decode_context: int, tokens: int, prefill_context: int) -> float:
        """Seconds of a step with `decodes` > 0 rows and one chunk of `tokens` behind `prefill_context` known ones."""
        _, a1, a2 = self.prefill.coefficients
        prefill = a1 * tokens + a2 * tokens * (tokens + 2 * prefill_context)
        return self.factor * (self.decode.estimate(decodes, decode_context) + prefill)

    def observe(self, decodes: int, decode_context: int, tokens: int, prefill_context: int, seconds: float) -> None:
        """A mixed step took `seconds` > 0; several chunks count as one behind their mean context."""
        estimate = self.estimate(decodes, decode_context, tokens, prefill_context)
        self.observations += 1
        self.error += (abs(estimate - seconds) / seconds - self.error) / min(self.observations, 32)
        surprise = min(SURPRISE, max(1 / SURPRISE, seconds / estimate))
        self.factor *= math.exp(LEARN * math.log(surprise))

    def largest_chunk(self, seconds: float, decodes: int, decode_context: int, prefill_context: int) -> int:
        """Most tokens n with estimate(...) <= seconds; negative when the decodes alone take longer. The positive root
        of a2 n^2 + (a1 + 2 a2 ctx) n = seconds / f - decode."""
        _, a1, a2 = self.prefill.coefficients
        left = seconds / self.factor - self.decode.estimate(decodes, decode_context)
        if left < 0:
            return -1
        slope = a1 + 2 * a2 * prefill_context
        if a2 * left <= 1e-12 * slope * slope:  # as good as linear
            return int(min(left / slope, 1 << 30)) if slope > 0 else 1 << 30
        return int((math.sqrt(slope * slope + 4 * a2 * left) - slope) / (2 * a2))
