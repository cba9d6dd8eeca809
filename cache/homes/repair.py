"""Repair: who owes whom a copy, after members came or went, and while a home could not take what is its own. Pure.

No node knows what another holds. It need not: an offer of keys is answered with those that are missing there, so an
offer too many costs 16 bytes per block and no block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from cache.block import BlockKey
from cache.homes.rendezvous import Members, ranking

HINTS_MAX = 1 << 16


def owed(key: BlockKey, me: str, before: Members, after: Members, replicas: int) -> list[str]:
    """To whom `me`, who holds `key`, should offer it now that the members are `after` and no longer `before`. Of
    those who had it one offers: the best of the former homes that is still there. When none is, or nobody knows who
    they were (`before` is empty: this node has just started), whoever holds it does. Who holds it and is no home of it
    offers it to the first: the homes may have agreed on another value without it."""
    now = ranking(key, after, replicas)
    if not before:
        return [name for name in now if name != me]
    was = ranking(key, before, replicas)
    if was == now:
        return []
    left = [name for name in was if name in after]
    if left and left[0] != me:
        return now[:1] if me not in now else []
    return [name for name in now if name not in was and name != me]


class Hints:
    """Blocks kept here for others, by the home that should have them (hinted hand-off; DeCandia et al., Dynamo, 2007,
    section 4.6)."""

    def __init__(self) -> None:
        self._hints: OrderedDict[BlockKey, str] = OrderedDict()

    def add(self, key: BlockKey, home: str) -> None:
        """Oldest hints go first when there are too many: their blocks stay, only the way home is forgotten."""
        self._hints[key] = home
        self._hints.move_to_end(key)
        if len(self._hints) > HINTS_MAX:
            self._hints.popitem(last=False)

    def settled(self, keys: Iterable[BlockKey]) -> None:
        """They are at home, or gone."""
        for key in keys:
            self._hints.pop(key, None)

    def due(self, home: str, most: int) -> list[BlockKey]:
        """At most so many keys that `home` should have, oldest first."""
        out = []
        for key, owner in self._hints.items():
            if owner == home:
                out.append(key)
                if len(out) == most:
                    break
        return out

    def owners(self) -> set[str]:
        return set(self._hints.values())

    def forget(self, home: str) -> None:
        """It is gone for good: by the ranking without it, the blocks are where they belong or others offer them."""
        self.settled([key for key, owner in self._hints.items() if owner == home])

    def __len__(self) -> int:
        return len(self._hints)
