"""A request survives its acceptor: its client comes back to another node and gets every token once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher
from engine.core.emissions import Emission
from engine.front.adoption import Adoption
from engine.front.flight import Flight, drawn_seed
from engine.front.persistence import Persistence
from engine.handoff import messages, orphans
from engine.handoff.messages import Adopt, Adopted, prompt_digest
from engine.handoff.service import EngineService
from engine.handoff.updates import Token, decode_all, encode_all
from engine.observe.timeline import Timeline
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from net.bodies import decode, encode
from net.channel.channel import RemoteError
from net.metrics.events import Metrics
from tests.engine.handoff.test_service import ROOT, IdleWorker, SlowTransfer, Wires, idle_load, moves, prefill

PROMPT = [1] * 5


async def decoding(count: int, max_tokens: int = 8, **logprobs: int) -> tuple[Wires, IdleWorker, EngineService]:
    """A node on which acceptor a's request 'r' has made `count` tokens: 10, 11, ..."""
    channel, worker = Wires("d"), IdleWorker(Batcher(BlockPool(16), 4, 4, 64, 1000, {0}))
    transfer = SlowTransfer()
    service = EngineService(channel, transfer, worker, moves(transfer), 8, idle_load(), Metrics("m", "d"))
    request = Request("a/r#5f.0", PROMPT, 5, SamplingParams(max_tokens=max_tokens, **logprobs), 0.0, ROOT)
    await channel.handlers[messages.PREFILL]("a", *prefill(request))
    for token in range(10, 10 + count):
        step_of(worker, service, token)
    return channel, worker, service


def step_of(worker: IdleWorker, service: EngineService, token: int) -> None:
    step = worker.batcher.schedule(0.0)
    done = worker.batcher.commit(0.0, step, [(token,)])
    service.on_emissions([Emission(done.emitted[0][0], token)])


def told(channel: Wires, node: str) -> list[tuple[int, int, str | None]]:
    updates = [update for peer, _, body in channel.posted if peer == node for _, update in decode_all(body)]
    return tokens_of(updates)


def tokens_of(updates: list[Any]) -> list[tuple[int, int, str | None]]:
    return [(update.index, update.token_id, update.finish) for update in updates]


async def adopt(
    channel: Wires, prompt: list[int], request_id: str = "r", max_tokens: int = 8, **logprobs: int
) -> tuple[str, list[Any]]:
    """(attempt id, its tokens)."""
    sampling = SamplingParams(max_tokens=max_tokens, **logprobs)
    body = encode(Adopt(request_id, prompt_digest(ROOT, prompt), sampling))
    answer = decode(Adopted, await channel.handlers[messages.ADOPT]("b", body, memoryview(b"")))
    return answer.attempt_id, [update for _, update in decode_all({"updates": answer.updates})]


async def test_the_new_acceptor_gets_what_was_made_and_what_follows():
    channel, worker, service = await decoding(2)
    service.peer_lost("a")
    step_of(worker, service, 12)  # nobody is told
    attempt_id, updates = await adopt(channel, PROMPT)
    assert attempt_id == "a/r#5f.0"
    assert updates == [Token(0, 10), Token(1, 11), Token(2, 12)]
    for token in range(13, 18):
        step_of(worker, service, token)
    assert told(channel, "b") == [(3, 13, None), (4, 14, None), (5, 15, None), (6, 16, None), (7, 17, "length")]
    assert told(channel, "a") == [(0, 10, None), (1, 11, None)]
    assert service.held()["acceptors"] == 0
    await service.close()


async def test_a_request_that_ended_with_its_acceptor_is_remembered():
    channel, _, service = await decoding(3, max_tokens=3)
    service.peer_lost("a")
    _, updates = await adopt(channel, PROMPT, max_tokens=3)
    assert tokens_of(updates) == [(0, 10, None), (1, 11, None), (2, 12, "length")]
    with pytest.raises(RemoteError):  # the client has used the id again, for a longer answer
        await adopt(channel, PROMPT, max_tokens=4)
    await service.close()


@pytest.mark.parametrize("made", [2, 3])
@pytest.mark.parametrize("which", ["logprobs", "prompt_logprobs"])
async def test_log_probabilities_are_not_kept_so_the_answer_is_computed_again(which, made):
    channel, _, service = await decoding(made, max_tokens=3, **{which: 1})
    service.peer_lost("a")
    with pytest.raises(RemoteError):
        await adopt(channel, PROMPT, max_tokens=3, **{which: 1})
    await service.close()


async def test_nobody_is_given_the_answer_to_another_prompt_or_of_a_living_acceptor():
    channel, _, service = await decoding(2)
    with pytest.raises(RemoteError):
        await adopt(channel, PROMPT)
    service.peer_lost("a")
    for prompt, name, max_tokens in (([1] * 6, "r", 8), (PROMPT, "q", 8), (PROMPT, "r", 9)):
        with pytest.raises(RemoteError):
            await adopt(channel, prompt, name, max_tokens)
    await adopt(channel, PROMPT)
    await service.close()


async def test_nobody_came(monkeypatch):
    monkeypatch.setattr(orphans, "LEASE_S", 0.02)
    channel, worker, service = await decoding(2)
    service.peer_lost("a")
    await asyncio.sleep(0.1)
    assert not any(service.held().values())
    assert worker.batcher.pool.references() == {"request": 0, "transfer": 0}
    with pytest.raises(RemoteError):
        await adopt(channel, PROMPT)
    await service.close()


async def test_a_request_without_a_token_ends_with_its_acceptor():
    _, worker, service = await decoding(0)
    service.peer_lost("a")
    await asyncio.sleep(0)
    assert not worker.batcher.requests
    await service.close()


async def test_tokens_that_overtake_the_answer_are_kept():
    class Channel:
        async def call(self, node, kind, body, data=(), timeout_s=0.0):
            if node == "d":
                adoption.keep("a/r#5f.0", Token(1, 11))
                made = encode_all([("a/r#5f.0", Token(0, 10))])["updates"]
                return encode(Adopted("a/r#5f.0", made)), memoryview(b"")
            raise RemoteError("no", code="gone")

    adoption = Adoption(Channel())
    timeline = Timeline("r", 5)
    flight = Flight(
        "r", list(PROMPT), 5, SamplingParams(), "standard", ROOT, timeline, 9.0, 0.0, Persistence(0.0, 9.0, 1.0)
    )
    assert await adoption.adopt(flight, ["c", "d"])
    assert flight.attempt_id == "a/r#5f.0" and flight.watched == {"d"}
    assert [flight.items.get_nowait() for _ in range(2)] == [Token(0, 10), Token(1, 11)]
    assert not await adoption.adopt(flight, ["c"])
    adoption.keep("x", Token(0, 1))
    assert adoption._early == {}


def test_a_request_draws_the_same_wherever_it_is_computed():
    assert drawn_seed("r", PROMPT) == drawn_seed("r", PROMPT)
    assert len({drawn_seed("r", PROMPT), drawn_seed("q", PROMPT), drawn_seed("r", [1] * 6)}) == 3
