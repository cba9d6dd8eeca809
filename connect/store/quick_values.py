"""QuickValues: puts and gets of named values in the calling thread (cache/quick/), as far as that is possible.

A value takes this way if it fits into one slot with its head, so that it is one block. Everything else, and every
unusual answer, goes through the event loop (connect/store/named_values.py), which knows all cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cache.named.names import HEAD, Head, Space
from cache.protocol import OVER
from cache.quick.quick_get import QuickGet
from cache.quick.quick_put import QuickPut
from cache.quick.routes import Routes
from cache.store.remote import Remote
from connect.common.raw_memory import Pieces
from connect.store import codes
from connect.store.named_values import Target
from net.transfer.tcp.blocking_calls import BlockingCalls
from net.transfer.tcp.transport import BUSY_POLL_US


class QuickValues:
    """Any thread may call. Create it on the event loop of `remote`."""

    def __init__(self, remote: Remote, tenant: str) -> None:
        self._calls = BlockingCalls(remote.links, BUSY_POLL_US / 1e6)
        routes = Routes(asyncio.get_running_loop(), remote.store, remote.transfer, self._calls)
        self._get, self._put = QuickGet(routes), QuickPut(routes)
        remote.store.attach(self._put.region)
        self._space = Space.of(tenant)
        self._block_bytes = routes.block_bytes

    def put(self, items: Sequence[tuple[str, Pieces]]) -> dict[int, int]:
        """OK by position for values that the pool has now, QUOTA for those that it refuses because of the tenant's
        quota. Put the others through the event loop."""
        if len({name for name, _ in items}) < len(items):
            return {}  # the first of two values of one name stays
        positions, keys, blocks = [], [], []
        for position, (name, value) in enumerate(items):
            packed = Head(name, value.nbytes).pack()
            if name and value.nbytes and len(packed) + value.nbytes <= self._block_bytes:
                positions.append(position)
                keys.append(self._space.key(name))
                blocks.append([memoryview(bytearray(packed)), *value.views()])
        ends = self._put.put(keys, blocks)
        return {positions[at]: codes.QUOTA if end == OVER else codes.OK for at, end in ends.items()}

    def get(self, names: Sequence[str], target: Target) -> dict[int, int]:
        """The bytes by position, of values that are where `target` wants them. Ask for the others through the event
        loop: `target` is called again for them."""
        heads = [len(name.encode(errors="surrogateescape")) + HEAD.size for name in names]
        found: dict[int, tuple[bytearray, int]] = {}

        def room(position: int, nbytes: int) -> list[memoryview] | None:
            length = nbytes - heads[position]
            into = target(position, length) if length > 0 else 0
            if isinstance(into, int):
                return None
            head = bytearray(heads[position])
            found[position] = head, length
            return [memoryview(head), *into.views(length)]

        arrived = self._get.get([self._space.key(name) for name in names], room)
        ends: dict[int, int] = {}
        for position in arrived:
            head, length = found[position]
            if head == Head(names[position], length).pack():
                ends[position] = length
        return ends

    def close(self) -> None:
        """No call may run."""
        self._calls.close()
        self._get.close()
        self._put.close()
