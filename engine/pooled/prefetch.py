"""How long a request waits for a prefix that is on its way from lower tiers and other nodes (--prefetch).

    wait          until all of it is here
    timeout       so long at most; what has arrived by then is used and the rest is computed
    best-effort   while other requests keep this node busy; one window of blocks in any case

Whole blocks from the front count: a window that was cut off is not used.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from cache.block import BlockKey
from cache.results import GetResult

WINDOW_BLOCKS = 64

Get = Callable[[Sequence[BlockKey], Sequence[int]], Awaitable[GetResult]]
"""Fetches the leading run of keys that can be had into blocks of the arena."""


class Prefetch:
    def __init__(self, policy: str, timeout_s: float, busy: Callable[[], bool]) -> None:
        """busy: whether this node computes for others now."""
        self.policy = policy
        self._timeout_s = timeout_s
        self._busy = busy

    async def fetch(self, get: Get, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> GetResult:
        """The leading run of `keys` that `get` brings in time, in the arena's blocks `block_ids`."""
        if self.policy == "wait":
            return await get(keys, block_ids)
        deadline = asyncio.get_running_loop().time() + self._timeout_s if self.policy == "timeout" else None
        parts: list[GetResult] = []
        for first in range(0, len(keys), WINDOW_BLOCKS):
            if first and self.policy == "best-effort" and not self._busy():
                break
            window = slice(first, first + WINDOW_BLOCKS)
            try:
                async with asyncio.timeout_at(deadline):
                    parts.append(await get(keys[window], block_ids[window]))
            except TimeoutError:
                break
            if parts[-1].blocks < len(keys[window]):
                break
        return total(parts)


def total(parts: Sequence[GetResult]) -> GetResult:
    """Of windows that follow each other."""
    counts: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
    for part in parts:
        for count, more in zip(counts, (part.sources, part.transports, part.tiers), strict=True):
            count.update(more)
    sources, transports, tiers = map(dict, counts)
    blocks, nbytes, saved = (sum(getattr(part, name) for part in parts) for name in ("blocks", "nbytes", "saved_bytes"))
    return GetResult(blocks, nbytes, sources, transports, tiers, saved_bytes=saved)
