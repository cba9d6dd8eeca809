"""The gate counts requests without a first token, and keeps the first ones."""

from __future__ import annotations

import asyncio

import pytest

from engine.front.gate import ROOM_KEPT_S, Gate
from net.http.common.frontend import Choices, Overloaded


async def enter(gate: Gate, name: str, choices: Choices | None = None, timeout_s: float = 60.0) -> None:
    await gate.enter(name, choices or Choices(), timeout_s)


async def test_the_first_ones_stay_and_places_become_free():
    gate = Gate(lambda: (2, 7.0))
    await enter(gate, "a")
    await enter(gate, "b")
    with pytest.raises(Overloaded, match="2 requests already wait") as refused:
        await enter(gate, "c")
    assert refused.value.retry_after_s == 7.0 and len(gate) == 2
    gate.leave("c")  # it never entered
    gate.leave("a")
    gate.leave("a")
    await enter(gate, "c")
    assert len(gate) == 2


async def test_requests_that_arrive_have_places_too():
    gate = Gate(lambda: (2, 7.0))
    await enter(gate, "a")
    gate.check(arriving=0)
    with pytest.raises(Overloaded):
        gate.check(arriving=1)


async def test_one_request_is_never_refused_here():
    """Without any other, only the nodes know whether they have room."""
    await enter(Gate(lambda: (0, 1.0)), "a")


async def test_the_room_is_asked_for_at_times():
    """A burst of refusals does not ask the nodes' loads each time."""
    now, asked = [5.0], []
    gate = Gate(lambda: (asked.append(now[0]) or 1, 1.0), lambda: now[0])
    await enter(gate, "a")
    for _ in range(100):
        with pytest.raises(Overloaded):
            gate.check()
    now[0] += ROOM_KEPT_S
    with pytest.raises(Overloaded):
        gate.check()
    assert asked == [5.0, 5.0 + ROOM_KEPT_S]


async def test_other_choices_of_a_request_that_is_inside_wait_in_turn():
    gate, whole, entered = Gate(lambda: (2, 7.0)), Choices(), []

    async def one(name: str) -> None:
        await enter(gate, name, whole)
        entered.append(name)

    await enter(gate, "other")
    tasks = [asyncio.create_task(one(name)) for name in "abcd"]
    await asyncio.sleep(0)
    assert entered == ["a"] and len(gate) == 2
    with pytest.raises(Overloaded, match="5 requests already wait"):
        await enter(gate, "stranger")
    tasks[1].cancel()  # its client is gone
    gate.leave("other")
    gate.leave("a")
    await asyncio.gather(tasks[0], *tasks[2:])
    assert entered == ["a", "c", "d"] and len(gate) == 2
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    for name in "cd":
        gate.leave(name)
    assert (len(gate), whole.inside) == (0, 0)
    gate.check(arriving=1)


async def test_a_choice_that_is_let_in_while_its_client_leaves_passes_its_place_on():
    gate, whole, entered = Gate(lambda: (1, 7.0)), Choices(), []

    async def one(name: str) -> None:
        try:
            await enter(gate, name, whole)
            entered.append(name)
        finally:
            gate.leave(name)

    await enter(gate, "a", whole)
    tasks = [asyncio.create_task(one(name)) for name in "bc"]
    await asyncio.sleep(0)
    gate.leave("a")
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == ["c"] and len(gate) == 0


@pytest.mark.parametrize("begun", [False, True])
async def test_a_choice_waits_after_others_began_and_until_its_deadline(begun):
    gate = Gate(lambda: (1, 7.0))
    await enter(gate, "stranger")
    with pytest.raises(Overloaded, match="1 requests already wait"):
        await enter(gate, "a", Choices(begun=begun), 0.01 if begun else 60.0)
    gate.leave("stranger")
    gate.check(arriving=0)
