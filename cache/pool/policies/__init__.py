"""Eviction policies: the order in which cached content is evicted. A new one is one class and one entry of `policies`,
or a user's file.

Files:
    fifo    Evicts the oldest content first, regardless of its uses
    ranked  Policies that evict the smallest rank: LFU, length-aware, cost-aware
    s3fifo  S3-FIFO (Yang et al., SOSP 2023): three queues
    shares  ClassShares: every service class has a part of the cache, which others may borrow but not keep
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cache.pool.policies.fifo import FIFO
from cache.pool.policies.ranked import LFU, CostAware, LengthAware
from cache.pool.policies.s3fifo import S3FIFO
from cache.pool.policies.shares import ClassShares
from cache.pool.policy import LRU, EvictionPolicy
from net.user_file import is_file, load

policies: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "length-aware": LengthAware,
    "s3-fifo": S3FIFO,
    "cost-aware": CostAware,
}

METHODS = ("added", "touched", "pinned", "unpinned", "removed", "victim", "__len__")

__all__ = ["METHODS", "EvictionPolicy", "choose", "policies"]


def choose(name: str, shares: Mapping[str, float] | None = None) -> EvictionPolicy:
    """A new policy called `name`, or the user's class from 'FILE.py:NAME'; with shares, one policy per class. Raises
    ValueError."""
    if is_file(name):
        maker: Callable[[], EvictionPolicy] = load("--eviction", name, METHODS)
    elif name in policies:
        maker = policies[name]
    else:
        raise ValueError(f"--eviction must be one of {', '.join(policies)}, or FILE.py:NAME, got {name!r}")
    return ClassShares(maker, shares) if shares else maker()
