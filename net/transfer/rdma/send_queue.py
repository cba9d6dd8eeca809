"""Bookkeeping of a send queue: credits and selective signalling. Pure.

A work request occupies a slot of the queue until its own or a later *signalled* completion has been polled: real cards
free slots only then (Soft-RoCE frees them earlier, so only this count protects against an overrun). Requests of one
queue complete in order, so one completion covers all earlier requests. Every `signal_every`-th request is signalled,
and the last of a batch, so that every request gets a completion, unless the caller learns otherwise that it has landed:
a completion that nobody waits for would only wake a thread. A request that fails always has one.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class SendQueue(Generic[T]):
    """Requests in flight, oldest first; each has an item of the caller."""

    def __init__(self, depth: int, signal_every: int) -> None:
        """`depth` requests fit. Raises ValueError unless 1 <= signal_every <= depth."""
        if not 1 <= signal_every <= depth:
            raise ValueError(f"signal_every {signal_every} must be between 1 and the depth {depth}")
        self.depth = depth
        self._signal_every = signal_every
        self._under_way: deque[tuple[int, T]] = deque()
        self._next = 1

    @property
    def room(self) -> int:
        """Number of requests that may be posted now."""
        return self.depth - len(self._under_way)

    def post(self, items: list[T], signal_last: bool = True) -> list[tuple[int, bool]]:
        """(number, signalled) of each new request. Raises ValueError if there is no room for them."""
        if len(items) > self.room:
            raise ValueError(f"{len(items)} requests do not fit into {self.room} free slots")
        numbers = range(self._next, self._next + len(items))
        self._next += len(items)
        self._under_way.extend(zip(numbers, items, strict=True))
        last = numbers[-1] if signal_last else None
        return [(number, number % self._signal_every == 0 or number == last) for number in numbers]

    def knows(self, number: int) -> bool:
        """Whether the request `number` is in flight; requests of earlier generations are not."""
        return bool(self._under_way) and self._under_way[0][0] <= number < self._next

    def completed(self, number: int) -> list[T]:
        """The request `number` succeeded. Returns its item and the items of all earlier requests, oldest first."""
        done = []
        while self._under_way and self._under_way[0][0] <= number:
            done.append(self._under_way.popleft()[1])
        return done

    def failed(self, number: int) -> tuple[list[T], list[T]]:
        """The request `number` failed, which ends the queue. Returns (items of successful requests, items of the
        others, beginning with `number`)."""
        done = self.completed(number - 1)
        return done, self.clear()

    def clear(self) -> list[T]:
        """Drop all requests in flight; returns their items, oldest first."""
        left = [item for _, item in self._under_way]
        self._under_way.clear()
        return left

    def __len__(self) -> int:
        return len(self._under_way)
