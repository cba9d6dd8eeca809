"""What the guarded placement (sched/placements/learned.py) may be told: by what it has seen itself, the truth, the
truth with noise, the opposite."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from sched.placements.learned import LearnedPlacement, NodeFactors, Predictor

if TYPE_CHECKING:
    from sim.cluster import Cluster


class Perfect:
    """Knows how fast every node really is at this moment, whatever its records say."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def ttft_s(self, node: str, wait_s: float, transfer_s: float, prefill_s: float) -> float:
        one = self._cluster.by_name[node]
        return (wait_s + prefill_s) * self._cluster.failures.slowness[one.index] / one.known_slowness + transfer_s

    def observed(self, node: str, wait_s: float, transfer_s: float, prefill_s: float, ttft_s: float) -> None:
        """There is nothing to learn."""


class Noisy(Perfect):
    """The truth times a lognormal factor, drawn anew for every answer."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._rng, self._sigma = Random(cluster.config.seed), cluster.config.predictor_noise

    def ttft_s(self, node: str, wait_s: float, transfer_s: float, prefill_s: float) -> float:
        return super().ttft_s(node, wait_s, transfer_s, prefill_s) * self._rng.lognormvariate(0.0, self._sigma)


class Inverted(Perfect):
    """The slowest node looks fastest."""

    def ttft_s(self, node: str, wait_s: float, transfer_s: float, prefill_s: float) -> float:
        return 1 / max(super().ttft_s(node, wait_s, transfer_s, prefill_s), 1e-9)


predictors: dict[str, Callable[[Cluster], Predictor]] = {
    "factors": lambda cluster: NodeFactors(),
    "perfect": Perfect,
    "noisy": Noisy,
    "inverted": Inverted,
}
"""By the name behind --predictor."""


def equip(cluster: Cluster) -> None:
    """Give a learned placement the predictor and the guard that the configuration names. Raises ValueError."""
    policy, config = cluster.placing.policy, cluster.config
    if not isinstance(policy, LearnedPlacement):
        return
    if config.predictor not in predictors:
        raise ValueError(f"--predictor must be one of {', '.join(predictors)}, got {config.predictor!r}")
    if config.guard_slack < 1 or config.predictor_noise < 0:
        raise ValueError("--guard-slack must be at least 1 and --predictor-noise not negative")
    policy.predictor = predictors[config.predictor](cluster)
    policy.slack, policy.most_error = config.guard_slack, config.guard_most_error
