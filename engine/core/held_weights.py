"""HeldWeights: the weights that an engine has in memory, and which of them a request may use. Pure.

Weights are named by what their content hashes to; b"" names those with which the cluster began. One of them serves new
requests. Others were prepared and will serve soon, or served before and finish the requests that began with them: a
request is computed with one and the same weights from its first token to its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

R = TypeVar("R")

WRONG_WEIGHTS = "weights"
"""The code of the refusal of a request whose weights a node does not have, or no longer begins requests with."""


class HeldWeights(Generic[R]):
    """`R`: what computes with the weights."""

    def __init__(self, runner: R) -> None:
        self.current = b""
        self._runners: dict[bytes, R] = {b"": runner}
        self._retired: dict[bytes, float] = {}  # -> when

    def __contains__(self, weights: bytes) -> bool:
        return weights in self._runners

    def __len__(self) -> int:
        return len(self._runners)

    def runner(self, weights: bytes) -> R:
        """Raises KeyError."""
        return self._runners[weights]

    def serves(self, weights: bytes, begun: bool) -> bool:
        """Whether a request may start here; `begun`: other nodes have produced tokens of it. Retired weights begin
        nothing. Prepared ones do, because an acceptor uses them only if all nodes have prepared them."""
        return weights in self._runners and (begun or weights not in self._retired)

    def retired(self) -> Sequence[tuple[bytes, float]]:
        """(weights, time) of those that were replaced, oldest first."""
        return list(self._retired.items())

    def add(self, weights: bytes, runner: R) -> None:
        """They are prepared. Weights that are here already stay as they are."""
        self._runners.setdefault(weights, runner)

    def switch(self, now: float, weights: bytes) -> None:
        """New requests use these. Raises KeyError if they are not here."""
        if weights not in self._runners:
            raise KeyError(weights)
        if weights != self.current:
            self._retired[self.current] = now
            self._retired.pop(weights, None)
            self.current = weights

    def drop(self, weights: bytes) -> R | None:
        """Forget weights that are not the current ones; the caller knows that nothing uses them. None if they are
        current or not here."""
        if weights == self.current:
            return None
        self._retired.pop(weights, None)
        return self._runners.pop(weights, None)
