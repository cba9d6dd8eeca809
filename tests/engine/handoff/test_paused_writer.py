"""Blocks of a prompt whose prefill node does not answer, stands still, or goes on writing: real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager, suppress

import pytest

from engine.core.kv_ready import KvTarget
from engine.handoff import incoming, messages
from engine.handoff.messages import Abort, Reserve, pack_request
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from net.bodies import decode, encode
from net.errors import PeerLost
from net.transfer.engine import TransferEngine
from tests.engine.handoff.test_pull import GEOMETRY, ROOT, Side
from tests.net.peers import channels, child, until

TRIES = 20


class Scene:
    """A decode node here whose blocks `blocks` another process is writing to."""

    def __init__(self, a, d, process, blocks):
        self.a, self.d, self.process, self.blocks = a, d, process, blocks

    def give_up(self):
        self.a.post("d", messages.ABORT, encode(Abort(["r"])))

    def written(self):
        return any(any(self.d.block(block)) for block in self.blocks)

    def held(self):
        return self.d.pool.references()["transfer"]

    async def told(self):
        """How the writer's submissions have ended so far; asked again while the connection to it is cut."""
        while True:
            with suppress(PeerLost):
                return (await self.d.channel.call("p", "told", {}))[0]
            await asyncio.sleep(0.05)


@asynccontextmanager
async def scene(order):
    async with channels("a", "d") as (a, d_channel), child("stubborn.py", "p", order) as process:
        d_channel.introduce("p", tuple(json.loads(await process.stdout.readline())))
        d = Side(d_channel, TransferEngine(d_channel, order.split(",")))
        request = Request("r", [1] * 8, 8, SamplingParams(max_tokens=4), 0.0, ROOT)
        wire, data = pack_request(request)
        reply, _ = await a.call("d", messages.RESERVE, encode(Reserve(wire, ["p"])), data)
        target = decode(KvTarget, reply)
        spans = [(0, block * GEOMETRY.block_bytes, GEOMETRY.block_bytes) for block in target.block_ids]
        d_channel.post("p", "push", {"remote": target.region, "spans": spans, "epoch": target.epoch})
        one = Scene(a, d, process, target.block_ids)
        await until(one.written)
        try:
            yield one
        finally:
            await d.service.close()
            await d.words.close()
            await d.transfer.close()
            d.region.close()


async def nothing_lands(one):
    """The blocks are nobody's now, and the writer has tried often since."""
    before = sum((await one.told()).values())
    for block in one.blocks:
        one.d.block(block)[:] = bytes(GEOMETRY.block_bytes)
    tries = 0
    while tries < TRIES:
        tries = sum((await one.told()).values()) - before
    assert not one.written()


@pytest.mark.parametrize("order", ["shm", "tcp"])
async def test_a_writer_that_does_not_give_its_word_is_cut_off_before_its_blocks_are_free(order):
    """It is connected and answers, but with an error."""
    async with scene(order) as one:
        one.give_up()
        await until(one.d.idle)
        await nothing_lands(one)


@pytest.mark.parametrize("order", ["shm", "tcp"])
async def test_a_writer_that_stands_still_for_longer_than_every_deadline(order, monkeypatch):
    monkeypatch.setattr(incoming, "FENCE_REPLY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(incoming, "FENCE_WARNING_INTERVAL_S", 0.1)
    async with scene(order) as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        one.give_up()
        await asyncio.sleep(1.0)
        if order == "shm":  # it may be in the middle of a copy
            assert one.held() == len(one.blocks) and one.d.service.held()["incoming"] == 1
        one.d.pool.check_transfer_owners(one.d.service.held_blocks())
        os.kill(one.process.pid, signal.SIGCONT)
        await until(one.d.idle)
        await nothing_lands(one)


async def test_a_writer_that_dies_standing_still_gives_its_blocks_back(monkeypatch):
    monkeypatch.setattr(incoming, "FENCE_REPLY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(incoming, "FENCE_WARNING_INTERVAL_S", 0.1)
    async with scene("shm") as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        one.give_up()
        await asyncio.sleep(0.5)
        os.kill(one.process.pid, signal.SIGKILL)
        await until(one.d.idle)
