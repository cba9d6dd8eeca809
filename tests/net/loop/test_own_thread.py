"""An event loop in a thread of its own ends with what waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from net.loop.own_thread import EventLoop, LoopClosed


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_caller_that_waits_when_it_closes_gets_an_error():
    loop, ends = EventLoop("test"), []
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        await forever()

    def wait() -> None:
        with pytest.raises(LoopClosed):
            loop.run(work())
        ends.append(True)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    begun.wait()
    loop.close()
    waiting.join(30)
    assert ends == [True]
    with pytest.raises(LoopClosed):
        loop.run(forever())
    loop.close()


def test_one_that_ends_on_its_own_closes_its_descriptors():
    def opened() -> set[str]:
        return {one.name for one in Path("/proc/self/fd").iterdir()}

    async def nothing() -> None:
        return None

    before = opened()
    loop = EventLoop("test")
    assert opened() > before
    loop.end_with(nothing())
    loop._thread.join(30)
    assert opened() <= before


def test_a_forked_child_has_no_such_loop():
    loop = EventLoop("test")
    child = os.fork()
    if not child:
        signal.alarm(30)  # it waits for ever otherwise
        try:
            loop.run(forever())
        except LoopClosed:
            loop.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    loop.close()


def test_an_interrupt_waits_for_the_work():
    """It may still write to memory of the caller."""
    loop, interrupted, written = EventLoop("test"), threading.Event(), []

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    async def work() -> None:
        # Again, because one that comes just before the caller begins to wait does not end its wait.
        while not interrupted.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(1)
        await asyncio.sleep(0.2)
        written.append(True)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(work())
        assert written == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)
        loop.close()
