"""The results of a step, handed out to their requests in pieces that leave the event loop to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.sampling.params import TokenLogprobs
from engine.step.request import Request

HAND_OUT_SIZE = 32
"""Emissions that are handed out in one turn of the event loop; one that ends its request counts as END_SIZE."""

END_SIZE = 4
"""The end of a request takes its acceptor 0.4 ms, a token in its middle 0.1 ms."""

Emit = Callable[[Sequence["Emission"]], None]
"""Receives the results of one step; called on the event loop."""


@dataclass(frozen=True, slots=True)
class Emission:
    """One token of one request, or its end without a token (token_id None)."""

    request: Request
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    num_behind: int = 0  # tokens of the same step in later emissions; 0 = this is the newest token of the request

    @property
    def ends(self) -> bool:
        """Whether it is the last one of its request."""
        return self.request.finished and not self.num_behind


async def hand_out(emissions: Sequence[Emission], emit: Emit) -> None:
    """At most HAND_OUT_SIZE emissions in one turn of the event loop: every token wakes a task of its acceptor, and
    other work of the loop must not wait for hundreds of tasks."""
    some: list[Emission] = []
    size = 0
    for emission in emissions:
        cost = END_SIZE if emission.ends else 1
        if some and size + cost > HAND_OUT_SIZE:
            emit(some)
            await asyncio.sleep(0)
            some, size = [], 0
        some.append(emission)
        size += cost
    if some:
        emit(some)
