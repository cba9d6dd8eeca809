"""The predictors for the guarded placement (sched/placement/learned.py). One learns from its own observations; the
others say the truth, the truth with noise, and the opposite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from lab.simulator.config import SimConfig
from lab.simulator.making import price
from lab.simulator.node import Node
from sched.classes import with_objectives
from sched.placement.cheapest import CheapestPlacement
from sched.placement.choice import PlacementPolicy
from sched.placement.learned import LearnedPlacement, NodeFactors, Predictor
from sched.placement.phases import ByObjectives


class Perfect:
    """Knows the present true speed of every node, regardless of its records."""

    def __init__(self, config: SimConfig, nodes: Mapping[str, Node], slowness: Sequence[float]) -> None:
        """slowness: the true factor of each node, by index."""
        self._nodes, self._slowness = nodes, slowness

    def ttft_s(self, node: str, wait_s: float, transfer_s: float, prefill_s: float) -> float:
        one = self._nodes[node]
        return (wait_s + prefill_s) * self._slowness[one.index] / one.known_slowness + transfer_s

    def observed(self, node: str, wait_s: float, transfer_s: float, prefill_s: float, ttft_s: float) -> None:
        """Does nothing: there is nothing to learn."""


class Noisy(Perfect):
    """The truth multiplied by a lognormal factor, drawn for every answer."""

    def __init__(self, config: SimConfig, nodes: Mapping[str, Node], slowness: Sequence[float]) -> None:
        super().__init__(config, nodes, slowness)
        self._rng, self._sigma = Random(config.seed), config.predictor_noise

    def ttft_s(self, node: str, wait_s: float, transfer_s: float, prefill_s: float) -> float:
        return super().ttft_s(node, wait_s, transfer_s, prefill_s) * self._rng.lognormvariate(0.0, self._sigma)


class Inverted(Perfect):
    """The slowest node looks fastest."""

    def ttft_s(self, node: str, wait_s: float, transfer_s: float, prefill_s: float) -> float:
        return 1 / max(super().ttft_s(node, wait_s, transfer_s, prefill_s), 1e-9)


predictors: dict[str, Callable[[SimConfig, Mapping[str, Node], Sequence[float]], Predictor]] = {
    "factors": lambda config, nodes, slowness: NodeFactors(),
    "perfect": Perfect,
    "noisy": Noisy,
    "inverted": Inverted,
}
"""Predictors by the value of --predictor."""


def equip(policy: PlacementPolicy, config: SimConfig, nodes: Mapping[str, Node], slowness: Sequence[float]) -> None:
    """Give a placement its objectives, one by cost its prices, and a learned one the predictor and the guard that the
    configuration names; slowness: the true factor of each node, by index. Raises ValueError."""
    if isinstance(policy, CheapestPlacement | ByObjectives):
        policy.classes = with_objectives(config.slo)
    if isinstance(policy, CheapestPlacement):
        prices = {name: price(config, node) for name, node in nodes.items()}
        policy.price = prices.__getitem__
    if not isinstance(policy, LearnedPlacement):
        return
    if config.predictor not in predictors:
        raise ValueError(f"--predictor must be one of {', '.join(predictors)}, got {config.predictor!r}")
    policy.predictor = predictors[config.predictor](config, nodes, slowness)
    policy.slack, policy.most_error = config.guard_slack, config.guard_most_error
