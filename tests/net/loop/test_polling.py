"""When the loop stays awake for bytes and when it does not, by the number of turns it takes; and over a real socket."""

import asyncio

import pytest

from net.loop import polling
from net.loop.polling import NEXT, REST, SKIP_MAX, Polling
from net.transfer.common.memory import Region
from net.transfer.engine import Op, TransferEngine
from tests.net.peers import channels, until

MOST_S = 100e-6


class Clock:
    """Each look at it is a turn of 10 us."""

    def __init__(self):
        self.now = 1.0
        self.looks = 0

    def monotonic(self):
        self.looks += 1
        self.now += 10e-6
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(polling, "time", made)
    return made


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def waits(poll, clock, kind, count):
    """How many turns each of `count` waits in vain is polled."""
    taken = []
    for _ in range(count):
        before = clock.looks
        poll.begin(kind)
        await turns(30)
        taken.append(clock.looks - before)
    return taken


async def test_a_wait_in_vain_is_polled_for_a_while_and_then_ever_less_often(clock):
    poll = Polling(MOST_S)
    taken = await waits(poll, clock, NEXT, 12)
    assert 9 <= taken[0] <= 12, "it ends by itself"
    assert [bool(count) for count in taken] == [True, False, False, True, *[False] * 4, True, *[False] * 3]
    polled = [at for at, count in enumerate(await waits(poll, clock, NEXT, 1000)) if count]
    assert {b - a for a, b in zip(polled[-5:], polled[-4:], strict=False)} == {SKIP_MAX + 1}


async def test_bytes_that_come_while_it_polls_start_it_anew(clock):
    poll = Polling(MOST_S)
    await waits(poll, clock, REST, 5)  # two failures: the next four sleep
    assert not any(await waits(poll, clock, REST, 3))
    poll.begin(REST)
    await turns(4)
    poll.end()
    assert all([await waits(poll, clock, NEXT, 1), await waits(poll, clock, REST, 1)]), "kinds do not mix"
    assert [bool(count) for count in await waits(poll, clock, REST, 3)] == [False, False, True]


async def test_bytes_found_too_late_count_as_none(clock):
    """The process did not have its core."""
    poll = Polling(MOST_S)
    poll.begin(NEXT)
    await turns(4)
    clock.now += 1.0
    poll.end()
    await turns(2)
    assert [bool(count) for count in await waits(poll, clock, NEXT, 3)] == [False, False, True]


async def test_it_sleeps_as_soon_as_nothing_is_expected(clock):
    poll = Polling(MOST_S)
    poll.begin(NEXT)
    await turns(3)
    poll.stop()
    await turns(2)
    before = clock.looks
    await turns(20)
    assert clock.looks == before
    poll.end()
    assert (await waits(poll, clock, NEXT, 1))[0], "it has not failed either"


@pytest.mark.parametrize("busy_poll_us", [0, 100])
async def test_transfers_are_the_same_with_it_and_leave_the_loop_asleep(busy_poll_us, monkeypatch):
    async with channels("a", "b") as made:
        a, b = (TransferEngine(one, ["tcp"], {"tcp": {"busy_poll_us": busy_poll_us}}) for one in made)
        with Region.private("x", 4 << 20) as x, Region.private("y", 4 << 20) as y:
            a.register(x)
            b.register(y)
            x.memory[:] = bytes(range(256)) * (1 << 14)
            for size in (1 << 20, 4096, 300 << 10) * 3:
                y.memory[:] = bytes(4 << 20)
                await a.submit("b", Op.WRITE, "x", "y", [(0, 1 << 20, size)])
                assert y.memory[1 << 20 : (1 << 20) + size] == x.memory[:size]
            awake = [link.polling for one in made for link in one.links._everyone if link.polling is not None]
            assert bool(awake) == bool(busy_poll_us)
            await until(lambda: not any(poll._awake for poll in awake))
            looked = []
            monkeypatch.setattr(Polling, "_turn", lambda poll: looked.append(poll))
            await asyncio.sleep(0.02)
            assert not looked
            await a.close()
            await b.close()
