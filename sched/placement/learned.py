"""A learned choice inside a robust envelope (reference/scheduling.md section 9, 7).

Algorithm 1's estimates are as right as the records. Measured times to first token can teach what the records do not
say: a node is 20 % slower than its model says, or a neighbour uses the same memory bus. But a predictor may be wrong.
So it decides only among the nodes whose estimate by the rule is within `slack` of the best one:

    estimate(chosen) <= slack * min estimate        for any prediction

It does not decide at all while its moving relative error is above MAX_PREDICTOR_ERROR and above the error of the rule.
A node that the predictor avoids becomes idle. Then only that node is inside the envelope, and the policy tries it
again. So the envelope also makes the policy explore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from sched.admission import Limits
from sched.membership.member import Rng
from sched.placement.central import prompts_s
from sched.placement.costs import PrefillCosts, Row
from sched.placement.mooncake import Compiled, MooncakePlacement

ENVELOPE_RATIO = 1.25
"""Width of the envelope: the largest allowed ratio of the chosen node's estimate to the least estimate."""

MAX_PREDICTOR_ERROR = 0.3
"""The policy ignores a predictor whose moving mean of |predicted - measured| / measured is above this
(scheduling.md section 9)."""

MOVING_MEAN_REQUESTS = 32
"""Number of requests in a moving mean; for NodeFactors, requests of one node."""

FLOOR_S = 1e-3
"""Lower bound of the time to first token in relative errors."""


class Predictor(Protocol):
    """Predicts the seconds to the first token on a node from the rule's terms. `observed` gets the same terms together
    with the measured time."""

    def ttft_s(self, node: str, wait_s: float, transfer_s: float, prefill_s: float) -> float: ...

    def observed(self, node: str, wait_s: float, transfer_s: float, prefill_s: float, ttft_s: float) -> None: ...


class NodeFactors:
    """Slowness factor of each node: the geometric mean of measured over estimated time, without transfers. The factor
    of an unknown node is 1."""

    MOST = math.log(4.0)  # a single measurement counts as at most a factor of 4

    def __init__(self) -> None:
        self._logs: dict[str, tuple[float, int]] = {}  # node -> (mean logarithm, observations and a prior of four)

    def factor(self, node: str) -> float:
        return math.exp(self._logs[node][0]) if node in self._logs else 1.0

    def ttft_s(self, node: str, wait_s: float, transfer_s: float, prefill_s: float) -> float:
        return self.factor(node) * (wait_s + prefill_s) + transfer_s

    def observed(self, node: str, wait_s: float, transfer_s: float, prefill_s: float, ttft_s: float) -> None:
        expected = wait_s + prefill_s
        if expected <= 0:
            return
        seen = math.log(max(ttft_s - transfer_s, FLOOR_S) / max(expected, FLOOR_S))
        mean, count = self._logs.get(node, (0.0, 4))
        count += 1
        mean += (min(self.MOST, max(-self.MOST, seen)) - mean) / min(count, MOVING_MEAN_REQUESTS)
        self._logs[node] = mean, count


class RelativeError:
    """A moving mean that starts without a prior."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    def add(self, predicted: float, measured: float) -> None:
        """Errors above 1,000 % count as 1,000 %."""
        miss = abs(predicted - measured) / max(measured, FLOOR_S)
        self._count += 1
        miss = min(miss if math.isfinite(miss) else 10.0, 10.0)
        self.mean += (miss - self.mean) / min(self._count, MOVING_MEAN_REQUESTS)


class LearnedPlacement(MooncakePlacement):
    """Like `mooncake`, but the predictor chooses the prefill node among the asked nodes inside the envelope."""

    def __init__(self, limits: Limits, rng: Rng, threshold: float = 1.5, *, compiled: Compiled | None = None) -> None:
        super().__init__(limits, rng, threshold, compiled=compiled)
        self.predictor: Predictor = NodeFactors()
        self.slack, self.most_error = ENVELOPE_RATIO, MAX_PREDICTOR_ERROR
        self.error, self.rule_error = RelativeError(), RelativeError()
        self.worst = 1.0  # the largest ratio of a chosen estimate to the least one
        self.decided = self.departed = 0  # number of choices; number that differ from the rule's

    @property
    def trusted(self) -> bool:
        return self.error.mean <= self.most_error or self.error.mean < self.rule_error.mean

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        self.decided += 1
        if not self.trusted:
            return super().choose_prefill(costs, able)
        ttft_s = prompts_s(costs)
        best = float(ttft_s[able].min())
        inside = envelope(ttft_s[able].tolist(), able, self.slack)
        predicted = {i: self._predicted(costs.row(i)) for i in inside}
        least = min(predicted.values())
        chosen = self.drawn([i for i in inside if predicted[i] <= least])
        estimate = float(ttft_s[chosen])
        self.departed += estimate > best
        self.worst = max(self.worst, estimate / best if best > 0 else 1.0)
        return chosen

    def observed(self, node: str, estimates: Mapping[str, float], ttft_s: float) -> None:
        """A request placed on `node` with these estimates had its first token `ttft_s` after the decision."""
        wait_s, transfer_s, prefill_s = (estimates[name] for name in ("wait_s", "transfer_s", "prefill_s"))
        self.error.add(self.predictor.ttft_s(node, wait_s, transfer_s, prefill_s), ttft_s)
        self.rule_error.add(wait_s + transfer_s + prefill_s, ttft_s)
        self.predictor.observed(node, wait_s, transfer_s, prefill_s, ttft_s)

    def _predicted(self, row: Row) -> float:
        """The predicted seconds; the rule's estimate if the prediction is not a valid time."""
        said = self.predictor.ttft_s(row["node"], row["wait_s"], row["transfer_s"], row["prefill_s"])
        return said if said >= 0 and math.isfinite(said) else float(row["ttft_s"])


def envelope(estimates: Sequence[float], nodes: Sequence[int], slack: float) -> list[int]:
    """Those of `nodes` whose estimate is at most `slack` times the least; never empty for slack >= 1."""
    if slack < 1:
        raise ValueError(f"a slack of {slack} would exclude the best node: it must be at least 1")
    most = slack * min(estimates)
    return [node for node, estimate in zip(nodes, estimates, strict=True) if estimate <= most]
