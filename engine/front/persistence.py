"""Decides whether and when to retry a request. Pure.

A new request that no node can take waits a bounded time. A request that a node has begun is kept until its deadline,
because even the only node of a role may be started again. Two events end it: MAX_FUTILE_ATTEMPTS attempts in a row that
began and produced no token (the request itself may be what kills its nodes), and the deadline. The last of these
attempts loads no prefix: blocks of the pool may be what made the others fail.

The choices of one request are kept together: one that no node can take waits if another one has begun, or may still.
"""

from __future__ import annotations

from net.http.common.frontend import Choices

MAX_FUTILE_ATTEMPTS = 4
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5
"""A node that refuses connections does so within 1 ms, so the pause doubles with each refusal in a row."""


class Persistence:
    """The retry state of one request. All times are on one monotonic clock."""

    def __init__(self, accepted: float, deadline: float, new_patience_s: float, choices: Choices | None = None) -> None:
        """new_patience_s: how long a request that has not begun waits for a node of a missing role. choices: see
        Frontend.generate."""
        self.choices = choices or Choices()
        self._deadline, self._new_until = deadline, accepted + new_patience_s
        self._refusals = self._in_vain = self._tokens = 0

    @property
    def promised(self) -> bool:
        """Whether a node has begun it, or another choice of its request."""
        return self.choices.begun

    @property
    def waits(self) -> bool:
        """Whether it waits for room. While another choice asks for its first node, the request may still
        begin."""
        return self.promised or self.choices.trying > 0

    def begun(self) -> None:
        """The nodes have accepted an attempt."""
        self.choices.begun = True
        self._refusals = 0

    def failed(self, tokens: int) -> bool:
        """A begun attempt has failed; `tokens` counts the output tokens of the request so far. Returns False when the
        acceptor must not retry."""
        self._in_vain = 0 if tokens > self._tokens else self._in_vain + 1
        self._tokens = tokens
        return self._in_vain < MAX_FUTILE_ATTEMPTS

    @property
    def last(self) -> bool:
        """Whether the next attempt, if it brings no token, is the last one."""
        return self._in_vain + 1 >= MAX_FUTILE_ATTEMPTS

    def pause_s(self, now: float) -> float | None:
        """No node could take the request. Returns the seconds until the next try, or None to give up."""
        left = (self._deadline if self.waits else min(self._deadline, self._new_until)) - now
        if left <= 0:
            return None
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * (1 << min(self._refusals, 10)))
        self._refusals += 1
        return min(pause, left)
