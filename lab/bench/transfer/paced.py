"""A TCP link of a given rate inside this host: the kernel paces what this process sends to one port.

Bytes take the time of that link, while both ends, their coders and their copies are real.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from lab.bench.transfer.ours import Loop
from net.channel.channel import Channel
from net.codec.exponents import Exponents
from net.transfer.common.memory import Region
from net.transfer.engine import Op, TransferEngine
from net.transfer.tcp.coding import Coding

SO_MAX_PACING_RATE = 47
"""Of Linux (asm-generic/socket.h); Python has no name for it."""

WAIT_S = 120.0


def pace(port: int, bytes_per_s: int) -> int:
    """Pace every connection of this process to that port of this host; returns their number."""
    paced = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it may be closed by now
            if not entry.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family == socket.AF_INET and one.getpeername()[1] == port:
                    one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
                    paced += 1
    return paced


class _End(Loop):
    """A node with one region, on a loop of its own."""

    def __init__(self, name: str, nbytes: int, coder: Exponents | None) -> None:
        super().__init__()
        self.region = Region.shared(f"of-{name}", nbytes)
        self.port: int = self.run(self._up(name, None if coder is None else Coding(coder, always=True)))

    async def _up(self, name: str, coding: Coding | None) -> int:
        self._channel = Channel(name, {})
        self._engine = TransferEngine(self._channel, ["tcp"], {"tcp": {"coding": coding, "connections": 1}})
        self._engine.register(self.region)
        return (await self._channel.start("127.0.0.1"))[1]

    async def open(self, peer: str, port: int) -> None:
        self._channel.introduce(peer, ("127.0.0.1", port))
        await self._engine.open(peer)

    async def write(self, peer: str) -> float:
        """Seconds to write the whole region to that of the other end."""
        began = time.perf_counter()
        spans = [(0, 0, self.region.nbytes)]
        await self._engine.submit(peer, Op.WRITE, self.region.name, f"of-{peer}", spans, WAIT_S)
        return time.perf_counter() - began

    async def _down(self) -> None:
        await self._engine.close()
        await self._channel.close()

    def close(self) -> None:
        self.run(self._down())
        self.region.close()


def kv_rate(kv: memoryview, coder: Exponents | None, bytes_per_s: int, rounds: int) -> float:
    """Bytes of KV per second that reach the other end of a link of that rate, with this coder at both ends or without:
    the median of some rounds, after one that does not count. Raises ValueError if the bytes that arrive differ."""
    ends = [_End(name, len(kv), coder) for name in ("sender", "receiver")]
    sender, receiver = ends
    try:
        sender.region.memory[:] = kv
        sender.run(sender.open("receiver", receiver.port))
        sender.run(sender.write("receiver"))  # opens what the transport opens late
        if not pace(receiver.port, bytes_per_s):
            raise ValueError("no connection to pace")
        took: list[float] = [sender.run(sender.write("receiver")) for _ in range(rounds + 1)]
        if receiver.region.memory != kv:
            raise ValueError("the KV that arrived is not what was sent")
    finally:
        for end in ends:
            end.close()
    return len(kv) / median(took[1:])
