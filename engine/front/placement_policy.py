"""The policy that --placement names."""

from __future__ import annotations

from collections.abc import Callable

from engine.config.config import Config
from engine.config.flags import UsageError
from engine.front.compiled.cheapest import shortlist
from engine.front.compiled.choose import find
from net.user_file import chosen
from sched.admission import Limits
from sched.membership.member import Rng
from sched.placement.cheapest import CheapestPlacement, Price, equal_prices
from sched.placement.choice import PlacementPolicy
from sched.placement.mooncake import Compiled, MooncakePlacement
from sched.placement.phases import ByObjectives
from sched.placement.table import METHODS, placements
from sched.placement.two_stages import TwoStages

COMPILED = Compiled(shortlist, find)


def placement_policy(config: Config, rng: Rng, price: Price = equal_prices) -> PlacementPolicy:
    """price: of a node, for policies by cost. Raises UsageError when the user's file does not hold one."""
    try:
        kind: Callable[..., PlacementPolicy] = chosen("--placement", config.placement, placements, METHODS)
        more: dict[str, object] = {}
        if isinstance(kind, type) and issubclass(kind, MooncakePlacement):
            more["compiled"] = COMPILED
        if isinstance(kind, type) and issubclass(kind, CheapestPlacement):
            more |= {"classes": config.classes, "price": price}
        if isinstance(kind, type) and issubclass(kind, ByObjectives):
            more["classes"] = config.classes
        limits = Limits(config.max_waiting_requests)
        policy = kind(limits, rng, config.kvcache_balancing_threshold, **more)
        if isinstance(policy, TwoStages):
            policy.tolls &= config.placement_tolls
        return policy
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None
