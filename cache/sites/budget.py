"""LinkBudget: a budget of bytes for one link between sites in one direction: a token bucket. Pure.

The bucket gets `bytes_per_s` tokens per second and holds those of BURST_S at most, and never less than one block. A
transfer takes its tokens before its first byte, so that in any window of T seconds no more than bytes_per_s * T + burst
bytes begin. Tokens of a transfer that fails are not returned: its bytes may have crossed.

A link has one budget per direction, and the nodes of a site that reads over it have equal parts of it
(`divided`), because a common bucket would need a message for each transfer.
"""

from __future__ import annotations

import math

BURST_S = 0.5
LEAST_PAUSE_S = 0.001  # between two looks at a bucket


class LinkBudget:
    """Starts full. `now` may not go back."""

    def __init__(self, bytes_per_s: float, block_bytes: int) -> None:
        """Raises ValueError unless both are above zero."""
        if not 0 < bytes_per_s < math.inf or block_bytes < 1:
            raise ValueError(f"a budget of {bytes_per_s} bytes/s for blocks of {block_bytes} bytes moves nothing")
        self._whole, self._block_bytes = bytes_per_s, block_bytes
        self.bytes_per_s = bytes_per_s
        self.burst_bytes = max(float(block_bytes), BURST_S * bytes_per_s)
        self._tokens = self.burst_bytes
        self._booked = 0.0
        self._at = -math.inf

    def divided(self, now: float, parts: int) -> None:
        """From now on this is one of `parts` equal parts of the budget."""
        self._refill(now)
        self.bytes_per_s = self._whole / max(1, parts)
        self.burst_bytes = max(float(self._block_bytes), BURST_S * self.bytes_per_s)
        self._tokens = min(self._tokens, self.burst_bytes)

    def wait_s(self, now: float, nbytes: float) -> float:
        """Seconds until the last of `nbytes` may begin to cross, after all bytes that are booked."""
        self._refill(now)
        return max(0.0, (self._booked + nbytes - self._tokens) / self.bytes_per_s)

    def at_once(self, blocks: int) -> int:
        """How many of these blocks one transfer may take: as many as the bucket can hold, and at least one."""
        return max(1, min(blocks, int(self.burst_bytes // self._block_bytes)))

    def pause_s(self, nbytes: float) -> float:
        """Seconds until the next look at the bucket, for a transfer that `take` has refused."""
        return max(LEAST_PAUSE_S, nbytes / self.bytes_per_s / 8)

    def take(self, now: float, nbytes: int) -> bool:
        """Take the tokens of a transfer that begins now, if they are there. Raises ValueError for more than the bucket
        can ever hold: take them in parts."""
        if nbytes > self.burst_bytes:
            raise ValueError(f"{nbytes} bytes at once exceed the bucket of {self.burst_bytes:.0f}: take them in parts")
        self._refill(now)
        if nbytes > self._tokens + 1e-6:  # a wait of exactly wait_s ends within rounding of the last token
            return False
        self._tokens -= nbytes
        return True

    def book(self, nbytes: float) -> None:
        """A transfer of `nbytes` will take its tokens: later ones are told to wait behind it."""
        self._booked += nbytes

    def unbook(self, nbytes: float) -> None:
        """This part of the booked bytes was taken, or is not wanted any more."""
        self._booked = max(0.0, self._booked - nbytes)

    def _refill(self, now: float) -> None:
        if now > self._at:
            if self._at > -math.inf:
                self._tokens = min(self.burst_bytes, self._tokens + (now - self._at) * self.bytes_per_s)
            self._at = now
