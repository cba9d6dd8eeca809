"""Homes of a block: rendezvous hashing, computed by everybody alike and never looked up. Pure.

Every member has a score for every key and the highest score wins (Thaler and Ravishankar, 1998). When a member
comes or goes only the keys that it wins or won move: 1/n of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import nlargest

from xxhash import xxh3_64_intdigest

from cache.block import BlockKey


@lru_cache(maxsize=4096)
def _seed(member: str) -> int:
    return xxh3_64_intdigest(member.encode())


def _score(key: BlockKey, member: str) -> tuple[int, str]:
    return xxh3_64_intdigest(key, _seed(member)), member  # the name breaks ties


def homes(key: BlockKey, members: Sequence[str], replicas: int = 1) -> list[str]:
    """The `replicas` members that keep `key`, best first; fewer when there are fewer members."""
    if replicas == 1:
        return [max(members, key=lambda member: _score(key, member))] if members else []
    return nlargest(replicas, members, key=lambda member: _score(key, member))


def by_home(keys: Sequence[BlockKey], members: Sequence[str]) -> dict[str, list[int]]:
    """Positions in `keys`, ascending, grouped by the first home of their key. Empty without members."""
    seeds = [(_seed(member), member) for member in members]
    groups: dict[str, list[int]] = {}
    for position, key in enumerate(keys if members else ()):
        _, home = max([(xxh3_64_intdigest(key, seed), member) for seed, member in seeds])
        groups.setdefault(home, []).append(position)
    return groups
