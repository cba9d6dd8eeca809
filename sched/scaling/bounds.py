"""The roles whose nodes start and leave with the load, and how many of each there may be. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sched.gossip.load_word import ROLE_BITS

MIXED = "mixed"
"""The name of nodes with all roles."""

MOST_NODES = 10_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """Nodes of one role: at least `least`, at most `most`, and never below one."""

    role: str  # as `role_name` writes it
    least: int
    most: int

    def clamp(self, nodes: int) -> int:
        return min(self.most, max(self.least, nodes))


def role_name(roles: Iterable[str]) -> str:
    """One name for a set of roles: 'prefill', 'prefill+decode', 'mixed' for all."""
    known = set(roles)
    return MIXED if known >= ROLE_BITS.keys() else "+".join(role for role in ROLE_BITS if role in known)


def parse(text: str) -> tuple[Bounds, ...]:
    """From 'prefill=1..4,decode=2..8'. Raises ValueError with the reason."""
    found: dict[str, Bounds] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([a-z+]+)\s*=\s*(\d{1,6})\s*\.\.\s*(\d{1,6})", part)
        if match is None:
            raise ValueError(f"{part!r} does not have the form ROLE=LEAST..MOST, for example decode=1..4")
        roles = ROLE_BITS.keys() if match[1] == MIXED else match[1].split("+")
        if unknown := [role for role in roles if role not in ROLE_BITS]:
            raise ValueError(f"no role {unknown[0]!r}; the roles are {', '.join(ROLE_BITS)}, or {MIXED}")
        one = Bounds(role_name(roles), int(match[2]), int(match[3]))
        if not 1 <= one.least <= one.most <= MOST_NODES:
            raise ValueError(f"{part!r}: LEAST must be at least 1, and MOST between LEAST and {MOST_NODES}")
        if one.role in found:
            raise ValueError(f"{one.role} appears twice")
        found[one.role] = one
    if not found:
        raise ValueError("it names no role; write for example prefill=1..4,decode=1..8")
    return tuple(found.values())
