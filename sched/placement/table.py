"""Placement policies by their names on the command line. A new policy is one class and one entry here."""

from __future__ import annotations

from sched.placement.central import CentralGreedy
from sched.placement.cheapest import CheapestPlacement
from sched.placement.learned import LearnedPlacement
from sched.placement.mooncake import MooncakePlacement
from sched.placement.phases import EcoServe, TaiChi, WindServe
from sched.placement.rivals import (
    BanaServe,
    DynamoCost,
    Gorgo,
    LeastLoad,
    LlmdScorers,
    LocalCache,
    NetKV,
    PowerOfTwo,
    Preble,
    RandomPlacement,
    RoundRobin,
)
from sched.placement.two_stages import TwoStages

METHODS = ("shortlist", "place")
"""Of a policy in a user's file; it is made with limits, a random generator and the threshold."""

placements: dict[str, type[TwoStages]] = {
    "mooncake": MooncakePlacement,
    "mooncake-central-greedy": CentralGreedy,
    "mooncake-learned": LearnedPlacement,
    "mooncake-cost": CheapestPlacement,
    "dynamo-cost": DynamoCost,
    "llm-d": LlmdScorers,
    "preble": Preble,
    "gorgo": Gorgo,
    "netkv": NetKV,
    "banaserve": BanaServe,
    "windserve": WindServe,
    "ecoserve": EcoServe,
    "taichi": TaiChi,
    "power-of-two": PowerOfTwo,
    "local-cache": LocalCache,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
    "random": RandomPlacement,
}
