"""The policy that --placement names."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import Config
from engine.flags import UsageError
from engine.serving.cheapest import shortlist
from net.user_file import is_file, load
from sched.admission import Limits
from sched.member import Rng
from sched.placements.choice import PlacementPolicy
from sched.placements.mooncake import MooncakePlacement
from sched.placements.table import placements


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
        policy.compiled = shortlist
    return policy
