"""The eviction and admission policies that the flags name, for the engine's KV arena and the store's share."""

from __future__ import annotations

from cache.pool import admission
from cache.pool.admission import Admission
from cache.pool.policies import EvictionPolicy, choose, shares
from engine.config.config import Config
from engine.config.flags import UsageError


def eviction(config: Config) -> EvictionPolicy:
    """A new policy, with --cache-shares. Raises UsageError; exceptions of the user's file pass through."""
    try:
        return choose(config.eviction, shares.parse(config.cache_shares))
    except ValueError as error:
        raise UsageError(str(error)) from error


def cache_admission(config: Config) -> Admission:
    """A new policy. Raises UsageError; exceptions of the user's file pass through."""
    try:
        return admission.choose(config.cache_admission)
    except ValueError as error:
        raise UsageError(str(error)) from error
