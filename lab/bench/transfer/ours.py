"""This project's transfer engine under uvloop: two nodes, one region each."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from itertools import cycle, repeat
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import uvloop

from lab.bench.transfer.agent import Arena, Call
from lab.bench.transfer.stall import Watch
from net.channel.channel import Channel
from net.channel.cluster_key import ClusterKey
from net.transfer.common.memory import Region
from net.transfer.engine import Op, TransferEngine

STREAMS = 8  # concurrent submissions while stalls are measured


def make(name: str, role: str, congestion: str) -> Any:
    """ours-tcp-key is ours-tcp with a cluster key, ours-tcp-sleep without busy polling."""
    _, transport, *how = name.split("-")
    tcp: dict[str, Any] = {"congestion": congestion} | ({"busy_poll_us": 0} if "sleep" in how else {})
    return Node(role, transport, "key" in how, {"tcp": tcp})


def cluster_key() -> ClusterKey:
    """A fixed key that both processes know."""
    with NamedTemporaryFile("w") as file:
        file.write("5c" * 32)
        file.flush()
        return ClusterKey(Path(file.name))


async def timed(
    move: Callable[..., Awaitable[Any]],
    calls: Iterable[Sequence[Any]],
    seconds: float,
    most: int = 1 << 62,
    check: Callable[[Any], None] = lambda result: None,
) -> list[float]:
    """Seconds of each `move(*call)`, for `seconds` and at most `most` calls; neither the next call nor `check` of a
    result is timed."""
    clock = time.perf_counter
    took: list[float] = []
    end = clock() + seconds
    for call in calls:
        begin = clock()
        result = await move(*call)
        now = clock()
        check(result)
        took.append(now - begin)
        if now >= end or len(took) >= most:
            break
    return took


class Loop:
    """An event loop in a separate thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class Node(Loop):
    """Owner or client."""

    def __init__(self, role: str, transport: str, key: bool, options: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self._role, self._transport = role, transport
        self._key = cluster_key() if key else None
        self._options = options

    def start(self, remote: Arena) -> dict[str, Any]:
        return {"address": self.run(self._up(remote))}

    def connect(self, info: dict[str, Any], local: Arena) -> None:
        self.run(self._up(local))
        self._channel.introduce("owner", tuple(info["address"]))
        path = self.run(self._engine.open("owner"))
        if path.transport != self._transport:
            raise RuntimeError(f"{self._transport} cannot be used: {path.refused}")

    async def _up(self, arena: Arena) -> tuple[str, int]:
        self._channel = Channel(self._role, {}, cluster_key=self._key)
        self._engine = TransferEngine(self._channel, [self._transport], self._options)
        self._engine.register(Region.attach(self._role, os.dup(arena.memfd), arena.nbytes))
        return await self._channel.start("127.0.0.1")

    def prepare(self, size: int, calls: Sequence[Call]) -> Sequence[Any]:
        return [list(zip(ours, theirs, repeat(size))) for ours, theirs in calls]

    def measure(self, op: str, prepared: Sequence[Any], seconds: float) -> list[float]:
        return list(self.run(self._measure(Op(op), prepared, seconds)))

    async def _measure(self, op: Op, prepared: Sequence[Any], seconds: float) -> list[float]:
        calls = cycle([("owner", op, "client", "owner", spans) for spans in prepared])
        return await timed(self._engine.submit, calls, seconds)

    def stall(self, order: dict[str, Any]) -> dict[str, Any]:
        """How late this node's loop runs while the client moves blocks of `size` in STREAMS concurrent submissions."""
        return dict(self.run(self._stall(order)))

    async def _stall(self, order: dict[str, Any]) -> dict[str, Any]:
        watch = Watch()
        if self._role == "client":
            calls = self.prepare(order["size"], order["calls"])
            share = [calls[i::STREAMS] for i in range(min(STREAMS, len(calls)))]
            await asyncio.gather(*(self._measure(Op(order["op"]), one, order["seconds"]) for one in share))
        else:
            await asyncio.sleep(order["seconds"])
        return dict(watch.stop())
