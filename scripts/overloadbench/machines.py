"""Prefill and decode nodes in virtual time: first come, first served prefill; decode steps that grow with the batch.

prefill     a0 + a1 n + a2 n^2                            (sched/cost.py)
one step    d0 + d1 batch
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from sched.rejection import OutputLengths, running_soon


@dataclass(frozen=True, slots=True)
class Speed:
    """Like a node of 8 A800 with a 70B model; decode as if every request had a long context."""

    prefill: tuple[float, float, float] = (10e-3, 1.0e-4, 1.0e-9)
    step_s: float = 25e-3
    step_per_request_s: float = 2e-3

    def prefill_s(self, tokens: int) -> float:
        a0, a1, a2 = self.prefill
        return a0 + a1 * tokens + a2 * tokens * tokens

    def decode_step_s(self, batch: int) -> float:
        return self.step_s + self.step_per_request_s * batch


@dataclass(slots=True)
class Prefill:
    """One node; its queue is the time until which it is busy."""

    busy_until: float = 0.0
    finishing: list[float] = field(default_factory=list)

    def wait_s(self, now: float) -> float:
        return max(0.0, self.busy_until - now)

    def waiting(self, now: float) -> int:
        self.finishing = [end for end in self.finishing if end > now]
        return max(0, len(self.finishing) - 1)

    def add(self, now: float, seconds: float) -> float:
        """When the prompt is done."""
        self.busy_until = max(now, self.busy_until) + seconds
        self.finishing.append(self.busy_until)
        return self.busy_until


@dataclass(slots=True)
class Decode:
    """One node. All running requests make a token per step, so one counter of steps serves for all: a request that
    joined at step s with t tokens to make ends at step s + t."""

    speed: Speed
    most: int
    lengths: OutputLengths = field(default_factory=OutputLengths)
    steps: float = 0.0
    at: float = 0.0
    running: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (last step, request, tokens)
    coming: int = 0  # requests placed here whose prefill is not done

    def advance(self, now: float) -> None:
        """No request ends between `at` and `now`."""
        if self.running:
            self.steps += (now - self.at) / self.step_s()
        self.at = now

    def step_s(self, more: int = 0) -> float:
        return self.speed.decode_step_s(len(self.running) + more)

    def next_end(self) -> float:
        """When the next request ends if nobody joins."""
        return self.at + max(0.0, self.running[0][0] - self.steps) * self.step_s() if self.running else float("inf")

    def join(self, now: float, request: int, tokens: int) -> None:
        self.advance(now)
        heapq.heappush(self.running, (self.steps + tokens, request, tokens))

    def leave(self, now: float) -> int:
        """The request that ends at `next_end`."""
        self.advance(now)
        _, request, tokens = heapq.heappop(self.running)
        self.lengths.ended(tokens)
        return request

    def soon(self, horizon_s: float) -> int:
        """Requests decoding then, as the node itself predicts."""
        made = [max(0, round(tokens - (end - self.steps))) for end, _, tokens in self.running]
        return running_soon(made, self.coming, self.lengths.mean, self.step_s(), horizon_s, self.most)
