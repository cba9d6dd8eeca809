"""Router: chooses the next home to ask for a block, and the homes to write it to. Pure.

Nothing is looked up: the candidates follow from the key, the members, and three observations of this node.

 1. Recent joins. Until the former homes have moved the new member's blocks to it, its keys are also found there.
 2. Hot keys, as reported by homes. They have more replicas than others for a while.
 3. The pace of each home and its bytes in flight (cache/homes/pace.py): a get asks the replica that should finish
    first, so the nearest one is preferred until it is busier.

A walk is the sequence of questions of one call: a wave with one message per home, then another wave for the positions
not found, until there is no candidate left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache.block import BlockKey
from cache.homes.pace import Paces
from cache.homes.rendezvous import Members, by_home, ranking

GRACE_S = 60.0  # after a join, the new member's keys are also searched at their former homes for this long
HOT_S = 30.0  # how long a key stays hot after its home reported it
HOT_KEYS_MAX = 4096
SPARES = 2  # number of members beyond a key's homes that a call may ask


class Router:
    """The view of node `me`. `replicas`: copies of every block."""

    def __init__(self, me: str, replicas: int = 1, grace_s: float = GRACE_S) -> None:
        if replicas < 1:
            raise ValueError(f"a block must have at least one copy, not {replicas}: see --replicas")
        self.me = me
        self.replicas = replicas
        self.members: Members = {}
        self._grace_s = grace_s
        self._joined: dict[str, float] = {}  # node -> time of the join
        self._former: Members = {}  # members without these
        self._hot: OrderedDict[BlockKey, tuple[int, float]] = OrderedDict()  # replicas, until when
        self.paces = Paces(me)

    # --- queries

    def update(self, now: float, members: Members) -> None:
        """Set the alive members with a share. The first members seen do not count as recent joins."""
        if members == self.members and not self._joined:
            return
        if self.members:
            self._joined |= {name: now for name in members if name not in self.members}
        self._joined = {name: at for name, at in self._joined.items() if name in members and now - at < self._grace_s}
        self.members = dict(members)
        self._former = {name: weight for name, weight in members.items() if name not in self._joined}
        self.paces.keep(set(members))

    def heated(self, now: float, key: BlockKey, replicas: int) -> None:
        """A home reports that `key` has `replicas` copies."""
        self._hot[key] = (replicas, now + HOT_S)
        self._hot.move_to_end(key)
        if len(self._hot) > HOT_KEYS_MAX:
            self._hot.popitem(last=False)

    # --- where

    def homes(self, key: BlockKey) -> list[str]:
        """The homes of `key`, best first."""
        return ranking(key, self.members, self.replicas)

    def replicas_of(self, now: float, key: BlockKey) -> list[str]:
        """The nodes that should have the key: its homes, and more if it is hot."""
        if self._hot and (hot := self._hot.get(key)) is not None:
            count, until = hot
            if now < until:
                return ranking(key, self.members, max(count, self.replicas))
            del self._hot[key]
        return ranking(key, self.members, self.replicas)

    def former_homes(self, key: BlockKey) -> list[str]:
        """The homes before the recent joins; empty if there were none."""
        return ranking(key, self._former, self.replicas) if self._joined and self._former else []

    def homes_now(self, now: float, key: BlockKey) -> list[str]:
        """The same as `replicas_of`. Any thread may ask."""
        count, until = self._hot.get(key, (0, 0.0))
        return ranking(key, self.members, max(count, self.replicas) if now < until else self.replicas)

    def decides_alone(self, keys: Iterable[BlockKey]) -> bool:
        """Whether no node but its home can have any of these keys. Any thread may ask."""
        return self.replicas == 1 and not self._joined and not (self._hot and any(key in self._hot for key in keys))

    def single(self) -> bool:
        """Whether every key has exactly one candidate, so that a miss there is final."""
        return self.replicas == 1 and not self._joined and not self._hot

    def read(self, now: float, keys: Sequence[BlockKey], block_bytes: int) -> ReadWalk:
        return ReadWalk(self, now, keys, block_bytes)

    def write(self, keys: Sequence[BlockKey], replicas: int = 0) -> WriteWalk:
        return WriteWalk(self, keys, replicas)


class ReadWalk:
    """The walk of one get or lookup. Call `wave`, then `found` or `elsewhere` per position, until a wave is empty."""

    def __init__(self, router: Router, now: float, keys: Sequence[BlockKey], block_bytes: int) -> None:
        self._router, self._now, self._keys, self._block_bytes = router, now, keys, block_bytes
        self._pending: Sequence[int] = range(len(keys))
        self._found: set[int] = set()
        self._asked: dict[int, list[str]] = {}
        self._spares: dict[int, int] = {}  # number of spare members that may still be asked
        self._alone: set[int] = set()  # positions asked of their last replica
        self._late: dict[int, str] = {}  # homes given up as too slow, which may still have the block
        self.single = router.single()

    def wave(self, leading: bool = False) -> dict[str, list[int]]:
        """Positions to ask for by home, ascending. A position without a candidate is dropped; with `leading`, so are
        all positions after it."""
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
        """The block has arrived; it is not asked for again."""
        self._found.add(position)

    def found_all(self, positions: Iterable[int]) -> None:
        """`found` for several positions."""
        self._found.update(positions)

    def elsewhere(self, position: int) -> None:
        """The asked home did not answer, or has passed the block on to the next member in the ranking."""
        self._spares[position] = min(SPARES, self._spares.get(position, 0) + 1)

    def too_slow(self, position: int, home: str) -> None:
        """The home was given up for another replica. If no other node has the block, it is asked again."""
        self._late[position] = home

    def has_others(self, positions: Sequence[int]) -> bool:
        """Whether each of these positions has another replica that is not slow."""
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
    """The destination of a copy."""

    home: str
    owner: str = ""  # the home for which this node keeps it temporarily; "" = this node is the home
    wait: bool = False  # the last candidate: wait for room there
    copy: bool = False  # whether another home has already accepted the block


class Waves:
    """The questions of one put. Call `wave` and report each target's result per position, until a wave is empty."""

    def __init__(self) -> None:
        self._next: dict[Target, list[int]] = {}

    def wave(self) -> dict[Target, list[int]]:
        """Positions to write by target, ascending."""
        groups, self._next = self._next, {}
        for positions in groups.values():
            positions.sort()
        return groups

    def again(self, position: int, target: Target) -> None:
        """Ask the target for this position in the next wave."""
        self._next.setdefault(target, []).append(position)


