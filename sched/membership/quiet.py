"""Which nodes an observer asks for a sign of life, and which of them it has reason to suspect. Pure.

The failure detector probes one node per period, so it finds a lost node after up to 2n - 3 periods, or later if this
node takes its own health for bad. An observer that waits for certain nodes, such as the acceptor of their streams,
notices sooner that one of them has said nothing for a while. That alone is no reason for a suspicion: a long step makes
no token, and yet its node lives. So the observer asks, and a node is late when it has neither answered nor said
anything for

    ANSWERS x the longest that an answer took lately, at least LEAST_S, at most MOST_S; before any answer, MOST_S

The limit follows distance and jitter of the link, and how busy the node is. A suspicion is no verdict: the node can
refute it. Time counts only as far as the observer itself was running: between two looks at most LOOK_S.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

PERIOD_S = 0.05
"""Between two looks, roughly."""

LOOK_S = 0.1
"""The most that counts between two looks. An observer that was stopped does not take its pause for one of others."""

QUIET_S = 0.1
"""A node that has said nothing for this long is asked."""

ANSWERS, LEAST_S, MOST_S = 4.0, 0.5, 1.5
HALF_LIFE_S = 30.0
"""After this much counted time, the longest answer counts half."""


@dataclass(slots=True)
class _Node:
    quiet_s: float = QUIET_S  # since its last sign of life; one that was never asked is asked at once
    asked_s: float = math.nan  # since the open question
    late: bool = False
    longest_s: float = math.nan  # the longest answer, as it counted when the last one came
    answered_at: float = 0.0  # in counted time


class Quiet:
    """The nodes that one observer waits for. All times are counted ones, except those of `look`."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._looked = -math.inf
        self._counted = 0.0

    def look(self, now: float, nodes: Collection[str]) -> tuple[list[str], list[str]]:
        """`nodes`: those that the observer waits for. Returns (those to ask now, those that have become late)."""
        passed = min(max(0.0, now - self._looked), LOOK_S)
        self._looked = now
        self._counted += passed
        asked, late = [], []
        for name in nodes:
            one = self._nodes.setdefault(name, _Node())
            one.quiet_s += passed
            if math.isnan(one.asked_s):
                if one.quiet_s >= QUIET_S:
                    one.asked_s = 0.0
                    asked.append(name)
                continue
            one.asked_s += passed
            if not one.late and min(one.asked_s, one.quiet_s) > self.limit_s(name):
                one.late = True
                late.append(name)
        return asked, late

    def heard(self, name: str) -> None:
        """The node has said something."""
        if (one := self._nodes.get(name)) is not None:
            one.quiet_s, one.late = 0.0, False

    def answered(self, name: str) -> None:
        """The node has answered the question."""
        self.heard(name)
        if (one := self._nodes.get(name)) is not None and not math.isnan(one.asked_s):
            one.longest_s = max(one.asked_s, 0.0 if math.isnan(one.longest_s) else self._lately_s(one))
            one.asked_s, one.answered_at = math.nan, self._counted

    def forget(self, name: str) -> None:
        """The node is gone, or its question was lost with a connection."""
        self._nodes.pop(name, None)

    def late(self, name: str) -> bool:
        """Whether the node has said nothing since it was found late."""
        return name in self._nodes and self._nodes[name].late

    def limit_s(self, name: str) -> float:
        """Seconds after which a question without an answer makes the node late."""
        one = self._nodes[name]
        return MOST_S if math.isnan(one.longest_s) else min(MOST_S, max(LEAST_S, ANSWERS * self._lately_s(one)))

    def _lately_s(self, one: _Node) -> float:
        return one.longest_s * math.exp2((self._counted - one.answered_at) / -HALF_LIFE_S)
