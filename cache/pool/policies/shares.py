"""ClassShares: every service class has a part of the cache, which others may borrow but not keep. Pure, O(classes).

A class may use free space of others. The class that is furthest above its share gives way first, so a flood of one
class, once the cache is full, evicts its own blocks and not those of a class that is within its share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from cache.pool.policy import PLAIN, EvictionPolicy, Facts

OTHERS = ""
"""All classes without a share of their own; they use the rest."""


def parse(text: str) -> dict[str, float]:
    """'interactive=0.6,batch=0.1' -> shares by class; 'none' -> {}. Raises ValueError."""
    if text == "none":
        return {}
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        try:
            shares[name.strip()] = float(share)
        except ValueError:
            raise ValueError(f"{part!r} is not CLASS=SHARE; write interactive=0.6,batch=0.1 or none") from None
    check(shares)
    return shares


def check(shares: Mapping[str, float]) -> None:
    """Raises ValueError unless all are in (0, 1] and their sum at most 1."""
    if any(not 0 < share <= 1 for share in shares.values()) or sum(shares.values()) > 1 + 1e-9:
        raise ValueError(f"cache shares must be in (0, 1] and add up to 1 at most: {dict(shares)}")


class ClassShares:
    """Wraps one policy per class. An item belongs to the class of the request that added it."""

    def __init__(self, policy: Callable[[], EvictionPolicy], shares: Mapping[str, float]) -> None:
        """shares: class -> part of the cache. Raises ValueError for impossible shares."""
        check(shares)
        self._shares = {**shares, OTHERS: max(0.0, 1 - sum(shares.values()))}
        self._policies = {name: policy() for name in self._shares}
        self._sizes = dict.fromkeys(self._shares, 0)  # items, including pinned ones
        self._blocks = dict.fromkeys(self._shares, 0)  # by `took` and `gave`
        self._class_of: dict[Hashable, str] = {}

    def _name(self, service_class: str) -> str:
        return service_class if service_class in self._shares else OTHERS

    def added(self, item: Hashable, facts: Facts = PLAIN) -> None:
        name = self._name(facts.service_class)
        self._class_of[item] = name
        self._sizes[name] += 1
        self._policies[name].added(item, facts)

    def touched(self, item: Hashable) -> None:
        self._policies[self._class_of[item]].touched(item)

    def pinned(self, item: Hashable) -> None:
        self._policies[self._class_of[item]].pinned(item)

    def unpinned(self, item: Hashable) -> None:
        self._policies[self._class_of[item]].unpinned(item)

    def removed(self, item: Hashable) -> None:
        name = self._class_of.pop(item)
        self._sizes[name] -= 1
        self._policies[name].removed(item)

    def victim(self) -> Hashable:
        total = len(self._class_of)
        givers = [name for name, policy in self._policies.items() if len(policy)]
        if not givers:
            raise LookupError("nothing is evictable")
        return self._policies[max(givers, key=lambda name: self._sizes[name] - self._shares[name] * total)].victim()

    def took(self, service_class: str) -> None:
        self._blocks[self._name(service_class)] += 1

    def gave(self, service_class: str) -> None:
        self._blocks[self._name(service_class)] -= 1

    def victim_for(self, service_class: str) -> Hashable | None:
        """A class that would exceed its share takes nothing from a class within its share: it evicts its own blocks, or
        waits until classes above their shares have evictable ones."""
        mine, room = self._name(service_class), sum(self._blocks.values())
        above = {name: self._blocks[name] - share * room for name, share in self._shares.items()}
        givers = [name for name, policy in self._policies.items() if len(policy)]
        giver = max(givers, key=above.__getitem__, default=mine)
        if giver != mine and above[giver] <= 0 < above[mine] + 1:
            giver = mine
        return self._policies[giver].victim() if len(self._policies[giver]) else None

    def __len__(self) -> int:
        return sum(map(len, self._policies.values()))
