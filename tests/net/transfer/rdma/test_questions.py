"""Questions on the connection of an RDMA link: which answer belongs to which. No device."""

import asyncio

import pytest

from net.errors import PeerLost
from net.transfer.rdma.questions import Questions


class Connection:
    """Keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, header):
        self.sent.append(header)


def start(generation):
    return {"op": "start", "rail": 0, "generation": generation}


def started(generation, endpoint):
    return {"op": "started", "rail": 0, "generation": generation, "endpoint": endpoint}


async def test_a_late_answer_is_not_taken_for_that_of_the_next_generation():
    connection = Connection()
    questions = Questions(connection)
    with pytest.raises(TimeoutError):
        await questions.ask("started", start(1), 0)
    second = asyncio.ensure_future(questions.ask("started", start(2)))
    await asyncio.sleep(0)
    assert connection.sent == [start(1), start(2)], "each generation is asked for"
    questions.answered(started(1, "of a queue pair that is no more"))
    await asyncio.sleep(0)
    assert not second.done()
    questions.answered(started(2, "of the new one"))
    assert (await second)["endpoint"] == "of the new one"
    await asyncio.sleep(0)
    assert not questions._open


async def test_who_asks_for_the_same_region_waits_for_the_same_answer():
    connection = Connection()
    questions = Questions(connection)
    question, answer = {"op": "region", "name": "kv"}, {"op": "region", "name": "kv", "keys": [1]}
    with pytest.raises(TimeoutError):
        await questions.ask("region", question, 0)
    asked = [asyncio.ensure_future(questions.ask("region", question)) for _ in range(2)]
    await asyncio.sleep(0)
    assert connection.sent == [question], "its memory is being pinned since the first question"
    questions.answered(answer)
    assert await asyncio.gather(*asked) == [answer, answer]


async def test_the_end_of_the_link_ends_every_question():
    questions = Questions(Connection())
    asked = asyncio.ensure_future(questions.ask("stopped", {"op": "stop", "rail": 1}))
    await asyncio.sleep(0)
    questions.end(PeerLost("gone"))
    with pytest.raises(PeerLost, match="gone"):
        await asked
