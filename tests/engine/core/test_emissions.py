"""The results of a step are handed out in small pieces."""

from __future__ import annotations

import asyncio

from cache.block import BlockGeometry
from cache.keys import root_key
from engine.core.emissions import END_SIZE, HAND_OUT_SIZE, Emission, hand_out
from engine.sampling.params import SamplingParams
from engine.step.request import Request, RequestState

ROOT = root_key("toy", BlockGeometry(2, 1, 4, 4, "float32"))


def request(name: str) -> Request:
    return Request(name, [1] * 5, 5, SamplingParams(temperature=0, max_tokens=4), 0.0, ROOT)


async def test_the_loop_gets_a_turn_after_every_few_emissions():
    """Each token wakes a task: those of a step of 256 rows in one turn would keep all others waiting."""
    pieces: list[tuple[int, int]] = []  # (turn of the loop, emissions)
    turn = 0

    async def turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(turns())
    shown = [Emission(request(f"r{i}"), i) for i in range(2 * HAND_OUT_SIZE + 5)]
    await hand_out(shown, lambda some: pieces.append((turn, len(some))))
    counting.cancel()
    assert [size for _, size in pieces] == [HAND_OUT_SIZE, HAND_OUT_SIZE, 5]
    assert len({at for at, _ in pieces}) == 3


async def test_the_ends_of_requests_are_handed_out_a_few_in_a_turn():
    """An end takes the acceptor as long as END_SIZE tokens: the answer is completed, measured and recorded."""
    pieces: list[list[str]] = []
    few = HAND_OUT_SIZE // END_SIZE
    ended = [request(f"r{i}") for i in range(few + 1)]
    for one in ended:
        one.state = RequestState.FINISHED
    shown = [Emission(one, 1) for one in ended] + [Emission(ended[-1], 1, num_behind=1), Emission(request("r"), 1)]
    await hand_out(shown, lambda some: pieces.append([emission.request.request_id for emission in some]))
    assert [len(piece) for piece in pieces] == [few, 3]
    assert [name for piece in pieces for name in piece] == [emission.request.request_id for emission in shown]
