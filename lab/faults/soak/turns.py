"""Which nodes end in each turn of a churn, how, and what begins in their place: drawn by a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KILL, TERM, DRAIN = "SIGKILL", "SIGTERM", "drain"
WAYS = {KILL: 0.5, TERM: 0.2, DRAIN: 0.3}
"""How a node ends -> how often."""

AWAY_MAX_S = 5.0
"""Longest time until another node begins. The others have noticed that a node is gone after 2 to 3 s, so some return
before that."""

Plan = Sequence[tuple[str, str]]
"""(name, role) of each node, as lab.launch.nodes.parse_nodes gives them."""


@dataclass(frozen=True, slots=True)
class Change:
    """One node ends, and another one of the same role begins. With the same name it also has the same ports."""

    ends: str
    how: str
    begins: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What happens at one time. `away_s`: seconds between the ends and the beginnings."""

    changes: tuple[Change, ...]
    away_s: float


def kind_of(name: str) -> str:
    """'decode+store-12' -> 'decode+store'."""
    return name.rpartition("-")[0]


def survivors(plan: Plan, share: float, seed: int) -> set[str]:
    """Nodes that no turn ends: this share of each kind, and at least one, so that every role always has a node."""
    rng = random.Random(seed)
    kept: set[str] = set()
    for kind in dict.fromkeys(kind_of(name) for name, _ in plan):
        names = [name for name, _ in plan if kind_of(name) == kind]
        kept.update(rng.sample(names, max(1, round(share * len(names)))))
    return kept


def turns(plan: Plan, kept: set[str], at_once: int, seed: int) -> Iterator[Turn]:
    """Endless; empty if all nodes are kept. In each turn one to `at_once` nodes end. Half of those that begin are new
    to the others, with a number that was never used."""
    rng = random.Random(seed)
    there = sorted(name for name, _ in plan if name not in kept)
    following = {kind_of(name): 0 for name, _ in plan}
    for name, _ in plan:
        following[kind_of(name)] = max(following[kind_of(name)], int(name.rpartition("-")[2]) + 1)
    while there:
        changes = []
        for ends in rng.sample(there, min(len(there), rng.randint(1, at_once))):
            how = rng.choices([*WAYS], [*WAYS.values()])[0]
            begins = ends
            if rng.random() < 0.5:
                kind = kind_of(ends)
                begins = f"{kind}-{following[kind]}"
                following[kind] += 1
            changes.append(Change(ends, how, begins))
        there = sorted(
            {*there, *(one.begins for one in changes)} - {one.ends for one in changes if one.ends != one.begins}
        )
        yield Turn(tuple(changes), rng.choice([0.0, rng.uniform(0.0, AWAY_MAX_S)]))
