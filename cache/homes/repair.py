"""Repair: which node must offer a copy to which, after membership changes and after homes refused their blocks. Pure.

No node knows the blocks of another, and need not: the answer to an offer of keys names the missing ones, so a useless
offer costs 16 bytes per block and moves no block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from cache.block import BlockKey
from cache.homes.rendezvous import Members, ranking

HINTS_MAX = 1 << 16


def owed(key: BlockKey, me: str, before: Members, after: Members, replicas: int) -> list[str]:
    """The nodes to which `me`, which holds `key`, must offer it after the members changed from `before` to `after`.
    Only one holder offers: the best of the former homes that is still a member. If there is none, or the former homes
    are unknown (`before` is empty: this node has just started), every holder offers. A holder that is not a home offers
    the key to the first home, because the homes may have agreed on another value without it."""
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
    """Blocks kept here for other homes, by home (hinted hand-off; DeCandia et al., Dynamo, 2007, section 4.6)."""

    def __init__(self) -> None:
        self._hints: OrderedDict[BlockKey, str] = OrderedDict()

    def add(self, key: BlockKey, home: str) -> None:
        """Add a hint. If there are too many, the oldest are dropped: their blocks stay here, but are not handed
        back."""
        self._hints[key] = home
        self._hints.move_to_end(key)
        if len(self._hints) > HINTS_MAX:
            self._hints.popitem(last=False)

    def settled(self, keys: Iterable[BlockKey]) -> None:
        """These keys have reached their homes or are gone."""
        for key in keys:
            self._hints.pop(key, None)

    def due(self, home: str, most: int) -> list[BlockKey]:
        """At most `most` keys that `home` should have, oldest first."""
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
        """The home is gone for good. In the ranking without it, its blocks are at home or are offered by others."""
        self.settled([key for key, owner in self._hints.items() if owner == home])

    def __len__(self) -> int:
        return len(self._hints)
