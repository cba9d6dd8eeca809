"""The policy that --placement names."""

from __future__ import annotations

from collections.abc import Callable

from engine.config.config import Config
from engine.config.flags import UsageError
from engine.front.cheapest import shortlist
from engine.front.choose import find
from net.user_file import is_file, load
from sched.admission import Limits
from sched.membership.member import Rng
from sched.placement.choice import PlacementPolicy
from sched.placement.mooncake import MooncakePlacement
from sched.placement.table import placements


def placement_policy(config: Config, rng: Rng) -> PlacementPolicy:
    """Raises UsageError when the user's file does not hold one."""
    try:
        own = is_file(config.placement)
        kind: Callable[..., PlacementPolicy]
        kind = load("--placement", config.placement, ("shortlist", "place")) if own else placements[config.placement]
        policy: PlacementPolicy = kind(Limits(config.max_waiting_requests), rng, config.kvcache_balancing_threshold)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None
    if isinstance(policy, MooncakePlacement):
        policy.compiled, policy.find = shortlist, find
    return policy
