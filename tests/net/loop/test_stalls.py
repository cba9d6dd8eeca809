"""The stall monitor on loops that are blocked on purpose. Lower bounds only: any machine may be slower."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from net.loop.stalls import PERIOD_S, Stall, StallMonitor, Usage


def block_by_computing(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def more_samples(monitor: StallMonitor, count: int) -> None:
    """From now on: on a slow machine any number came before."""
    until = monitor.state()["samples"] + count
    async with asyncio.timeout(20):
        while monitor.state()["samples"] < until:  # noqa: ASYNC110
            await asyncio.sleep(PERIOD_S)


async def test_a_handler_that_computes_is_seen_and_named():
    seen: list[Stall] = []
    monitor = StallMonitor(seen.append)
    monitor.start()
    await more_samples(monitor, 1)
    block_by_computing(0.3)
    await more_samples(monitor, 2)
    state = monitor.state()
    await monitor.close()
    assert max(stall.late for stall in seen) == monitor.longest_s >= 0.3 - 2 * PERIOD_S
    assert all(stall.computing + stall.core + stall.lock == pytest.approx(stall.late) for stall in seen)
    assert state["longest_ms"]["computing"] >= 100
    assert state["late_ms"]["p100"] == state["longest_ms"]["late"]
    (place,) = [name for name in state["places"] if "block_by_computing" in name]
    assert place.startswith("tests/net/loop/test_stalls.py:")
    assert state["places"][place]["count"] >= 1
    assert state["samples"] <= len(seen)


async def test_a_handler_that_sleeps_is_late_without_computing():
    monitor = StallMonitor()
    monitor.start()
    await more_samples(monitor, 1)
    time.sleep(0.3)  # noqa: ASYNC251 - what must be found
    await more_samples(monitor, 2)
    state = monitor.state()
    await monitor.close()
    assert state["longest_ms"]["late"] >= 1000 * (0.3 - 2 * PERIOD_S)
    assert state["longest_ms"]["computing"] < state["longest_ms"]["late"] / 2
    assert any("test_a_handler_that_sleeps" in name for name in state["places"])


async def test_its_thread_ends_with_close_also_without_start():
    before = threading.active_count()
    monitor = StallMonitor()
    monitor.start()
    assert threading.active_count() == before + 1
    await monitor.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "stalls"]
    await StallMonitor().close()
    assert StallMonitor().state()["late_ms"] == {}


async def test_an_answer_that_is_on_its_way_when_it_closes_finds_its_file_open(monkeypatch):
    """The thread must not close what a callback on the loop reads at this moment."""
    closed_on: list[int] = []
    closing = Usage.close

    def close(usage: Usage) -> None:
        closed_on.append(threading.get_ident())
        closing(usage)

    monkeypatch.setattr(Usage, "close", close)
    monitor = StallMonitor()
    monitor.start()
    usage = monitor._usage
    assert usage is not None
    await asyncio.sleep(0.05)
    await monitor.close()
    assert len(closed_on) == 2 and closed_on[-1] == threading.get_ident()
    assert usage.read().delayed == 0, "a callback that comes later"


async def test_a_thread_that_keeps_the_interpreter_lock_is_told_from_a_handler():
    """Among all stalls: on a busy machine the longest one may be a wait for a core. So may most of this one: then
    the thread keeps the lock once more."""
    seen: list[Stall] = []
    monitor = StallMonitor(seen.append)
    monitor.start()
    for _ in range(5):
        await more_samples(monitor, 1)
        await asyncio.to_thread(ctypes.PyDLL(None).usleep, 300_000)  # PyDLL: the call does not give the lock up
        await more_samples(monitor, 2)
        locked = max(seen, key=lambda stall: stall.lock)
        if locked.lock >= (0.3 - 2 * PERIOD_S) / 2:
            break
    await monitor.close()
    assert locked.lock >= (0.3 - 2 * PERIOD_S) / 2
    assert locked.lock > locked.computing


def test_a_thread_that_has_to_share_its_core_is_delayed():
    """In a thread of its own, which keeps to one core with a process that takes it."""
    delays: list[float] = []

    def work() -> None:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(threading.get_native_id(), {core})
        code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
        with subprocess.Popen([sys.executable, "-c", code]) as rival:
            usage = Usage(threading.get_ident(), threading.get_native_id())
            before = usage.read()
            block_by_computing(0.3)
            after = usage.read()
            usage.close()
            assert after.computed - before.computed >= 0.3
            delays.append(after.delayed - before.delayed)
            rival.kill()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert delays[0] > 0.0
