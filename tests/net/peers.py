"""Helpers of the net tests: nodes, open descriptors, and child processes that are nodes."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from net.channel.channel import Channel

ROOT = Path(__file__).parents[2]


def open_fds() -> int:
    """Descriptors of this process. libuv opens one of its own, once, with a loop's first listening socket."""
    return len(list(Path("/proc/self/fd").iterdir()))


@asynccontextmanager
async def channels(*names: str, check=lambda hello: None):
    """Started channels that know each other's addresses."""
    made = [Channel(name, {"root": "same", "name": name}, check) for name in names]
    addresses = [await channel.start("127.0.0.1") for channel in made]
    for channel in made:
        for name, address in zip(names, addresses, strict=True):
            channel.introduce(name, address)
    try:
        yield made
    finally:
        for channel in made:
            await channel.close()


async def echo(peer_id, body, data):
    """A handler."""
    return {"from": peer_id, **body}, [data, b"!"]


async def until(condition, seconds=60.0):
    """Wait for something another task or process brings about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def settled_fds(expected: int) -> None:
    """Wait until this process has `expected` descriptors again; transports close one loop turn later."""

    def back() -> bool:
        gc.collect()
        return open_fds() <= expected

    await until(back)


@asynccontextmanager
async def child(script: str, *arguments: str):
    """A Python process running `script` from tests/net; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / script),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
