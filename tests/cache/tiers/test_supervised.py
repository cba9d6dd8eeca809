"""The loops of the store, killed by an exception that they do not expect: they go on, nothing stays held."""

import asyncio
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from cache.tiers.write_behind import WriteBehind
from net.loop.restarts import Restarts
from net.loop.supervisor import Supervisor
from tests.cache.pooled import cluster_of, key_of, put, until


@contextmanager
def supervised():
    counted, reasons = [], []
    supervisor = Supervisor(counted.append, reasons.append)
    supervisor.install()
    try:
        yield SimpleNamespace(counted=counted, reasons=reasons)
    finally:
        supervisor.remove()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Restarts after a millisecond."""
    monkeypatch.setattr("net.loop.tasks.Restarts", partial(Restarts, first_pause_s=0.001))


@pytest.mark.expects_error("background task 'write-behind' failed and is started again")
async def test_what_is_queued_behind_a_batch_that_failed_is_written():
    batches, written = [], []

    async def write(rows):
        batches.append([slot for _, slot in rows])
        await asyncio.sleep(0)
        if len(batches) == 1:
            raise KeyError("bug")
        return [True] * len(rows)

    behind = WriteBehind(2, write, written.append, lambda key: None)
    with supervised() as told:
        for slot in range(4):
            behind.add(key_of(slot), slot)
        await until(lambda: behind.task is None)
        behind.add(key_of(9), 9)
        await until(lambda: behind.task is None)
    assert (batches, written) == ([[0, 1], [2, 3], [9]], [0, 1, 2, 3, 9])
    assert (told.counted, told.reasons) == (["write-behind"], [])


@pytest.mark.expects_error("background task 'repair' failed and is started again")
async def test_repair_goes_on_behind_an_exception(monkeypatch):
    async with cluster_of("a", "b", replicas=2) as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        await put(a, range(8))
        for i in range(8):
            await b.local.remove([key_of(i)])
        real, failed = a.keeper._plan, []

        async def broken(before, after):
            if len(failed) < 2:
                failed.append(1)
                raise RuntimeError("bug")
            await real(before, after)

        monkeypatch.setattr(a.keeper, "_plan", broken)
        with supervised() as told:
            a.keeper.start()
            await until(lambda: all(b.local.contains(key_of(i)) for i in range(8)))
            await a.keeper.close()
        assert (told.counted, told.reasons) == (["repair"] * 2, [])


@pytest.mark.expects_error("background task 'repair' failed", "is not started again: the node leaves")
async def test_repair_that_fails_for_ever_is_the_nodes_end(monkeypatch):
    async with cluster_of("a", "b", replicas=2) as cluster:
        keeper = cluster.stores["a"].keeper

        async def broken(before, after):
            raise RuntimeError("bug")

        monkeypatch.setattr(keeper, "_plan", broken)
        with supervised() as told:
            keeper.start()
            await until(lambda: told.reasons)
            await keeper.close()
        assert told.reasons == ["background task 'repair' failed: RuntimeError: bug"]
