"""A prefix that arrives layer by layer while the engine computes with it: before the attention of layer l the engine
thread waits until the prefix's layer l has landed, so that loading takes max(load, compute) (arXiv 2407.00079,
section 5.2). What was computed counts only when the last layer is there and all checksums agree.

A step that waits keeps everybody in it waiting. So a request in company joins a step only when what is still to come
should land before the step gets to it, and a step waits for it only so long.
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
    """Whether a step of `step_s` that begins now need not wait for a prefix of which `landed` of `layers` layers came
    in the last `load_s`. Layer l is due after (l + 1 - landed) load_s / landed and used after l step_s / layers: both
    are lines, so the next layer and the last one decide."""
    if not landed:
        return False
    each_s, used_s = load_s / landed, step_s / layers
    return all((at + 1 - landed) * each_s <= at * used_s for at in (landed, layers - 1) if landed <= at < layers)


class LayerGate:
    """How many layers have landed. `landed` and `open` on the event loop, `wait` in the engine thread."""

    def __init__(self, patience_s: float | None = None) -> None:
        """patience_s: how long it is waited for all layers together; then the gate is `late`, and open."""
        self.late = False
        self._patience_s = patience_s
        self._count = 0
        self._open = False
        self._changed = threading.Condition()

    def landed(self, layer: int) -> None:
        """Layers 0 .. `layer` are there."""
        with self._changed:
            self._count = max(self._count, layer + 1)
            self._changed.notify_all()

    def open(self) -> None:
        """Nobody waits from now on: the load is over, well or not."""
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
    """One request's load under way."""

    def __init__(self, first: int, block_ids: Sequence[int], gate: LayerGate, task: asyncio.Task[bool]) -> None:
        """block_ids: the request's blocks from index `first` on; task: its result says whether they arrived whole."""
        self.gate = gate
        self._first = first
        self._block_ids = list(block_ids)
        self._task = task

    def serves(self, request: Request) -> bool:
        """Whether the request still has the blocks that are being filled; it may have had to give them back."""
        return request.block_ids[self._first : self._first + len(self._block_ids)] == self._block_ids

    async def whole(self) -> bool:
        """Waits for the end of the load; False too when it was cancelled or failed, or a step did not wait for it."""
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
        """Nothing is written into the blocks any more once this returns."""
        await asyncio.wait([self._task])

    def cancel(self) -> None:
        self._task.cancel()


class Arriving:
    """Prefixes whose requests have been let go: their next step waits for them."""

    def __init__(self) -> None:
        self._loads: dict[str, LayeredLoad] = {}

    def add(self, request: Request, load: LayeredLoad) -> None:
        self._loads[request.request_id] = load

    def drop(self, request_id: str) -> None:
        """The request has ended. Its blocks stay held until nothing is written to them any more."""
        if (load := self._loads.pop(request_id, None)) is not None:
            load.cancel()

    def gates(self, requests: Iterable[Request]) -> dict[str, LayerGate]:
        """Request id -> what a step over `requests` has to wait for."""
        if not self._loads:
            return {}
        pairs = [(request, self._loads.get(request.request_id)) for request in requests]
        return {request.request_id: load.gate for request, load in pairs if load is not None and load.serves(request)}

    async def settle(self, requests: Iterable[Request]) -> list[tuple[Request, bool]]:
        """After a step over `requests`: those whose prefix arrived beside it, and whether it is whole."""
        settled = []
        for request in [request for request in requests if request.request_id in self._loads]:
            load = self._loads.pop(request.request_id)
            if load.serves(request):
                settled.append((request, await load.whole()))
            else:  # it had to give those blocks back
                load.cancel()
        return settled

    async def close(self) -> None:
        for load in self._loads.values():
            load.cancel()
            await load.ended()
        self._loads.clear()
