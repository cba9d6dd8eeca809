"""Loads a prefix layer by layer while the engine computes with it. Before the attention of layer l the engine thread
waits until the prefix's layer l has landed, so that prefill takes max(load, compute) (arXiv 2407.00079, section 5.2).
The results count only if the last layer arrives and all checksums match. Otherwise the attempt ends, and the next
attempt of the request computes the prompt (`Request.fetches`).

A step that waits delays all its requests. So if there are other requests, a request joins a step only when the missing
layers should land before the step needs them, and the step's wait is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence

from cache.store.calls import HOME_ERRORS
from engine.step.request import Request

log = logging.getLogger("mooncake.engine")


def hides(landed: int, layers: int, load_s: float, step_s: float) -> bool:
    """Whether a step of `step_s` seconds that begins now need not wait for a prefix, of which `landed` of `layers`
    layers arrived in the last `load_s` seconds. Layer l arrives after (l + 1 - landed) load_s / landed and is used
    after l step_s / layers. Both are linear in l, so the next layer and the last one decide."""
    if not landed:
        return False
    each_s, used_s = load_s / landed, step_s / layers
    return all((at + 1 - landed) * each_s <= at * used_s for at in (landed, layers - 1) if landed <= at < layers)


class LayerGate:
    """Counts the landed layers. Call `landed` and `open` on the event loop, `wait` in the engine thread."""

    def __init__(self, patience_s: float | None = None) -> None:
        """patience_s: maximum total wait for all layers; after it, the gate is `late` and open."""
        self.late = False
        self._patience_s = patience_s
        self._count = 0
        self._open = False
        self._changed = threading.Condition()

    def landed(self, layer: int) -> None:
        """Layers 0 .. `layer` have landed."""
        with self._changed:
            self._count = max(self._count, layer + 1)
            self._changed.notify_all()

    def open(self) -> None:
        """End all waits: the load has succeeded or failed."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        with self._changed:
            begin = time.monotonic()
            if not self._changed.wait_for(lambda: self._open or self._count > layer, self._patience_s):
                self.late = self._open = True
            elif self._patience_s is not None:
                self._patience_s = max(0.0, self._patience_s - (time.monotonic() - begin))


class LayeredLoad:
    """The running load of one request."""

    def __init__(self, first: int, block_ids: Sequence[int], gate: LayerGate, task: asyncio.Task[bool]) -> None:
        """block_ids: the request's blocks from index `first`; task: returns whether they arrived whole."""
        self.gate = gate
        self._first = first
        self._block_ids = list(block_ids)
        self._task = task

    def serves(self, request: Request) -> bool:
        """Whether the request still has the blocks that are being filled; a preemption releases them."""
        return request.block_ids[self._first : self._first + len(self._block_ids)] == self._block_ids

    async def whole(self) -> bool:
        """Wait for the end of the load. Returns False if it failed, was cancelled, or a step stopped waiting for it."""
        if self.gate.late:
            self.cancel()
        await self.ended()
        if self.gate.late:
            return False
        if self._task.cancelled():
            return False
        if (error := self._task.exception()) is not None:
            if isinstance(error, HOME_ERRORS):
                log.info("a layered load failed: %r", error)
            else:
                log.error("a layered load failed", exc_info=error)
            return False
        return self._task.result()

    async def ended(self) -> None:
        """Wait until nothing writes to the blocks."""
        await asyncio.wait([self._task])

    def cancel(self) -> None:
        self._task.cancel()


class Arriving:
    """Prefixes that are still arriving for scheduled requests, whose next step waits for them."""

    def __init__(self) -> None:
        self._loads: dict[str, LayeredLoad] = {}

    def add(self, request: Request, load: LayeredLoad) -> None:
        self._loads[request.request_id] = load

    def drop(self, request_id: str) -> None:
        """The request has ended. Its blocks stay held until nothing writes to them."""
        if (load := self._loads.pop(request_id, None)) is not None:
            load.cancel()

    def gates(self, requests: Iterable[Request]) -> dict[str, LayerGate]:
        """The gates that a step over `requests` has to wait for, by request id."""
        if not self._loads:
            return {}
        pairs = [(request, self._loads.get(request.request_id)) for request in requests]
        return {request.request_id: load.gate for request, load in pairs if load is not None and load.serves(request)}

    async def settle(self, requests: Iterable[Request]) -> list[tuple[Request, bool]]:
        """After a step over `requests`: (request, whether its prefix is whole) for each prefix that arrived during
        it."""
        settled = []
        for request in [request for request in requests if request.request_id in self._loads]:
            load = self._loads.pop(request.request_id)
            if load.serves(request):
                settled.append((request, await load.whole()))
            else:  # a preemption released those blocks
                load.cancel()
        return settled

    async def close(self) -> None:
        for load in self._loads.values():
            load.cancel()
            await load.ended()
        self._loads.clear()
