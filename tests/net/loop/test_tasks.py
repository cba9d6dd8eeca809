"""Background tasks: none dies unseen, loops are started again with a bound, and a node hears of what it cannot do
without."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.gossip.load_words import LoadWords
from net.loop.restarts import MAX_RESTARTS, WINDOW_S, Restarts
from net.loop.supervisor import UNNAMED, Supervisor
from net.loop.tasks import keep, spawn
from net.transfer.engine import TransferEngine
from tests.net.peers import channels, until


class Told:
    def __init__(self) -> None:
        self.counted: list[str] = []
        self.reasons: list[str] = []


@contextmanager
def supervised():
    told = Told()
    supervisor = Supervisor(told.counted.append, told.reasons.append)
    supervisor.install()
    try:
        yield told
    finally:
        supervisor.remove()


@given(st.lists(st.floats(0, 20), max_size=60), st.integers(0, 6))
def test_restarts_are_bounded_in_every_window(gaps, most):
    restarts, now, again = Restarts(most), 0.0, []
    for gap in gaps:
        now += gap
        if (pause_s := restarts.failed(now)) is not None:
            assert pause_s >= 0.5
            again.append(now)
    for begin in again:
        assert sum(begin <= at < begin + WINDOW_S for at in again) <= max(most, 1)


def test_pauses_double_and_a_quiet_minute_is_forgiven():
    restarts = Restarts()
    assert [restarts.failed(t) for t in range(MAX_RESTARTS + 1)] == [0.5, 1.0, 2.0, 4.0, 8.0, None]
    assert restarts.failed(MAX_RESTARTS + 1 + WINDOW_S) == 0.5
    assert Restarts(0).failed(0.0) is None


@pytest.mark.expects_error("background task 'work' failed[\\s\\S]*KeyError: 'bug'")
async def test_work_that_nobody_waits_for_is_told_at_once():
    async def bug():
        raise KeyError("bug")

    with supervised() as told:
        task = spawn(bug(), "work")
        await asyncio.wait([task])
        assert told.counted == ["work"], "before the task is collected"
        cancelled = spawn(asyncio.sleep(60), "cancelled")
        cancelled.cancel()
        await asyncio.wait([cancelled])
    assert (told.counted, told.reasons) == (["work"], [])


@pytest.mark.expects_error("never retrieved", "Exception in callback")
async def test_what_has_no_name_is_counted_too():
    async def bug():
        raise KeyError("bug")

    with supervised() as told:
        await asyncio.wait([asyncio.get_running_loop().create_task(bug())])
        gc.collect()
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await until(lambda: len(told.counted) == 2)
    assert (told.counted, told.reasons) == ([UNNAMED] * 2, [])


@pytest.mark.expects_error("an exception ended thread 'worker'")
async def test_a_thread_that_dies_is_told():
    with supervised() as told:
        thread = threading.Thread(target=lambda: 1 / 0, name="worker")
        thread.start()
        await asyncio.to_thread(thread.join)
        await until(lambda: told.counted == ["worker"])


@pytest.mark.expects_error("background task 'loop' failed and is started again in 0.00[12] s")
async def test_a_loop_is_started_again_and_goes_on():
    begun = []

    async def run():
        begun.append(len(begun))
        if len(begun) < 3:
            raise RuntimeError("bug")
        await asyncio.Event().wait()

    with supervised() as told:
        task = keep(run, "loop", Restarts(first_pause_s=0.001))
        await until(lambda: len(begun) == 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (told.counted, told.reasons, begun) == (["loop"] * 2, [], [0, 1, 2])


@pytest.mark.expects_error("background task 'loop' failed and is started", "is not started again: the node leaves")
async def test_a_loop_that_fails_too_often_makes_the_node_leave():
    async def run():
        raise RuntimeError("bug")

    with supervised() as told:
        await keep(run, "loop", Restarts(2, first_pause_s=0.001))
    assert told.counted == ["loop"] * 3
    assert told.reasons == ["background task 'loop' failed: RuntimeError: bug"]


@pytest.mark.expects_error("background task 'telling the load' failed")
async def test_a_load_that_cannot_be_told_is_told_again(monkeypatch):
    monkeypatch.setattr("net.loop.tasks.Restarts", partial(Restarts, first_pause_s=0.001))
    async with channels("a", "b") as (a, b):
        a.introduce("b", (b.links.address or ("", 0)))
        engine = TransferEngine(a, ("tcp",))
        words, asked = LoadWords(a, engine), []

        def load():
            asked.append(len(asked))
            if len(asked) == 1:
                raise RuntimeError("bug")
            return words._word

        with supervised() as told:
            words.start(load, period_s=0.001)
            await until(lambda: len(asked) > 3)
            await words.close()
            await engine.close()
        assert (told.counted, told.reasons) == (["telling the load"], [])
