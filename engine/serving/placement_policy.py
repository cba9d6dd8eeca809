"""The policy that --placement names."""

from __future__ import annotations

from engine.config import Config
from engine.flags import UsageError
from engine.serving.cheapest import shortlist
from engine.serving.user_class import is_file, load_class
from sched.admission import Limits
from sched.member import Rng
from sched.placements.choice import PlacementPolicy
from sched.placements.mooncake import MooncakePlacement
from sched.placements.table import placements


def placement_policy(config: Config, rng: Rng) -> PlacementPolicy:
    """Raises UsageError when the user's file does not hold one."""
    try:
        kind = placements.get(config.placement)
        if kind is None and is_file(config.placement):
            kind = load_class("--placement", config.placement, ("shortlist", "place"))
        assert kind is not None  # engine.flags lets nothing else through
        policy: PlacementPolicy = kind(Limits(config.max_waiting_requests), rng, config.kvcache_balancing_threshold)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None
    if isinstance(policy, MooncakePlacement):
        policy.compiled = shortlist
    return policy
