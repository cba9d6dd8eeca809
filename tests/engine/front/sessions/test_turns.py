"""What the homes hear of the turns that an acceptor answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from engine.front.sessions import turns
from engine.front.sessions.turns import Sessions, session_number
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from net.metrics.events import Metrics
from sched.sessions.parking import AWAY, Parking, ParkingRules

BLOCK = 4
ROOT = b"0123456789abcdef"


@dataclass
class Turn:
    session: int | None
    tokens: int = 10

    def as_request(self) -> Request:
        return Request("r", list(range(self.tokens)), 6, SamplingParams(), 0.0, ROOT)


@pytest.fixture
def told(monkeypatch) -> Any:
    monkeypatch.setattr(turns, "PUBLISHED_S", 0.01)
    return []


def sessions(told: list[Any]) -> Sessions:
    def park(keys: Any, session: int, way: Parking) -> None:
        told.append((list(keys), session, way))

    return Sessions(ParkingRules(), BLOCK, park, Metrics("m", "n"))


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0.001)


async def test_the_homes_hear_of_the_end_of_a_turn_with_all_its_full_blocks(told):
    mine, turn = sessions(told), Turn(7)
    mine.begun(turn)
    mine.over(turn)
    assert told == [], "its last blocks are not at their homes yet"
    await until(lambda: told)
    ((keys, session, way),) = told
    assert keys == turn.as_request().block_keys(BLOCK) and len(keys) == 2
    assert session == 7 and way.name == AWAY, "nobody knows when sessions return"


async def test_a_session_that_returns_at_once_is_not_parked(told):
    mine = sessions(told)
    for _ in range(3):
        mine.begun(Turn(7))
        mine.over(Turn(7))
    mine.begun(Turn(7))
    other = Turn(8, 4)
    mine.begun(other)
    mine.over(other)
    await until(lambda: told)
    assert [session for _, session, _ in told] == [8]


async def test_the_blocks_of_a_long_session_are_named_in_parts_with_a_turn_of_the_loop_between(told, monkeypatch):
    monkeypatch.setattr(turns, "PARKED_AT_ONCE", 3)
    now = asyncio.get_running_loop().time
    mine, long, looks = sessions(told), Turn(7, 10 * BLOCK + 1), []
    mine.begun(long)
    mine.over(long)
    end = now() + 10
    while sum(len(keys) for keys, _, _ in told) < 10 and now() < end:
        await asyncio.sleep(0)
        looks.append(len(told))
    assert [key for keys, _, _ in told for key in keys] == long.as_request().block_keys(BLOCK)
    assert [len(keys) for keys, _, _ in told] == [3, 3, 3, 1] and {0, 1, 2, 3, 4} == {*looks}
    assert {(session, way.name) for _, session, way in told} == {(7, AWAY)}
    await asyncio.sleep(0)
    assert not mine._ends


async def test_the_homes_hear_no_more_of_a_session_that_returns_in_the_meantime(told, monkeypatch):
    monkeypatch.setattr(turns, "PARKED_AT_ONCE", 3)

    def park(keys: Any, session: int, way: Parking) -> None:
        told.append((list(keys), session, way))
        if session == 7:
            mine.begun(Turn(7))

    mine, long, other = Sessions(ParkingRules(), BLOCK, park, Metrics("m", "n")), Turn(7, 10 * BLOCK), Turn(8, 10)
    for turn in (long, other):
        mine.begun(turn)
        mine.over(turn)
    await until(lambda: len(told) == 2 and not mine._ends)
    assert [(len(keys), session) for keys, session, _ in told] == [(3, 7), (2, 8)]


async def test_requests_without_a_session_and_unknown_ones_are_nobodys(told):
    mine = sessions(told)
    mine.begun(Turn(None))
    mine.over(Turn(None))
    mine.over(Turn(9))
    assert len(mine) == 0
    mine.begun(Turn(1))
    mine.over(Turn(1))
    mine.close()
    await asyncio.sleep(0.05)
    assert told == []


def test_the_same_name_of_two_tenants_is_two_sessions():
    other = bytes(reversed(ROOT))
    assert session_number(ROOT, "a") == session_number(ROOT, "a") >= 0
    assert len({session_number(root, name) for root in (ROOT, other) for name in ("a", "b")}) == 4


async def test_an_unanswered_request_ends_no_turn_and_is_not_counted_as_under_way(told):
    mine = sessions(told)
    mine.begun(Turn(7))
    mine.over(Turn(7), answered=False)
    await asyncio.sleep(0.05)
    assert told == []
    mine.begun(Turn(7))
    mine.over(Turn(7))
    await until(lambda: told)


async def test_a_turn_of_several_requests_ends_with_the_last(told):
    """An agent calls several tools at a time. KV that one of them still reads is not parked."""
    mine, first, last = sessions(told), Turn(7), Turn(7, 20)
    mine.begun(first)
    mine.begun(last)
    mine.over(first)
    other = Turn(8, 4)
    mine.begun(other)
    mine.over(other)
    await until(lambda: told)
    assert [session for _, session, _ in told] == [8]
    mine.over(last)
    await until(lambda: len(told) > 1)
    assert [(session, len(keys)) for keys, session, _ in told] == [(8, 1), (7, 5)]
