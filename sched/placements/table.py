"""Placement policies by their names on the command line. A new policy is one class and one entry here."""

from __future__ import annotations

from sched.placements.central import CentralGreedy
from sched.placements.learned import LearnedPlacement
from sched.placements.mooncake import MooncakePlacement
from sched.placements.rivals import DynamoCost, LeastLoad, LocalCache, PowerOfTwo, RandomPlacement, RoundRobin
from sched.placements.two_stages import TwoStages

placements: dict[str, type[TwoStages]] = {
    "mooncake": MooncakePlacement,
    "mooncake-central-greedy": CentralGreedy,
    "mooncake-learned": LearnedPlacement,
    "dynamo-cost": DynamoCost,
    "power-of-two": PowerOfTwo,
    "local-cache": LocalCache,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
    "random": RandomPlacement,
}
