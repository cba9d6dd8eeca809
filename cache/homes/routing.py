"""Router: which home to ask next for a block, and which to write it to. Pure.

Nothing here is looked up: the candidates follow from the key, the members, and three things this node has seen itself.

 1. Who joined lately. Until the owners have moved what is the newcomer's now, its keys are found at their former homes.
 2. Which keys a home called hot. Those have more replicas than others for a while.
 3. How fast each home answers, and what is under way to it (cache/homes/pace.py): of several replicas the one is asked
 that
    should be done first. So the nearest is preferred until it is the busier one.

A walk is one call's way along the candidates: a wave of questions, one message per home, then another wave for what
was not found, until nobody is left to ask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache.block import BlockKey
from cache.homes.pace import Paces
from cache.homes.rendezvous import Members, by_home, ranking

GRACE_S = 60.0  # so long after a join its keys are also looked for at their former homes
HOT_S = 30.0  # so long a key stays hot after its home said so
HOT_KEYS_MAX = 4096
SPARES = 2  # members beyond a key's homes that a call may turn to


class Router:
    """The view of node `me`. `replicas`: copies of every block."""

    def __init__(self, me: str, replicas: int = 1, grace_s: float = GRACE_S) -> None:
        if replicas < 1:
            raise ValueError(f"a block has at least one copy, not {replicas}: see --replicas")
        self.me = me
        self.replicas = replicas
        self.members: Members = {}
        self._grace_s = grace_s
        self._joined: dict[str, float] = {}  # who, when
        self._former: Members = {}  # without those
        self._hot: OrderedDict[BlockKey, tuple[int, float]] = OrderedDict()  # replicas, until when
        self.paces = Paces(me)

    # --- what is known

    def update(self, now: float, members: Members) -> None:
        """The members alive that have a share. The first ones seen are no newcomers."""
        if members == self.members and not self._joined:
            return
        if self.members:
            self._joined |= {name: now for name in members if name not in self.members}
        self._joined = {name: at for name, at in self._joined.items() if name in members and now - at < self._grace_s}
        self.members = dict(members)
        self._former = {name: weight for name, weight in members.items() if name not in self._joined}
        self.paces.keep(set(members))

    def heated(self, now: float, key: BlockKey, replicas: int) -> None:
        """A home says that there are `replicas` copies of `key`."""
        self._hot[key] = (replicas, now + HOT_S)
        self._hot.move_to_end(key)
        if len(self._hot) > HOT_KEYS_MAX:
            self._hot.popitem(last=False)

    # --- where

    def homes(self, key: BlockKey) -> list[str]:
        """Who keeps `key`, best first."""
        return ranking(key, self.members, self.replicas)

    def replicas_of(self, now: float, key: BlockKey) -> list[str]:
        """Who should have it: its homes, and more when it is hot."""
        if self._hot and (hot := self._hot.get(key)) is not None:
            count, until = hot
            if now < until:
                return ranking(key, self.members, max(count, self.replicas))
            del self._hot[key]
        return ranking(key, self.members, self.replicas)

    def former_homes(self, key: BlockKey) -> list[str]:
        """Who kept it before the latest joins; empty when nobody joined lately."""
        return ranking(key, self._former, self.replicas) if self._joined and self._former else []

    def single(self) -> bool:
        """Every key has exactly one candidate: a miss there is a miss."""
        return self.replicas == 1 and not self._joined and not self._hot

    def read(self, now: float, keys: Sequence[BlockKey], block_bytes: int) -> ReadWalk:
        return ReadWalk(self, now, keys, block_bytes)

    def write(self, keys: Sequence[BlockKey]) -> WriteWalk:
        return WriteWalk(self, keys)


class ReadWalk:
    """Of one get or lookup: `wave`, tell `found` or `elsewhere` for what was asked, and so on until a wave is empty."""

    def __init__(self, router: Router, now: float, keys: Sequence[BlockKey], block_bytes: int) -> None:
        self._router, self._now, self._keys, self._block_bytes = router, now, keys, block_bytes
        self._pending: Sequence[int] = range(len(keys))
        self._found: set[int] = set()
        self._asked: dict[int, list[str]] = {}
        self._spares: dict[int, int] = {}  # how many members beyond the candidates may be asked
        self._alone: set[int] = set()  # asked now of the only replica that is left for them
        self._late: dict[int, str] = {}  # who was given up as too slow, and may yet have it
        self.single = router.single()

    def wave(self, leading: bool = False) -> dict[str, list[int]]:
        """Positions to ask for by home, ascending. What nobody is left for is dropped, and with `leading` all that is
        behind it."""
        if len(self._found) == len(self._keys):
            return {}
        if self.single and not self._asked:
            groups = by_home(self._keys, self._router.members)
            self._asked = {position: [home] for home, positions in groups.items() for position in positions}
            return groups
        groups = {}
        planned: dict[str, int] = {}
        left: list[int] = []
        for position in self._pending:
            if position in self._found:
                continue
            home = self._next(position, planned)
            if home is None:
                if leading:
                    break
                continue
            left.append(position)
            groups.setdefault(home, []).append(position)
            planned[home] = planned.get(home, 0) + self._block_bytes
            self._asked.setdefault(position, []).append(home)
        self._pending = left
        return groups

    def found(self, position: int) -> None:
        """It is here: not asked for again."""
        self._found.add(position)

    def found_all(self, positions: Iterable[int]) -> None:
        """The same for several."""
        self._found.update(positions)

    def elsewhere(self, position: int) -> None:
        """The home that was asked gave no answer, or has passed the block on to the next in the ranking."""
        self._spares[position] = min(SPARES, self._spares.get(position, 0) + 1)

    def too_slow(self, position: int, home: str) -> None:
        """The home was given up for another replica. When nobody else has it, it is asked again."""
        self._late[position] = home

    def has_others(self, positions: Sequence[int]) -> bool:
        """Whether each of those that are asked for now could be had of another replica, which is not slow itself."""
        return not (self.single or self._alone.intersection(positions))

    def _next(self, position: int, planned: dict[str, int]) -> str | None:
        router, key = self._router, self._keys[position]
        asked = self._asked.get(position, ())
        best = [name for name in router.replicas_of(self._now, key) if name not in asked]
        quick = [name for name in best if not router.paces.is_slow(self._now, name)]
        if len(quick) < 2:
            self._alone.add(position)
        if len(best) > 1:
            size, paces = self._block_bytes, router.paces
            return min(quick or best, key=lambda name: (paces.seconds(name, planned.get(name, 0) + size), name))
        if best:
            return best[0]
        for name in router.former_homes(key):
            if name not in asked:
                return name
        spares = self._spares.get(position, 0)
        if spares:
            wide = ranking(key, router.members, len(router.homes(key)) + spares)
            if (spare := next((name for name in wide if name not in asked), None)) is not None:
                return spare
        return self._late.pop(position, None)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to write a copy."""

    home: str
    owner: str = ""  # the home it is kept for, until it can be given back; "" = the home itself
    wait: bool = False  # nobody else is left: wait for room there
    copy: bool = False  # of what another home has taken


