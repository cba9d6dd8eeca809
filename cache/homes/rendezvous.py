"""Homes of a block by weighted rendezvous hashing. Every node computes the same homes; nothing is looked up. Pure.

Every member has a score for every key, and the best scores win (Thaler and Ravishankar, 1998). With a hash h of member
and key, uniform in (0, 1), and the member's weight w, the score is -ln(h) / w, lowest first: a member wins a share of
the keys in proportion to its weight (logarithmic method; Schindelhauer and Schomaker, 2005). When a member joins or
leaves, only the keys that it wins or loses move, w / sum(w) of all, and the order of the other members stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import nlargest, nsmallest
from math import log

from xxhash import xxh3_64_intdigest

from cache.block import BlockKey

Members = Mapping[str, int]
"""Node id -> weight: the bytes of its share of the store, at least 1."""

HASHES = float(1 << 64)


@lru_cache(maxsize=4096)
def _seed(member: str) -> int:
    return xxh3_64_intdigest(member.encode())


def equal_members(names: Iterable[str]) -> dict[str, int]:
    """Members with equal weights."""
    return dict.fromkeys(names, 1)


def ranking(key: BlockKey, members: Members, count: int) -> list[str]:
    """The `count` best members for `key`, best first; fewer if there are fewer members."""
    weights = set(members.values())
    if len(weights) < 2:  # the order of -ln(h) is that of h
        hashes = [(xxh3_64_intdigest(key, _seed(name)), name) for name in members]
        best = [max(hashes)] if count == 1 and hashes else nlargest(count, hashes)
        return [name for _, name in best]
    scores = [
        (-log((xxh3_64_intdigest(key, _seed(name)) + 1) / HASHES) / weight, name) for name, weight in members.items()
    ]
    return [name for _, name in nsmallest(count, scores)]


def homes(key: BlockKey, members: Members, replicas: int = 1) -> list[str]:
    """The members that keep `key`, best first."""
    return ranking(key, members, replicas)


def by_home(keys: Sequence[BlockKey], members: Members) -> dict[str, list[int]]:
    """Positions in `keys`, ascending, grouped by the first home of their key. Empty without members."""
    if len(members) == 1:
        return {next(iter(members)): list(range(len(keys)))} if keys else {}
    groups: dict[str, list[int]] = {}
    if len(set(members.values())) == 1:
        seeds = [(_seed(name), name) for name in members]
        for position, key in enumerate(keys):
            _, home = max([(xxh3_64_intdigest(key, seed), name) for seed, name in seeds])
            groups.setdefault(home, []).append(position)
        return groups
    for position, key in enumerate(keys if members else ()):
        groups.setdefault(ranking(key, members, 1)[0], []).append(position)
    return groups
