"""Baselines of NetKV: Algorithm 1 places the prompt, and nothing about the network is known for the decode node."""

from __future__ import annotations

from sched.placement.central import CentralGreedy
from sched.placement.costs import DecodeCosts, least


class DecodeInTurn(CentralGreedy):
    """Decode nodes in turn."""

    tolls = False
    turns = 0

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        self.turns += 1
        return able[self.turns % len(able)]


class DecodeByLoad(CentralGreedy):
    """The decode node with the shortest step among those with room; prefixes and load decide, as in a tuned scheduler
    that knows nothing of links."""

    tolls = False

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        roomy = [i for i in able if costs.headroom[i] >= 0]
        return self.drawn(least(costs.token_s, roomy or able))