class WriteWalk:
    """Of one put: `wave`, tell how each target ended for each position, and so on until a wave is empty."""

    def __init__(self, router: Router, keys: Sequence[BlockKey]) -> None:
        self._router, self._keys = router, keys
        self._tried: dict[int, list[str]] = {}
        self._next: dict[Target, list[int]] = {}
        last = len(router.members) <= router.replicas
        for position, key in enumerate(keys):
            chosen = router.homes(key)
            self._tried[position] = chosen
            for home in chosen:
                self._next.setdefault(Target(home, wait=last), []).append(position)

    def wave(self) -> dict[Target, list[int]]:
        """Positions to write by target, ascending."""
        groups, self._next = self._next, {}
        for positions in groups.values():
            positions.sort()
        return groups

    def again(self, position: int, target: Target) -> None:
        """The same once more: the target could not say yet."""
        self._next.setdefault(target, []).append(position)

    def settled(self, position: int, target: Target, answer: int) -> None:
        """The target has it."""

    def failed(self, position: int, target: Target, *, full: bool) -> None:
        """The target has no room (`full`) or does not answer: the next in the ranking keeps the block for it. When
        nobody else is left, a full home is asked to wait."""
        if target.wait:
            return
        key, tried, owner = self._keys[position], self._tried[position], target.owner or target.home
        wide = ranking(key, self._router.members, self._router.replicas + SPARES)
        spare = next((name for name in wide if name not in tried), None)
        if spare is not None:
            tried.append(spare)
            self._next.setdefault(Target(spare, owner), []).append(position)
        elif full:
            self._next.setdefault(Target(target.home, target.owner, wait=True), []).append(position)