class WriteWalk(Waves):
    """The walk of one put whose keys identify their content. `replicas`: copies of each block, if more than usual."""

    def __init__(self, router: Router, keys: Sequence[BlockKey], replicas: int = 0) -> None:
        super().__init__()
        self._router, self._keys = router, keys
        self._replicas = max(router.replicas, replicas)
        self._tried: dict[int, list[str]] = {}
        last = len(router.members) <= self._replicas
        for position, key in enumerate(keys):
            chosen = ranking(key, router.members, self._replicas)
            self._tried[position] = chosen
            for home in chosen:
                self.again(position, Target(home, wait=last))

    def settled(self, position: int, target: Target, answer: int) -> None:
        """The target has the block."""

    def failed(self, position: int, target: Target, *, full: bool) -> None:
        """The target has no room (`full`) or does not answer: the next member in the ranking keeps the block for it. If
        there is no other candidate, a full home is asked to wait."""
        if target.wait:
            return
        key, tried, owner = self._keys[position], self._tried[position], target.owner or target.home
        wide = ranking(key, self._router.members, self._replicas + SPARES)
        spare = next((name for name in wide if name not in tried), None)
        if spare is not None:
            tried.append(spare)
            self.again(position, Target(spare, owner))
        elif full:
            self.again(position, Target(target.home, target.owner, wait=True))
