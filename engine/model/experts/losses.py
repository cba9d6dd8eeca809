"""Tokens of a step whose experts were lost, and what becomes of their requests. Pure.

With --expert-loss drop, the result of the routed experts of a token is that of its remaining experts, scaled so that
their weights have the same sum as before: the model adds this result to its residual, and was trained with that sum.
(Upstream's EP skips the terms and does not scale.) A token without any remaining expert gets nothing but the shared
expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FAIL, DROP, WAIT = "fail", "drop", "wait"


@dataclass(frozen=True, slots=True)
class Loss:
    """Of one row of a step. `dropped`: (token, expert) pairs in all layers; `ranks`: that were lost; `fails`: the
    request must end."""

    dropped: int
    ranks: tuple[int, ...]
    fails: bool

    @property
    def reason(self) -> str:
        """For the client of a request that fails."""
        lost = ", ".join(map(str, self.ranks))
        return (
            f"experts that the request needs were lost with rank {lost} of --expert-parallel-size, and no other rank "
            "has them: send it again when the rank is back"
        )


@dataclass(slots=True)
class Losses:
    """Of one step. `tokens`: token of the step -> lost pairs."""

    rule: str = FAIL
    tokens: dict[int, int] = field(default_factory=dict)
    masked: tuple[int, ...] = ()  # the ranks that were lost

    def add(self, token: int, pairs: int) -> None:
        self.tokens[token] = self.tokens.get(token, 0) + pairs

    def by_row(self, order: Sequence[int], lengths: Sequence[int]) -> dict[int, Loss]:
        """Row of the step -> its loss. Tokens are those of rows[order[0]], rows[order[1]], ..., `lengths` of each."""
        found: dict[int, Loss] = {}
        if not self.tokens:
            return found
        begin = 0
        for row, length in zip(order, lengths, strict=True):
            dropped = sum(self.tokens.get(token, 0) for token in range(begin, begin + length))
            begin += length
            if dropped:
                found[row] = Loss(dropped, self.masked, self.rule != DROP)
        return found
